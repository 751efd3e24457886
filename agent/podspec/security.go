package podspec

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/internal/plainfile"
	"github.com/clusterd/clusterd/agent/podmon/api"
)

// security fills the container's identity and confinement from the spec.
// seccompRoot is where Localhost profiles are.
func security(out *api.Container, pod *v1.Pod, c *v1.Container, seccompRoot string) error {
	sc, psc := c.SecurityContext, pod.Spec.SecurityContext
	if sc == nil {
		sc = &v1.SecurityContext{}
	}
	if psc == nil {
		psc = &v1.PodSecurityContext{}
	}
	out.Privileged = isTrue(sc.Privileged)
	out.ReadonlyRootfs = isTrue(sc.ReadOnlyRootFilesystem)
	out.NoNewPrivileges = sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation
	var err error
	if out.Capabilities, err = capabilities(sc.Capabilities); err != nil {
		return err
	}
	if out.Privileged {
		out.Seccomp = "Unconfined"
	} else {
		if sc.ProcMount == nil || *sc.ProcMount == v1.DefaultProcMount {
			out.MaskedPaths = append(api.DefaultMaskedPaths(), thermalThrottle("/sys")...)
			out.ReadonlyPaths = api.DefaultReadonlyPaths()
		}
		p := sc.SeccompProfile
		if p == nil {
			p = psc.SeccompProfile
		}
		if out.Seccomp, err = seccompProfile(p, seccompRoot); err != nil {
			return err
		}
	}
	return nil
}

// thermalThrottle are the directories below sys that count how often each of the
// processors was slowed down for its heat: by them one container can watch what
// others compute. Masked paths are no patterns, so each is named.
func thermalThrottle(sys string) []string {
	found, _ := filepath.Glob(filepath.Join(sys, "devices/system/cpu/cpu[0-9]*/thermal_throttle"))
	return found
}

// seccompProfile names a container's system call filter to podmon: the
// runtime's own unless the spec says otherwise.
func seccompProfile(p *v1.SeccompProfile, root string) (string, error) {
	switch {
	case p == nil || p.Type == v1.SeccompProfileTypeRuntimeDefault:
		return "RuntimeDefault", nil
	case p.Type == v1.SeccompProfileTypeUnconfined:
		return "Unconfined", nil
	case p.Type != v1.SeccompProfileTypeLocalhost || p.LocalhostProfile == nil:
		return "", createError{fmt.Errorf("seccompProfile.type %q: want RuntimeDefault, Unconfined, or Localhost with a localhostProfile", p.Type)}
	case !filepath.IsLocal(*p.LocalhostProfile):
		return "", createError{fmt.Errorf("seccompProfile.localhostProfile %q: want a path below %s", *p.LocalhostProfile, root)}
	}
	file := filepath.Join(root, *p.LocalhostProfile)
	if st, err := os.Stat(file); err != nil {
		return "", createError{fmt.Errorf("seccompProfile.localhostProfile %q: %w: put the profile there on this node", *p.LocalhostProfile, err)}
	} else if !st.Mode().IsRegular() {
		return "", createError{fmt.Errorf("seccompProfile.localhostProfile %q: %s is not a file", *p.LocalhostProfile, file)}
	}
	return file, nil
}

