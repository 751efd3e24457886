package podspec

import (
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// signals by name, without SIG: signal(7) on amd64 and arm64.
var signals = map[string]int{
	"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "IOT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "USR1": 10, "SEGV": 11,
	"USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15, "STKFLT": 16, "CHLD": 17, "CLD": 17, "CONT": 18, "STOP": 19, "TSTP": 20, "TTIN": 21,
	"TTOU": 22, "URG": 23, "XCPU": 24, "XFSZ": 25, "VTALRM": 26, "PROF": 27, "WINCH": 28, "IO": 29, "POLL": 29, "PWR": 30, "SYS": 31,
	"RTMIN": rtMin, "RTMAX": rtMax,
}

const (
	sigTerm = 15
	SigKill = 9
	rtMin   = 34 // the C library keeps two for itself
	rtMax   = 64
)

// StopSignal is the spec's, the image's, or SIGTERM.
func StopSignal(spec *v1.Container, image string) int {
	if spec != nil && spec.Lifecycle != nil && spec.Lifecycle.StopSignal != nil {
		if n, ok := parseSignal(string(*spec.Lifecycle.StopSignal)); ok {
			return n
		}
	}
	if n, ok := parseSignal(image); ok {
		return n
	}
	return sigTerm
}

// parseSignal reads "SIGTERM", "term", "15", "SIGRTMIN+3".
func parseSignal(name string) (n int, ok bool) {
	if n, err := strconv.Atoi(name); err == nil {
		return n, n > 0 && n <= rtMax
	}
	name = strings.TrimPrefix(strings.ToUpper(name), "SIG")
	if n, ok := signals[name]; ok {
		return n, true
	}
	base, sign := rtMin, 1
	count, found := strings.CutPrefix(name, "RTMIN+")
	if !found {
		base, sign = rtMax, -1
		count, found = strings.CutPrefix(name, "RTMAX-")
	}
	if i, err := strconv.Atoi(count); found && err == nil && i >= 0 && i <= rtMax-rtMin {
		return base + sign*i, true
	}
	return 0, false
}

// signalName is a signal as the API writes it.
func signalName(n int) string {
	switch {
	case n == rtMin:
		return "SIGRTMIN"
	case n == rtMax:
		return "SIGRTMAX"
	case n > rtMin && n <= rtMin+15:
		return "SIGRTMIN+" + strconv.Itoa(n-rtMin)
	case n > rtMin+15 && n < rtMax:
		return "SIGRTMAX-" + strconv.Itoa(rtMax-n)
	}
	for _, name := range []v1.Signal{
		v1.SIGHUP, v1.SIGINT, v1.SIGQUIT, v1.SIGILL, v1.SIGTRAP, v1.SIGABRT, v1.SIGBUS, v1.SIGFPE, v1.SIGKILL, v1.SIGUSR1, v1.SIGSEGV,
		v1.SIGUSR2, v1.SIGPIPE, v1.SIGALRM, v1.SIGTERM, v1.SIGSTKFLT, v1.SIGCHLD, v1.SIGCONT, v1.SIGSTOP, v1.SIGTSTP, v1.SIGTTIN,
		v1.SIGTTOU, v1.SIGURG, v1.SIGXCPU, v1.SIGXFSZ, v1.SIGVTALRM, v1.SIGPROF, v1.SIGWINCH, v1.SIGIO, v1.SIGPWR, v1.SIGSYS,
	} {
		if got, _ := parseSignal(string(name)); got == n {
			return string(name)
		}
	}
	return ""
}
