// Box is the program that test containers run: a handful of commands.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	args := os.Args[1:]
	if len(args) == 0 {
		fail("no command")
	}
	cmd, args := args[0], args[1:]
	switch cmd {
	case "true":
	case "exit":
		os.Exit(number(args[0]))
	case "echo":
		fmt.Println(strings.Join(args, " "))
	case "echoerr":
		fmt.Fprintln(os.Stderr, strings.Join(args, " "))
	case "print": // without a newline
		fmt.Print(args[0])
	case "repeat": // a line of N letters
		fmt.Println(strings.Repeat("x", number(args[0])))
	case "count": // N numbered lines
		w := bufio.NewWriter(os.Stdout)
		for i := range number(args[0]) {
			fmt.Fprintln(w, "line", i)
		}
		w.Flush()
	case "cat":
		if len(args) == 0 {
			if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
				fail(err)
			}
		}
		for _, p := range args {
			b, err := os.ReadFile(p)
			if err != nil {
				fail(err)
			}
			os.Stdout.Write(b)
		}
	case "modes": // which of stdin, stdout, stderr block
		for fd := range uintptr(3) {
			flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_GETFL, 0)
			fmt.Println(fd, "blocks:", errno == 0 && flags&syscall.O_NONBLOCK == 0)
		}
	case "write":
		if err := os.WriteFile(args[0], []byte(args[1]), 0o644); err != nil {
			fail(err)
		}
	case "nap": // N seconds
		time.Sleep(time.Duration(number(args[0])) * time.Second)
	case "await": // until a file has a word; then write an empty file
		for {
			if b, err := os.ReadFile(args[0]); err == nil && strings.Contains(string(b), args[1]) {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		if err := os.WriteFile(args[2], nil, 0o644); err != nil {
			fail(err)
		}
	case "keep": // standard input and the environment, as a line at the end of a file
		f, err := os.OpenFile(args[0], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			fail(err)
		}
		in, err := io.ReadAll(os.Stdin)
		if err != nil {
			fail(err)
		}
		fmt.Fprintf(f, "%s %s\n", in, strings.Join(os.Environ(), " "))
		f.Close()
	case "ls":
		names, err := filepath.Glob(args[0] + "/*")
		if err != nil {
			fail(err)
		}
		fmt.Println(strings.Join(names, " "))
	case "env":
		for _, kv := range os.Environ() {
			fmt.Println(kv)
		}
	case "pwd":
		wd, err := os.Getwd()
		fmt.Println(wd, err)
	case "id":
		groups, _ := os.Getgroups()
		fmt.Println(os.Getuid(), os.Getgid(), groups)
	case "hostname":
		h, err := os.Hostname()
		fmt.Println(h, err)
	case "sleep": // until TERM, then exit 0; "ready" once it can
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Println("ready")
		<-c
		fmt.Println("bye")
	case "tick": // a numbered line whenever asked by USR1, until TERM
		c := make(chan os.Signal, 100)
		signal.Notify(c, syscall.SIGTERM, syscall.SIGUSR1)
		fmt.Println("ready")
		for i := 0; <-c == syscall.SIGUSR1; i++ {
			fmt.Println("tick", i)
		}
		os.Exit(7)
	case "prompt": // prints the first, and at TERM the second
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Print(args[0])
		<-c
		fmt.Print(args[1])
	case "lastword": // until TERM, then a last line and that exit code
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		fmt.Println("ready")
		<-c
		fmt.Println("last word")
		os.Exit(number(args[0]))
	case "breed": // another one that hogs memory; lives on when it is killed
		if err := exec.Command("/bin/box", "hog").Run(); err != nil {
			fmt.Println("child:", err)
		}
		time.Sleep(time.Hour)
	case "hog": // memory until killed
		var keep [][]byte
		for {
			b := make([]byte, 1<<20)
			for i := range b {
				b[i] = 1
			}
			keep = append(keep, b)
			_ = keep
		}
	case "orphan": // leaves a process behind
		c := exec.Command("/bin/box", "sleep")
		if err := c.Start(); err != nil {
			fail(err)
		}
		fmt.Println("left", c.Process.Pid)
	case "mount":
		if err := syscall.Mount("none", "/tmp", "tmpfs", 0, ""); err != nil {
			fail(err)
		}
	case "unshare":
		if err := syscall.Unshare(syscall.CLONE_NEWUSER); err != nil {
			fail(err)
		}
	case "size": // the terminal's, once it has changed
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGWINCH)
		fmt.Println("ready")
		<-c
		fmt.Println(termSize())
	case "wait":
		time.Sleep(time.Duration(number(args[0])) * time.Millisecond)
	default:
		fail("unknown command " + cmd)
	}
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		fail(err)
	}
	return n
}

func fail(what any) {
	fmt.Fprintln(os.Stderr, what)
	os.Exit(1)
}
