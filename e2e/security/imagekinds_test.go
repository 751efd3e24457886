package security

import (
	"archive/tar"
	"bytes"
	"fmt"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"k8s.io/utils/ptr"

	corev1 "k8s.io/api/core/v1"
)

// hostile is one image. It must be refused when it is loaded, or do no harm when a pod
// runs it.
type hostile struct {
	name string
	// layers lie over those of the escape image. $CANARY is the node's directory.
	layers [][]entry
	config v1.Config
	change func(p *picture)       // of the parts, before manifest and index are made
	after  func(p *picture)       // of them all
	show   []string               // files that the pod shows
	spec   func(*corev1.Pod)      // of the pod
	is     func(log string) error // what would be wrong in its log
	// refused: there is no harm only in a refusal.
	refused bool
	large   bool // to make, too
}

// fifo, char and block are entries for other things than files.
func fifo(name string) entry { return entry{name: name, typ: tar.TypeFifo, mode: 0o666} }
func char(name string, major, minor int64) entry {
	return entry{name: name, typ: tar.TypeChar, mode: 0o666, major: major, minor: minor}
}
func link(name, to string) entry { return entry{name: name, typ: tar.TypeSymlink, body: to} }
func hard(name, to string) entry { return entry{name: name, typ: tar.TypeLink, body: to} }

const up = "../../../../../../../../../../../../../../../.."

// lacks is wrong when a word is in a pod's log.
func lacks(words ...string) func(string) error {
	return func(log string) error {
		for _, w := range words {
			if strings.Contains(log, w) {
				return fmt.Errorf("%q is in %q", w, log)
			}
		}
		return nil
	}
}

// deviceClosed is wrong when a device was read.
func deviceClosed(log string) error {
	if !strings.Contains(log, "operation not permitted") && !strings.Contains(log, "no such") && !strings.Contains(log, "permission denied") {
		return fmt.Errorf("the device is open: %.100q", log)
	}
	return nil
}

func manyEntries(n int, make func(i int) entry) []entry {
	out := []entry{}
	for i := range n {
		out = append(out, make(i))
	}
	return out
}

