// Package pause links the pause process into podmon: see pause.c. Importing it
// is all there is to do; `podmon pause-maker …` then never reaches Go.
package pause

// #cgo CFLAGS: -Wall -Wextra
import "C"
