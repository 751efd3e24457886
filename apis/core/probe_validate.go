package core

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// validateHooks checks probes and lifecycle handlers of a container that keeps
// running.
func validateHooks(c *corev1.Container, spec *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if p := c.LivenessProbe; p != nil {
		errs = append(errs, validateProbe(p, at.Child("livenessProbe"))...)
		errs = append(errs, wantOneSuccess(p, at.Child("livenessProbe"))...)
	}
	if p := c.StartupProbe; p != nil {
		errs = append(errs, validateProbe(p, at.Child("startupProbe"))...)
		errs = append(errs, wantOneSuccess(p, at.Child("startupProbe"))...)
	}
	if p := c.ReadinessProbe; p != nil {
		errs = append(errs, validateProbe(p, at.Child("readinessProbe"))...)
		if p.TerminationGracePeriodSeconds != nil {
			errs = append(errs, field.Invalid(at.Child("readinessProbe", "terminationGracePeriodSeconds"), *p.TerminationGracePeriodSeconds, "must not be set for readinessProbes"))
		}
	}
	if l := c.Lifecycle; l != nil {
		at := at.Child("lifecycle")
		if l.PostStart != nil {
			errs = append(errs, validateLifecycleHandler(l.PostStart, spec, at.Child("postStart"))...)
		}
		if l.PreStop != nil {
			errs = append(errs, validateLifecycleHandler(l.PreStop, spec, at.Child("preStop"))...)
		}
		if l.StopSignal != nil {
			errs = append(errs, validateStopSignal(*l.StopSignal, spec.OS, at.Child("stopSignal"))...)
		}
	}
	return errs
}

// validateStopSignal: which signals there are depends on the system.
func validateStopSignal(signal corev1.Signal, os *corev1.PodOS, at *field.Path) field.ErrorList {
	switch {
	case os == nil:
		return field.ErrorList{field.Forbidden(at, "may not be set for containers with empty `spec.os.name`")}
	case os.Name == corev1.Windows:
		return check.OneOf(at, signal, corev1.SIGTERM, corev1.SIGKILL)
	}
	return check.OneOf(at, signal, linuxSignals()...)
}

// linuxSignals are those that the API knows of Linux.
func linuxSignals() []corev1.Signal {
	out := []corev1.Signal{
		corev1.SIGABRT, corev1.SIGALRM, corev1.SIGBUS, corev1.SIGCHLD, corev1.SIGCLD, corev1.SIGCONT, corev1.SIGFPE, corev1.SIGHUP,
		corev1.SIGILL, corev1.SIGINT, corev1.SIGIO, corev1.SIGIOT, corev1.SIGKILL, corev1.SIGPIPE, corev1.SIGPOLL, corev1.SIGPROF,
		corev1.SIGPWR, corev1.SIGQUIT, corev1.SIGSEGV, corev1.SIGSTKFLT, corev1.SIGSTOP, corev1.SIGSYS, corev1.SIGTERM, corev1.SIGTRAP,
		corev1.SIGTSTP, corev1.SIGTTIN, corev1.SIGTTOU, corev1.SIGURG, corev1.SIGUSR1, corev1.SIGUSR2, corev1.SIGVTALRM,
		corev1.SIGWINCH, corev1.SIGXCPU, corev1.SIGXFSZ, corev1.SIGRTMIN, corev1.SIGRTMAX,
	}
	for i := 1; i <= 15; i++ {
		out = append(out, corev1.Signal(fmt.Sprintf("SIGRTMIN+%d", i)))
	}
	for i := 1; i <= 14; i++ {
		out = append(out, corev1.Signal(fmt.Sprintf("SIGRTMAX-%d", i)))
	}
	return out
}

// wantOneSuccess: a container that runs need not prove it twice.
func wantOneSuccess(p *corev1.Probe, at *field.Path) field.ErrorList {
	if p.SuccessThreshold != 1 {
		return field.ErrorList{field.Invalid(at.Child("successThreshold"), p.SuccessThreshold, "must be 1")}
	}
	return nil
}