// images are all of them but those of registries. They are made when they are needed:
// some are large.
func images() []hostile {
	return []hostile{
		// Names that lead out.
		{name: "a path with steps up", layers: [][]entry{{{name: up + "$CANARY/planted", body: "x"}}}},
		{name: "a path with a step up in the middle", layers: [][]entry{{{name: "a/../../" + up + "$CANARY/planted", body: "x"}}}},
		{name: "an absolute path", layers: [][]entry{{{name: "$CANARY/planted", body: "x"}}}},
		{name: "a path that is a dot", layers: [][]entry{{{name: "..", body: "x"}}}},
		{name: "an empty name", layers: [][]entry{{{name: "", body: "x"}}}},
		{name: "a name with backslashes", layers: [][]entry{{{name: strings.ReplaceAll(up, "/", `\`) + `\planted`, body: "x"}}}},
		{name: "a path of PAX beside another", layers: [][]entry{{{name: "fine", body: "x", pax: map[string]string{"SCHILY.xattr.user.x": "y", "comment": up}}}}},
		{name: "a link and a file behind it", layers: [][]entry{{link("l", "$CANARY"), {name: "l/planted", body: "x"}}}},
		{name: "a link of steps up and a file behind it", layers: [][]entry{{link("l", up+"$CANARY"), {name: "l/planted", body: "x"}}}},
		{name: "a link in the layer below", layers: [][]entry{{link("l", "$CANARY")}, {{name: "l/planted", body: "x"}}}},
		{name: "a folder that becomes a link", layers: [][]entry{{{name: "d/"}}, {link("d", "$CANARY")}, {{name: "d/planted", body: "x"}}}},
		{name: "a file that becomes a folder", layers: [][]entry{{{name: "f", body: "x"}}, {{name: "f/"}, {name: "f/g", body: "x"}}}},
		{name: "a link in place of /etc", layers: [][]entry{{link("etc", "$CANARY")}, {{name: "etc/planted", body: "x"}}}},
		{name: "a link in place of /dev", layers: [][]entry{{link("dev", "$CANARY")}}},
		{name: "a link in place of /proc", layers: [][]entry{{link("proc", "$CANARY")}}},
		{name: "a link in place of /sys", layers: [][]entry{{link("sys", "$CANARY")}}},
		{name: "a link in place of /tmp", layers: [][]entry{{{name: "tmp.old/"}, link("var", "$CANARY")}}},
		{name: "a link in place of the hosts file", layers: [][]entry{{link("etc/hosts", "$CANARY/hosts")}}, show: []string{"/etc/hosts"}},
		{name: "a link in place of resolv.conf", layers: [][]entry{{link("etc/resolv.conf", "$CANARY/secret")}}, show: []string{"/etc/resolv.conf"}},
		{name: "a link where the termination message goes", layers: [][]entry{{link("message", "$CANARY/message")}}, spec: func(p *corev1.Pod) { p.Spec.Containers[0].TerminationMessagePath = "/message" }},
		{name: "a FIFO where the termination message goes", layers: [][]entry{{fifo("message")}}, spec: func(p *corev1.Pod) { p.Spec.Containers[0].TerminationMessagePath = "/message" }},
		{name: "a link where a volume is mounted", layers: [][]entry{{link("data", "$CANARY")}}, spec: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/data/below"}}
		}},
		{name: "links in a circle", layers: [][]entry{{link("a", "b"), link("b", "a"), {name: "a/planted", body: "x"}}}},
		{name: "a link to the secret", layers: [][]entry{{link("leak", "$CANARY/secret")}}, show: []string{"/leak"}},
		{name: "a link to the first process's root", layers: [][]entry{{link("leak", "/proc/1/root$CANARY/secret")}}, show: []string{"/leak"}},

		// Hard links.
		{name: "a hard link to the secret", layers: [][]entry{{hard("leak", "$CANARY/secret")}}, show: []string{"/leak"}},
		{name: "a hard link of steps up", layers: [][]entry{{hard("leak", up+"$CANARY/secret")}}, show: []string{"/leak"}},
		{name: "a hard link through a link", layers: [][]entry{{link("l", "$CANARY"), hard("leak", "l/secret")}}, show: []string{"/leak"}},
		{name: "a hard link to a link, and written to", layers: [][]entry{{link("l", "$CANARY/secret"), hard("leak", "l"), {name: "leak", body: "x"}}}},
		{name: "a hard link to itself", layers: [][]entry{{hard("leak", "leak")}}},
		{name: "a hard link to a folder", layers: [][]entry{{{name: "d/"}, hard("leak", "d")}}},
		{name: "a hard link to the layer below, written to", layers: [][]entry{{hard("leak", "escape"), {name: "leak", body: "x"}}}},

		// Whiteouts.
		{name: "a whiteout of the parent", layers: [][]entry{{{name: "d/"}, {name: "d/.wh...", body: ""}}}},
		{name: "a whiteout of nothing", layers: [][]entry{{{name: ".wh.", body: ""}}}},
		{name: "a whiteout of a dot", layers: [][]entry{{{name: ".wh..", body: ""}}}},
		{name: "a whiteout with steps up", layers: [][]entry{{{name: up + "$CANARY/.wh.secret", body: ""}}}},
		{name: "a whiteout behind a link", layers: [][]entry{{link("l", "$CANARY")}, {{name: "l/.wh.secret", body: ""}}}},
		{name: "an opaque folder behind a link", layers: [][]entry{{link("l", "$CANARY")}, {{name: "l/.wh..wh..opq", body: ""}}}},
		{name: "an opaque root", layers: [][]entry{{{name: ".wh..wh..opq", body: ""}}}},
		{name: "a device that is a whiteout", layers: [][]entry{{char("escape2", 0, 0)}}},
		{name: "attributes of overlays", layers: [][]entry{{{name: "d/", pax: map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "$CANARY", "SCHILY.xattr.trusted.overlay.opaque": "y"}}}}, show: []string{"/d/secret"}},
		{name: "attributes of overlays of users", layers: [][]entry{{{name: "d/", pax: map[string]string{"SCHILY.xattr.user.overlay.redirect": "$CANARY", "SCHILY.xattr.user.overlay.metacopy": ""}}}}, show: []string{"/d/secret"}},

		// Devices and rights.
		{name: "a disk", layers: [][]entry{{{name: "disk", typ: tar.TypeBlock, mode: 0o666, major: 254}, {name: "loop", typ: tar.TypeBlock, mode: 0o666, major: 7}}}, show: []string{"/disk"}, is: deviceClosed},
		{name: "the memory", layers: [][]entry{{char("mem", 1, 1)}}, show: []string{"/mem"}, is: deviceClosed},
		{name: "the kernel's messages", layers: [][]entry{{char("kmsg", 1, 11)}}, show: []string{"/kmsg"}, is: deviceClosed},
		{name: "the virtual machines' device", layers: [][]entry{{char("kvm", 10, 232)}}, show: []string{"/kvm"}, is: deviceClosed},
		{name: "a program of root's for all", layers: [][]entry{{{name: "root", body: "$PROGRAM", mode: 0o6755}}}, spec: func(p *corev1.Pod) {
			p.Spec.Containers[0].Command = []string{"/root", "status"}
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsUser: ptr.To[int64](1000), AllowPrivilegeEscalation: ptr.To(false)}
		}, is: lacks("Uid:\t1000\t0", "Uid:\t0")},
		{name: "a program with capabilities", layers: [][]entry{{{name: "cap", body: "$PROGRAM", mode: 0o755, pax: map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\xff\xff\xff\xff\x00\x00\x00\x00\xff\x01\x00\x00\x00\x00\x00\x00"}}}}, spec: func(p *corev1.Pod) {
			p.Spec.Containers[0].Command = []string{"/cap", "status"}
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsUser: ptr.To[int64](1000)}
		}, is: lacks("CapEff:\t000001ffffffffff")},

		// What the node reads of an image.
		{name: "passwd is a FIFO", layers: [][]entry{{fifo("etc/passwd")}}, config: v1.Config{User: "web"}},
		{name: "group is a FIFO", layers: [][]entry{{fifo("etc/group")}}, config: v1.Config{User: "root:web"}},
		{name: "passwd is a link to the secret", layers: [][]entry{{link("etc/passwd", "$CANARY/secret")}}, config: v1.Config{User: "canary"}},
		{name: "passwd is a link to a device", layers: [][]entry{{link("etc/passwd", "/dev/zero")}}, config: v1.Config{User: "web"}},
		{name: "passwd is a device", layers: [][]entry{{char("etc/passwd", 1, 5)}}, config: v1.Config{User: "web"}},
		{name: "passwd is a folder", layers: [][]entry{{{name: "etc/passwd", typ: tar.TypeDir}}}, config: v1.Config{User: "web"}},
		{name: "passwd is of 100 MiB", large: true, layers: [][]entry{{{name: "etc/passwd", body: strings.Repeat("x:x:1:1::/:\n", 8<<20)}}}, config: v1.Config{User: "web"}},
		{name: "passwd names a number that is none", layers: [][]entry{{{name: "etc/passwd", body: "web:x:99999999999999999999:-1::/:\n"}}}, config: v1.Config{User: "web"}},
		{name: "a user with slashes", config: v1.Config{User: up + "$CANARY/secret"}},
		{name: "a user of a million letters", config: v1.Config{User: strings.Repeat("u", 1<<20)}},
		{name: "a user below zero", config: v1.Config{User: "-1:-1"}},
		{name: "a working folder that is a link", layers: [][]entry{{link("w", "$CANARY")}}, config: v1.Config{WorkingDir: "/w"}, show: []string{"secret"}},
		{name: "a working folder of steps up", config: v1.Config{WorkingDir: up + "$CANARY"}, show: []string{"secret"}},
		{name: "a working folder of open files", config: v1.Config{WorkingDir: "/proc/self/fd/8"}, show: []string{up + "$CANARY/secret"}},
		{name: "a program that is the running one", config: v1.Config{Entrypoint: []string{"/proc/self/exe"}}, spec: func(p *corev1.Pod) { p.Spec.Containers[0].Command = nil }},
		{name: "a program that is a link to it", layers: [][]entry{{link("exe", "/proc/self/exe")}}, spec: func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"/exe"} }},
		{name: "a program that is a script of it", layers: [][]entry{{{name: "script", body: "#!/proc/self/exe\n"}}}, spec: func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"/script"} }},
		{name: "a program that is a folder", layers: [][]entry{{{name: "prog/"}}}, spec: func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"/prog"} }},
		{name: "an environment with lines", config: v1.Config{Env: []string{"A=b\nLD_PRELOAD=/x", "=", "B", "C=\x00d"}}},
		{name: "an environment of 100 000", config: v1.Config{Env: strings.Split(strings.TrimSuffix(strings.Repeat("A=b,", 100_000), ","), ",")}},
		{name: "a volume of steps up", config: v1.Config{Volumes: map[string]struct{}{up + "$CANARY": {}, "/": {}, "/proc": {}}}},
		{name: "a signal that is none", config: v1.Config{StopSignal: "SIG$(reboot)"}},
		{name: "labels of a megabyte", config: v1.Config{Labels: map[string]string{"a": strings.Repeat("b", 1<<20)}}},

		// Bombs.
		{name: "a gibibyte of zeros in a mebibyte", large: true, refused: true, change: func(p *picture) {
			p.add(zipped(header("zeros", 1<<30), 1<<30), types.OCILayer)
		}},
		{name: "a tebibyte that is not there", refused: true, change: func(p *picture) {
			p.add(append(header("huge", 1<<40), make([]byte, 1<<20)...), types.OCIUncompressedLayer)
		}},
		{name: "zeros after the end", large: true, refused: true, change: func(p *picture) {
			p.add(zipped(layer(entry{name: "x", body: "x"}), 512<<20), types.OCILayer)
		}},
		{name: "gzip in gzip", large: true, refused: true, change: func(p *picture) {
			p.add(zipped(nil, 64<<20), types.OCILayer)
		}},
		{name: "a million and more files", large: true, refused: true, change: func(p *picture) {
			p.add(repeated(header("file", 0), 1<<20+16), types.OCILayer)
		}},
		{name: "folders 4000 deep", layers: [][]entry{{{name: strings.Repeat("d/", 4000)}}}},
		{name: "a name of 300 letters", layers: [][]entry{{{name: strings.Repeat("n", 300), body: "x"}}}},
		{name: "a path of a megabyte", layers: [][]entry{{{name: strings.Repeat(strings.Repeat("p", 200)+"/", 5000), typ: tar.TypeDir}}}},
		{name: "a thousand layers of nothing", change: func(p *picture) {
			for range 1000 {
				p.add(layer(), types.OCIUncompressedLayer)
			}
		}},
		{name: "one layer twenty times", change: func(p *picture) {
			one := layer(entry{name: "same", body: strings.Repeat("x", 1<<20)})
			for range 20 {
				p.add(one, types.OCIUncompressedLayer)
			}
		}},
		{name: "one file a hundred thousand times", layers: [][]entry{manyEntries(100_000, func(i int) entry { return entry{name: "same", body: "x"} })}},
		{name: "a hundred links in a chain", layers: [][]entry{append(manyEntries(100, func(i int) entry { return link(fmt.Sprintf("l%d", i), fmt.Sprintf("l%d", i+1)) }), entry{name: "l0/planted", body: "x"})}},

		// Untrue and broken.
		{name: "a layer cut short", refused: true, change: func(p *picture) {
			l := layer(entry{name: "big", body: strings.Repeat("x", 1<<20)})
			p.add(l[:1<<19], types.OCIUncompressedLayer)
		}},
		{name: "a layer that is no archive", refused: true, change: func(p *picture) {
			p.add(bytes.Repeat([]byte("x"), 4096), types.OCIUncompressedLayer)
		}},
		{name: "a layer of a kind that is unknown", change: func(p *picture) { p.top().kind = "application/x-sh" }},
		{name: "a layer with another digest", refused: true, change: func(p *picture) {
			p.top().desc = map[string]any{"digest": digest([]byte("other"))}
		}},
		{name: "a layer with another size", change: func(p *picture) { p.top().desc = map[string]any{"size": 1} }},
		{name: "a layer of a size below zero", refused: true, change: func(p *picture) { p.top().desc = map[string]any{"size": -1} }},
		{name: "a layer whose digest is a path", refused: true, change: func(p *picture) {
			p.top().desc = map[string]any{"digest": "sha256:" + up + "$CANARY/secret"}
		}},
		{name: "a layer whose digest is MD5", refused: true, change: func(p *picture) { p.top().desc = map[string]any{"digest": "md5:d41d8cd98f00b204e9800998ecf8427e"} }},
		{name: "a layer from elsewhere", refused: true, change: func(p *picture) {
			p.top().desc = map[string]any{"digest": digest([]byte("other")), "urls": []string{"http://169.254.169.254/", "file:///etc/shadow"}}
		}},
		{name: "other content than the configuration says", refused: true, change: func(p *picture) {
			p.config.body = asJSON(v1.ConfigFile{OS: "linux", Architecture: arch, RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{{Algorithm: "sha256", Hex: strings.Repeat("a", 64)}}}})
		}},
		{name: "fewer layers than the configuration says", refused: true, change: func(p *picture) { p.layers = nil }},
		{name: "a configuration of 64 MiB", large: true, refused: true, change: func(p *picture) {
			p.config.body = append(p.config.body, bytes.Repeat([]byte(" "), 64<<20)...)
		}},
		{name: "a configuration that is no JSON", refused: true, change: func(p *picture) { p.config.body = []byte("\x00\x01") }},
		{name: "a configuration nested a million deep", refused: true, change: func(p *picture) { p.config.body = bytes.Repeat([]byte("["), 1<<20) }},
		{name: "a configuration with another digest", refused: true, change: func(p *picture) {
			p.config.desc = map[string]any{"digest": digest([]byte("other"))}
		}},
		{name: "a configuration for another system", refused: true, change: func(p *picture) {
			p.config.body = bytes.Replace(p.config.body, []byte(`"linux"`), []byte(`"windows"`), 1)
		}},
		{name: "a manifest that is no JSON", refused: true, change: func(p *picture) { p.manifest.body = []byte("x") }},
		{name: "a manifest that is a list", refused: true, change: func(p *picture) { p.manifest.body = []byte("[]") }},
		{name: "a manifest of a kind that is unknown", refused: true, change: func(p *picture) { p.manifest.kind = "text/html" }},
		{name: "a manifest of 64 MiB", large: true, refused: true, change: func(p *picture) { p.manifest.body = bytes.Repeat([]byte(" "), 64<<20) }},
		{name: "an index of itself", refused: true, after: func(p *picture) {
			d := blob{body: p.index.body, kind: types.OCIImageIndex, desc: map[string]any{"digest": digest(p.index.body)}}
			p.index.body = asJSON(map[string]any{"schemaVersion": 2, "manifests": []any{d.descriptor()}})
			p.files = append(p.files, entry{name: "blobs/sha256/" + digest(p.index.body)[7:], body: string(p.index.body)})
		}},
		{name: "indexes a hundred deep", refused: true, after: func(p *picture) {
			for range 100 {
				b := blob{body: p.index.body, kind: types.OCIImageIndex}
				p.files = append(p.files, entry{name: "blobs/sha256/" + digest(b.body)[7:], body: string(b.body)})
				p.index.body = asJSON(map[string]any{"schemaVersion": 2, "manifests": []any{b.descriptor()}})
			}
		}},
		{name: "an index with nothing", refused: true, after: func(p *picture) { p.index.body = []byte(`{"schemaVersion":2,"manifests":[]}`) }},
		{name: "an index that is null", refused: true, after: func(p *picture) { p.index.body = []byte("null") }},
		{name: "a blob that is a link", after: func(p *picture) {
			p.files = append(p.files, link("blobs/sha256/"+digest(p.top().body)[7:], "$CANARY/secret"))
		}},
		{name: "blobs behind a link", after: func(p *picture) {
			p.files = append(p.files, link("blobs/out", "$CANARY"), entry{name: "blobs/out/planted", body: "x"})
		}},
		{name: "files beside that lead out", after: func(p *picture) {
			p.files = append(p.files, entry{name: up + "$CANARY/planted", body: "x"})
		}},
		{name: "a name that is a path", after: func(p *picture) {
			p.index.body = bytes.ReplaceAll(p.index.body, []byte("clusterd.local/"), []byte(up+"/"))
		}},
		{name: "a name of a megabyte", after: func(p *picture) {
			p.index.body = bytes.ReplaceAll(p.index.body, []byte("clusterd.local/"), bytes.Repeat([]byte("n"), 1<<20))
		}},
		{name: "docker's archive of files outside", refused: true, after: func(p *picture) { docker(p, up+"$CANARY/secret", up+"$CANARY/secret") }},
		{name: "docker's archive of absolute files", refused: true, after: func(p *picture) { docker(p, "$CANARY/secret", "$CANARY/secret") }},
		{name: "docker's archive with links", refused: true, after: func(p *picture) {
			docker(p, "config.json", "layer.tar")
			p.files = append(p.files, link("config.json", "$CANARY/secret"), link("layer.tar", "$CANARY/secret"))
		}},
		{name: "docker's archive with hard links", refused: true, after: func(p *picture) {
			docker(p, "config.json", "layer.tar")
			p.files = append(p.files, hard("config.json", "$CANARY/secret"), hard("layer.tar", "$CANARY/secret"))
		}},
		{name: "docker's archive without its files", refused: true, after: func(p *picture) { docker(p, "none.json", "none.tar") }},
		{name: "docker's archive with a list of nothing", refused: true, after: func(p *picture) { docker(p, "", ""); p.files[0].body = "[null]" }},
	}
}

// docker makes it an archive as docker save writes it, of files by these names.
func docker(p *picture, config, layer string) {
	p.files = []entry{{name: "manifest.json", body: string(asJSON([]any{map[string]any{"Config": config, "RepoTags": []string{"clusterd.local/docker:1"}, "Layers": []string{layer}}}))}}
	p.index.body = nil
}
