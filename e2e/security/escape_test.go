package security

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

const escapeImage = "clusterd.local/escape:1"

// metadata is where clouds tell machines of themselves.
var metadata = netip.MustParseAddr("169.254.169.254")

// escaper is a pod on a1 that runs the helper program as root.
func escaper(name string, args ...string) *corev1.Pod {
	p := pod(name, args...)
	p.Spec.NodeName, p.Spec.RestartPolicy = "a1", corev1.RestartPolicyNever
	p.Spec.Containers[0].Image = escapeImage
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsUser: ptr.To[int64](0)}
	return p
}

// canary is a file of the node that no pod may see, in a directory that none may change.
func (s *suite) canary() string {
	s.t.Helper()
	file := filepath.Join(s.dir, "canary", "secret")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		s.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("canary of the node\n"), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return file
}

// untouched says what has become of the canary's directory.
func (s *suite) untouched() error {
	dir := filepath.Join(s.dir, "canary")
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		if e.Name() != "secret" {
			return fmt.Errorf("%s/%s is new", dir, e.Name())
		}
	}
	st, err := os.Lstat(filepath.Join(dir, "secret"))
	if err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(dir, "secret"))
	if err != nil || string(b) != "canary of the node\n" || st.Mode() != 0o600 {
		return fmt.Errorf("the canary is %q, %s (%v)", b, st.Mode(), err)
	}
	return nil
}

// ways are the lines of the helper program, by name.
func ways(text string) (names []string, isOpen map[string]bool, said map[string]string) {
	isOpen, said = map[string]bool{}, map[string]string{}
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSpace(line), "\t", 3)
		if len(f) == 3 {
			names = append(names, f[0])
			isOpen[f[0]], said[f[0]] = f[1] == "OPEN", f[2]
		}
	}
	return names, isOpen, said
}

// ajar are ways that are open from a privileged pod among the node's processes on any
// kernel: they show that the program finds what is open.
var ajar = []string{
	"mount proc", "mount tmpfs", "mount cgroup v2", "mount the root elsewhere", "mount the root shared", "unmount a masked file",
	"fsopen", "open_tree", "pivot_root", "swapon", "unshare mounts", "unshare network", "unshare names", "unshare users", "clone with users and mounts",
	"write /proc/sys/kernel/core_pattern", "write /proc/sys/vm/drop_caches", "read /proc/kmsg",
	"add_key", "bpf", "reboot", "settimeofday", "acct", "syslog", "see processes of the node", "run before all others",
	"open the device loop0", "open the device kmsg", "open the device fuse",
}

