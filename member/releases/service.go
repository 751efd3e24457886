package releases

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strconv"
	"strings"
	"time"
)

// ownCgroup says in which unit of systemd this process is. Tests replace it.
var ownCgroup = "/proc/self/cgroup"

// serviceWithin is how long systemd may take to find that a node has ended.
const serviceWithin = 2 * time.Minute

// startService starts the node's unit if systemd does not: one whose exit code is not to
// be started again (RestartPreventExitStatus=), or that failed too often in a row, stays
// down, and so would the program before, which has not failed. A unit that somebody has
// stopped is left alone, as is a service manager that is not systemd.
func startService(pid int, say func(string, ...any)) error {
	b, err := os.ReadFile(ownCgroup)
	if err != nil {
		return err
	}
	unit := unitOf(b)
	if unit == "" {
		return nil
	}
	for deadline := time.Now().Add(serviceWithin); time.Now().Before(deadline); time.Sleep(look) {
		out, err := systemctl("show", "-p", "ActiveState", "-p", "MainPID", "-p", "Result", unit)
		if err != nil {
			return err
		}
		now := properties(out)
		if now["MainPID"] == strconv.Itoa(pid) {
			continue // it has not noticed
		}
		switch now["ActiveState"] {
		case "active", "activating", "reloading", "refreshing":
			return nil
		case "failed", "inactive":
		default: // "deactivating"
			continue
		}
		switch now["Result"] {
		case "success", "timeout":
			say("unit %s was stopped (%s): it is left so", unit, now["Result"])
			return nil
		}
		say("systemd does not start unit %s again (%s): it is started", unit, now["Result"])
		if _, err := systemctl("reset-failed", unit); err != nil {
			return err
		}
		_, err = systemctl("start", "--no-block", unit)
		return err
	}
	return fmt.Errorf("systemd does not say within %s that unit %s has ended: start it with `systemctl restart %s`", serviceWithin, unit, unit)
}

func systemctl(args ...string) ([]byte, error) {
	out, err := exec.Command("systemctl", args...).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("systemctl %s: %w: %.300s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return out, nil
}

// unitOf is the service that a process is in, by its cgroups; "": none of systemd's.
func unitOf(cgroups []byte) string {
	for line := range strings.Lines(string(cgroups)) {
		// hierarchy:controllers:path, where systemd's is named, or that of version 2.
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) < 3 || f[1] != "" && f[1] != "name=systemd" {
			continue
		}
		if name := path.Base(f[2]); strings.HasSuffix(name, ".service") {
			return name
		}
	}
	return ""
}

// properties reads what `systemctl show` prints.
func properties(out []byte) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			all[name] = value
		}
	}
	return all
}
