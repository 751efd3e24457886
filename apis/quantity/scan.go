package quantity

import "bytes"

// Suspicious reports whether text as it is, protobuf or a quantity's own, holds what may
// be a quantity out of bounds: an exponent of three or more digits, whatever is before
// it, or more digits one after the other than a quantity may have. All bodies are looked
// at, so it is quick, and most have none.
func Suspicious(text []byte) bool {
	run := 0 // digits before i
	for i, c := range text {
		switch {
		case digit(c):
			if run++; run == maxLength {
				return true
			}
			continue
		case (c == 'e' || c == 'E') && exponent(text, i):
			return true
		}
		run = 0
	}
	return false
}

// SuspiciousJSON is Suspicious for JSON, where characters can be written by number.
func SuspiciousJSON(data []byte) bool {
	return Suspicious(data) || bytes.Contains(data, []byte(`\u00`))
}

// exponents reports whether text holds an exponent that is too large.
func exponents(text []byte) bool {
	for i := range text {
		if exponent(text, i) {
			return true
		}
	}
	return false
}

// exponent reports whether one that is too large begins at i. What is before it does not
// matter: ParseQuantity takes a number without digits for 0, and keeps its exponent.
func exponent(text []byte, i int) bool {
	if c := text[i]; c != 'e' && c != 'E' {
		return false
	}
	j := i + 1
	if j < len(text) && (text[j] == '+' || text[j] == '-') {
		j++
	}
	if j+maxDigits >= len(text) {
		return false
	}
	for _, c := range text[j : j+maxDigits+1] {
		if !digit(c) {
			return false
		}
	}
	return true
}

func digit(c byte) bool { return '0' <= c && c <= '9' }