// listens accepts connections at an address of a1's network and counts them.
func (s *suite) listens(addr string) (port uint16, stop func()) {
	s.t.Helper()
	var ln net.Listener
	if err := s.Do("a1", func() (err error) {
		ln, err = net.Listen("tcp", addr)
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	return uint16(ln.Addr().(*net.TCPAddr).Port), func() { _ = ln.Close(); <-done }
}

// escapes is a container of default settings, whose process is root in it.
func escapes(s *suite) []attack {
	canary := s.canary()
	pattern, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	if err != nil {
		s.t.Fatal(err)
	}
	// What listens on the node: on its loopback, and where a cloud's metadata are.
	loopback, stop := s.listens("127.0.0.1:0")
	defer stop()
	if err := s.Do("a1", func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: metadata.AsSlice(), Mask: net.CIDRMask(32, 32)}})
	}); err != nil {
		s.t.Fatal(err)
	}
	cloud, stopCloud := s.listens(metadata.String() + ":0")
	defer stopCloud()

	s.create(escaper("victim", "listen"))
	victim := s.ready("victim")
	p := escaper("attacker", "attack")
	p.Spec.Containers[0].Env = []corev1.EnvVar{
		{Name: "CANARY", Value: canary}, {Name: "NODE_IP", Value: s.node("a1").Addr.String()}, {Name: "VICTIM_IP", Value: victim.Status.PodIP},
		{Name: "LOOPBACK_PORT", Value: fmt.Sprint(loopback)}, {Name: "METADATA", Value: fmt.Sprintf("%s:%d", metadata, cloud)},
	}
	p.Spec.Volumes = []corev1.Volume{{Name: "small", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: ptr.To(resource.MustParse("8Mi"))}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "small", MountPath: "/small"}}
	s.create(p)

	loose := escaper("privileged", "gentle")
	loose.Spec.HostPID = true
	loose.Spec.Containers[0].SecurityContext.Privileged = ptr.To(true)
	loose.Spec.Containers[0].Env = p.Spec.Containers[0].Env[:1]
	s.create(loose)

	s.ended("attacker")
	text := s.logs("attacker")
	if !strings.HasSuffix(text, "done\n") {
		s.t.Fatalf("the program did not come to its end:\n%s", text)
	}
	s.ended("privileged")
	_, control, why := ways(s.logs("privileged"))
	names, isOpen, said := ways(text)
	var out []attack
	for _, name := range names {
		if strings.HasPrefix(name, "send ") { // what comes of it, the victim tells
			continue
		}
		a := attack{name: name, try: func(*suite) verdict { return verdict{open: isOpen[name], said: said[name]} }}
		if slices.Contains(ajar, name) {
			a.control = func(*suite) error {
				if !control[name] {
					return fmt.Errorf("it is shut in a privileged pod, too: %s", why[name])
				}
				return nil
			}
		}
		out = append(out, a)
	}
	// What was sent: the victim has the honest packet, and so had all before it.
	var heard string
	s.eventually("the honest packet arrives", func(context.Context) error {
		if heard = s.logs("victim"); !strings.Contains(heard, `"honest"`) {
			return errors.New(heard)
		}
		return nil
	})
	for _, word := range []string{"forged-ip", "forged-node", "forged-mac"} {
		out = append(out, attack{name: "a packet that is " + word + " arrives", control: func(*suite) error {
			if !strings.Contains(heard, `"honest"`) {
				return errors.New(heard)
			}
			return nil
		}, try: func(*suite) verdict {
			if strings.Contains(heard, word) {
				return verdict{open: true, said: heard}
			}
			return shut("the victim has the honest packet alone")
		}})
	}
	out = append(out,
		attack{name: "ARP changes whom the node knows", try: func(s *suite) verdict {
			var list []netlink.Neigh
			if err := s.Do("a1", func() (err error) {
				list, err = netlink.NeighList(0, netlink.FAMILY_V4)
				return err
			}); err != nil {
				return broken(err)
			}
			got, err := s.pod("attacker")
			if err != nil {
				return broken(err)
			}
			byIP := map[string]string{}
			for _, n := range list {
				byIP[n.IP.String()] = n.HardwareAddr.String()
			}
			attackerMAC := byIP[got.Status.PodIP]
			if attackerMAC != "" && byIP[victim.Status.PodIP] == attackerMAC {
				return open("the victim's address is at %s", attackerMAC)
			}
			return shut("the victim's address is at %s", byIP[victim.Status.PodIP])
		}},
		attack{name: "the node's core_pattern is another", try: func(*suite) verdict {
			now, err := os.ReadFile("/proc/sys/kernel/core_pattern")
			if err != nil || string(now) != string(pattern) {
				return verdict{open: err == nil, said: string(now), err: err}
			}
			return shut("it is %q as before", strings.TrimSpace(string(now)))
		}},
		attack{name: "the node's files are others", try: func(s *suite) verdict {
			if err := s.untouched(); err != nil {
				return open("%v", err)
			}
			return shut("none is")
		}},
		attack{name: "inodes without end", try: func(s *suite) verdict {
			p := escaper("inodes", "inodes", "/small")
			p.Spec.Volumes = []corev1.Volume{{Name: "small", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: ptr.To(resource.MustParse("8Mi"))}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "small", MountPath: "/small"}}
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("48Mi")}
			s.create(p)
			defer s.remove("inodes")
			got := s.ended("inodes")
			if len(got.Status.ContainerStatuses) == 0 {
				return shut("%s", got.Status.Reason)
			}
			state := got.Status.ContainerStatuses[0].State.Terminated
			return shut("%s, exit code %d: %s", state.Reason, state.ExitCode, strings.TrimSpace(s.logs("inodes")))
		}},
		attack{name: "a disk without end", try: func(s *suite) verdict {
			p := escaper("filler", "fill", "/tmp")
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceEphemeralStorage: resource.MustParse("1Mi")}
			s.create(p)
			defer s.remove("filler")
			got := s.podIs("filler", "evicted", func(p *corev1.Pod) error {
				if p.Status.Phase != corev1.PodFailed {
					return errors.New("it goes on")
				}
				return nil
			})
			if got.Status.Reason != "Evicted" {
				return open("it ended by %q", got.Status.Reason)
			}
			return shut("%s", got.Status.Message)
		}},
		attack{name: "a termination message outside", try: func(s *suite) verdict {
			p := escaper("message", "show", "/nothing")
			p.Spec.Containers[0].TerminationMessagePath = strings.Repeat("../", 40) + filepath.Join(s.dir, "canary", "message")
			s.create(p)
			defer s.remove("message")
			return s.settled("message", nil)
		}},
		attack{name: "a working folder outside", try: func(s *suite) verdict {
			p := escaper("workdir", "show", "secret")
			p.Spec.Containers[0].WorkingDir = strings.Repeat("../", 40) + filepath.Join(s.dir, "canary")
			s.create(p)
			defer s.remove("workdir")
			return s.settled("workdir", nil)
		}},
		subPath("a subPath with steps up", "../../../../../../.."+filepath.Join(s.dir, "canary"), ""),
		subPath("a subPath that is a link", "link", filepath.Join(s.dir, "canary")),
		subPath("a subPath through a link", "link/canary", s.dir),
		subPath("a subPath with a link of steps up", "link", strings.Repeat("../", 40)+filepath.Join(s.dir, "canary")),
		attack{name: "a subPath that changes while it is mounted", try: subPathRace},
		attack{name: "the node is not healthy", try: func(s *suite) verdict {
			if err := s.healthy("a1", "after-escapes"); err != nil {
				return open("%v", err)
			}
			return shut("it is Ready, and pods start")
		}},
	)
	return out
}

