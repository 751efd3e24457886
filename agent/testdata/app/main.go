// App is what the agent's tests run in containers: one small static program
// with a few verbs.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	verb, args := os.Args[1], os.Args[2:]
	switch verb {
	case "serve": // HTTP on a port until TERM: /env, /file?name=, /stat?name=, /fill?name=&size=&mode=, /tmpfs?name=, /hostname
		term := make(chan os.Signal, 1)
		signal.Notify(term, syscall.SIGTERM)
		http.HandleFunc("/env", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintln(w, strings.Join(os.Environ(), "\n"))
		})
		http.HandleFunc("/file", func(w http.ResponseWriter, r *http.Request) {
			b, err := os.ReadFile(r.URL.Query().Get("name"))
			if err != nil {
				http.Error(w, err.Error(), http.StatusNotFound)
				return
			}
			_, _ = w.Write(b)
		})
		http.HandleFunc("/fill", func(w http.ResponseWriter, r *http.Request) { // a file of so many bytes
			q := r.URL.Query()
			n, err := strconv.Atoi(q.Get("size"))
			if err == nil {
				err = os.WriteFile(q.Get("name"), make([]byte, n), 0o644)
			}
			if mode, merr := strconv.Atoi(q.Get("mode")); err == nil && merr == nil {
				err = os.Chmod(q.Get("name"), os.FileMode(mode))
			}
			fmt.Fprintln(w, err)
		})
		http.HandleFunc("/tmpfs", func(w http.ResponseWriter, r *http.Request) { // mounts one on a new folder
			name := r.URL.Query().Get("name")
			err := os.Mkdir(name, 0o755)
			if err == nil {
				err = syscall.Mount("tmpfs", name, "tmpfs", 0, "")
			}
			fmt.Fprintln(w, err)
		})
		http.HandleFunc("/stat", func(w http.ResponseWriter, r *http.Request) { // mode, uid, gid
			st, err := os.Stat(r.URL.Query().Get("name"))
			if err != nil {
				fmt.Fprintln(w, err)
				return
			}
			sys := st.Sys().(*syscall.Stat_t)
			fmt.Fprintln(w, st.Mode(), sys.Uid, sys.Gid)
		})
		http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
			h, _ := os.Hostname()
			fmt.Fprintln(w, h)
		})
		fmt.Println("serving on", args[0])
		go func() {
			fmt.Println(http.ListenAndServe(":"+args[0], nil))
			os.Exit(1)
		}()
		<-term
		fmt.Println("bye")
	case "exit":
		code, _ := strconv.Atoi(args[0])
		if len(args) > 1 {
			fmt.Println(args[1])
		}
		os.Exit(code)
	case "message": // leaves a termination message
		_ = os.WriteFile("/dev/termination-log", []byte(args[0]), 0o644)
		os.Exit(3)
	case "hog": // memory until killed
		var all [][]byte
		for {
			b := make([]byte, 1<<20)
			for i := range b {
				b[i] = 1
			}
			all = append(all, b)
		}
	case "cat":
		b, err := os.ReadFile(args[0])
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Stdout.Write(b)
	case "copy": // stdin to stdout
		_, _ = io.Copy(os.Stdout, os.Stdin)
	case "write":
		if err := os.WriteFile(args[0], []byte(args[1]), 0o644); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	case "owner": // of each file: UID GID MODE
		for _, name := range args {
			var st syscall.Stat_t
			if err := syscall.Lstat(name, &st); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			fmt.Printf("%d %d %o\n", st.Uid, st.Gid, st.Mode&0o7777)
		}
	case "chown": // FILE UID GID
		uid, _ := strconv.Atoi(args[1])
		gid, _ := strconv.Atoi(args[2])
		if err := os.Chown(args[0], uid, gid); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	case "mknod": // a memory device, which only the machine's root may make
		if err := syscall.Mknod(args[0], syscall.S_IFCHR|0o600, 1<<8|1); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	case "env":
		fmt.Println(strings.Join(os.Environ(), "\n"))
	case "id":
		groups, _ := os.Getgroups()
		fmt.Println(os.Getuid(), os.Getgid(), groups)
	}
}