func validateProbe(p *corev1.Probe, at *field.Path) field.ErrorList {
	errs := validateHandler([]handler{
		execHandler(p.Exec), httpHandler(p.HTTPGet), tcpHandler(p.TCPSocket), grpcHandler(p.GRPC),
	}, at)
	for _, f := range []struct {
		name  string
		value int32
	}{
		{"initialDelaySeconds", p.InitialDelaySeconds},
		{"timeoutSeconds", p.TimeoutSeconds},
		{"periodSeconds", p.PeriodSeconds},
		{"successThreshold", p.SuccessThreshold},
		{"failureThreshold", p.FailureThreshold},
	} {
		errs = append(errs, check.NonNegative(at.Child(f.name), int64(f.value))...)
	}
	if grace := p.TerminationGracePeriodSeconds; grace != nil && *grace <= 0 {
		errs = append(errs, field.Invalid(at.Child("terminationGracePeriodSeconds"), *grace, "must be greater than 0"))
	}
	return errs
}

func validateLifecycleHandler(h *corev1.LifecycleHandler, spec *corev1.PodSpec, at *field.Path) field.ErrorList {
	return validateHandler([]handler{
		execHandler(h.Exec), httpHandler(h.HTTPGet), tcpHandler(h.TCPSocket), sleepHandler(h.Sleep, spec.TerminationGracePeriodSeconds),
	}, at)
}

// handler is one way to act on a container; validate is nil if it is not used.
type handler struct {
	name     string
	validate func(at *field.Path) field.ErrorList
}

// validateHandler wants exactly one of handlers, and that one sound.
func validateHandler(handlers []handler, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	used := 0
	for _, h := range handlers {
		if h.validate == nil {
			continue
		}
		if used++; used > 1 {
			errs = append(errs, field.Forbidden(at.Child(h.name), "may not specify more than 1 handler type"))
			continue
		}
		errs = append(errs, h.validate(at.Child(h.name))...)
	}
	if used == 0 {
		errs = append(errs, field.Required(at, "must specify a handler type"))
	}
	return errs
}

func execHandler(action *corev1.ExecAction) handler {
	if action == nil {
		return handler{}
	}
	return handler{"exec", func(at *field.Path) field.ErrorList {
		if len(action.Command) == 0 {
			return field.ErrorList{field.Required(at.Child("command"), "")}
		}
		return nil
	}}
}

func httpHandler(action *corev1.HTTPGetAction) handler {
	if action == nil {
		return handler{}
	}
	return handler{"httpGet", func(at *field.Path) field.ErrorList {
		errs := check.RequiredText(at.Child("path"), action.Path, nil)
		errs = append(errs, check.Port(at.Child("port"), action.Port)...)
		errs = append(errs, check.OneOf(at.Child("scheme"), action.Scheme, corev1.URISchemeHTTP, corev1.URISchemeHTTPS)...)
		for i, header := range action.HTTPHeaders {
			errs = append(errs, check.Text(at.Child("httpHeaders").Index(i).Child("name"), header.Name, validation.IsHTTPHeaderName)...)
		}
		return errs
	}}
}

func tcpHandler(action *corev1.TCPSocketAction) handler {
	if action == nil {
		return handler{}
	}
	return handler{"tcpSocket", func(at *field.Path) field.ErrorList { return check.Port(at.Child("port"), action.Port) }}
}

func grpcHandler(action *corev1.GRPCAction) handler {
	if action == nil {
		return handler{}
	}
	return handler{"grpc", func(at *field.Path) field.ErrorList { return check.PortNumber(at.Child("port"), action.Port) }}
}

func sleepHandler(action *corev1.SleepAction, grace *int64) handler {
	if action == nil {
		return handler{}
	}
	return handler{"sleep", func(at *field.Path) field.ErrorList {
		if grace != nil && (action.Seconds < 0 || action.Seconds > *grace) {
			return field.ErrorList{field.Invalid(at.Child("seconds"), action.Seconds,
				fmt.Sprintf("must be non-negative and less than terminationGracePeriodSeconds (%d)", *grace))}
		}
		return nil
	}}
}