// identity decides the user and groups: the spec's numbers before the image's
// USER, which may be names of the image's own passwd and group files.
func identity(out *api.Container, pod *v1.Pod, c *v1.Container, imageUser, rootfs string) error {
	sc, psc := c.SecurityContext, pod.Spec.SecurityContext
	if sc == nil {
		sc = &v1.SecurityContext{}
	}
	if psc == nil {
		psc = &v1.PodSecurityContext{}
	}
	user, group := firstOf(sc.RunAsUser, psc.RunAsUser), firstOf(sc.RunAsGroup, psc.RunAsGroup)
	nonRoot := isTrue(psc.RunAsNonRoot)
	if sc.RunAsNonRoot != nil {
		nonRoot = *sc.RunAsNonRoot
	}
	id := account{}
	var err error
	if user != nil {
		id, err = lookup(rootfs, strconv.FormatInt(*user, 10))
	} else {
		name, _, _ := strings.Cut(imageUser, ":")
		if nonRoot && name != "" {
			if _, perr := strconv.Atoi(name); perr != nil {
				return fmt.Errorf("container has runAsNonRoot and image has non-numeric user (%s), cannot verify user is non-root (pod: \"%s_%s(%s)\", container: %s)",
					name, pod.Name, pod.Namespace, pod.UID, c.Name)
			}
		}
		id, err = lookup(rootfs, imageUser)
	}
	if err != nil {
		return createError{err}
	}
	for _, n := range append([]int64{id.uid, id.gid}, id.groups...) {
		if n < 0 || n > math.MaxInt32 {
			return createError{fmt.Errorf("user or group %d of the image's USER %q or of its /etc/passwd or /etc/group: must be between 0 and %d; set securityContext.runAsUser and runAsGroup", n, imageUser, math.MaxInt32)}
		}
	}
	if nonRoot && id.uid == 0 {
		if user != nil {
			return fmt.Errorf("container's runAsUser breaks non-root policy (pod: \"%s_%s(%s)\", container: %s)", pod.Name, pod.Namespace, pod.UID, c.Name)
		}
		return fmt.Errorf("container has runAsNonRoot and image will run as root (pod: \"%s_%s(%s)\", container: %s)", pod.Name, pod.Namespace, pod.UID, c.Name)
	}
	out.UID, out.GID = uint32(id.uid), uint32(id.gid)
	if group != nil {
		out.GID = uint32(*group)
	}
	extra := []int64{}
	if p := psc.SupplementalGroupsPolicy; p == nil || *p == v1.SupplementalGroupsPolicyMerge {
		extra = append(extra, id.groups...)
	}
	extra = append(extra, psc.SupplementalGroups...)
	if psc.FSGroup != nil {
		extra = append(extra, *psc.FSGroup)
	}
	slices.Sort(extra)
	for _, g := range slices.Compact(extra) {
		out.ExtraGIDs = append(out.ExtraGIDs, uint32(g))
	}
	return nil
}

func firstOf(ps ...*int64) *int64 {
	for _, p := range ps {
		if p != nil {
			return p
		}
	}
	return nil
}

type account struct {
	uid, gid int64
	groups   []int64
}

// maxAccounts bounds how much of an image's passwd and group files is read.
const maxAccounts = 1 << 20

// lookup resolves USER[:GROUP], names or numbers, in the root file system.
func lookup(rootfs, spec string) (account, error) {
	user, group, _ := strings.Cut(spec, ":")
	a := account{}
	name := user
	n, err := strconv.ParseInt(user, 10, 64)
	numeric := err == nil
	if numeric {
		a.uid = n
	}
	if user == "" {
		name, numeric = "0", true
	}
	found := false
	err = eachLine(rootfs, "etc/passwd", func(f []string) {
		if found || len(f) < 4 || (numeric && f[2] != name) || (!numeric && f[0] != name) {
			return
		}
		uid, err1 := strconv.ParseInt(f[2], 10, 64)
		gid, err2 := strconv.ParseInt(f[3], 10, 64)
		if err1 == nil && err2 == nil {
			found, a.uid, a.gid, name = true, uid, gid, f[0]
		}
	})
	if err != nil {
		return a, err
	}
	if !found && !numeric {
		return a, fmt.Errorf("unable to find user %s: no matching entries in passwd file", user)
	}
	groupFound := group == ""
	if g, err := strconv.ParseInt(group, 10, 64); err == nil {
		a.gid, groupFound = g, true
	}
	err = eachLine(rootfs, "etc/group", func(f []string) {
		if len(f) < 3 {
			return
		}
		gid, err := strconv.ParseInt(f[2], 10, 64)
		if err != nil {
			return
		}
		if !groupFound && f[0] == group {
			a.gid, groupFound = gid, true
		}
		if found && group == "" && len(f) > 3 && slices.Contains(strings.Split(f[3], ","), name) {
			a.groups = append(a.groups, gid)
		}
	})
	if err == nil && !groupFound {
		err = fmt.Errorf("unable to find group %s: no matching entries in group file", group)
	}
	return a, err
}

// eachLine calls fn with the colon-separated fields of each line of a file
// inside the root file system, which must be a regular one of bounded size;
// links cannot lead outside of it.
func eachLine(rootfs, name string, fn func(fields []string)) error {
	f, err := plainfile.OpenInRoot(rootfs, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the image's %s: %w", name, err)
	}
	b, err := plainfile.Read(f, maxAccounts)
	if err != nil {
		return fmt.Errorf("the image's %s %w", name, err)
	}
	for line := range strings.Lines(string(b)) {
		fn(strings.Split(strings.TrimRight(line, "\r\n"), ":"))
	}
	return nil
}