// subPath mounts a part of a volume in which the pod has made a link.
func subPath(name, path, target string) attack {
	return attack{name: name, try: func(s *suite) verdict {
		p := escaper("subpath", "show", "/mnt/secret")
		volume := corev1.VolumeMount{Name: "v", MountPath: "/v"}
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		if target != "" {
			link := *p.Spec.Containers[0].DeepCopy()
			link.Name, link.Args, link.VolumeMounts = "link", []string{"link", target, "/v/link"}, []corev1.VolumeMount{volume}
			p.Spec.InitContainers = []corev1.Container{link}
		}
		p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/mnt", SubPath: path}}
		if err := s.tryCreate(p); err != nil {
			return shut("%v", err)
		}
		defer s.remove("subpath")
		return s.settled("subpath", nil)
	}}
}

// subPathRace starts pods that mount a directory which another exchanges for a link to
// the node's files all the while.
func subPathRace(s *suite) verdict {
	dir := filepath.Join(s.dir, "race")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return broken(err)
	}
	volume := corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: dir}}}
	flipper := escaper("flipper", "flip", "/v", "sub", filepath.Join(s.dir, "canary"))
	flipper.Spec.Volumes = []corev1.Volume{volume}
	flipper.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}
	s.create(flipper)
	s.ready("flipper")
	s.eventually("it flips", func(context.Context) error {
		if !strings.Contains(s.logs("flipper"), "flipping") {
			return errors.New("not yet")
		}
		return nil
	})
	var names []string
	for i := range 24 {
		p := escaper(fmt.Sprintf("race-%d", i), "show", "/mnt/secret")
		p.Spec.Volumes = []corev1.Volume{volume}
		p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/mnt", SubPath: "sub"}}
		s.create(p)
		names = append(names, p.Name)
	}
	defer s.remove(append(names, "flipper")...)
	mounted := 0
	for _, name := range names {
		v := s.settled(name, nil)
		if v.open || v.err != nil {
			return v
		}
		if strings.Contains(v.said, "no such file") {
			mounted++
		}
	}
	return shut("of %d pods %d had the folder, and none the link", len(names), mounted)
}
