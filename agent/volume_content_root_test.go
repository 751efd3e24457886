package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// sources makes the four kinds of volume that render keys of an object. An
// object's name is the same for ConfigMaps and Secrets.
var sources = []struct {
	kind string
	make func(name string, mode *int32, optional bool, items ...v1.KeyToPath) v1.VolumeSource
}{
	{"configmap", func(name string, mode *int32, optional bool, items ...v1.KeyToPath) v1.VolumeSource {
		return v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: name}, DefaultMode: mode, Optional: &optional, Items: items}}
	}},
	{"projected-configmap", func(name string, mode *int32, optional bool, items ...v1.KeyToPath) v1.VolumeSource {
		return projected(mode, v1.VolumeProjection{ConfigMap: &v1.ConfigMapProjection{LocalObjectReference: v1.LocalObjectReference{Name: name}, Optional: &optional, Items: items}})
	}},
	{"secret", func(name string, mode *int32, optional bool, items ...v1.KeyToPath) v1.VolumeSource {
		return v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: name, DefaultMode: mode, Optional: &optional, Items: items}}
	}},
	{"projected-secret", func(name string, mode *int32, optional bool, items ...v1.KeyToPath) v1.VolumeSource {
		return projected(mode, v1.VolumeProjection{Secret: &v1.SecretProjection{LocalObjectReference: v1.LocalObjectReference{Name: name}, Optional: &optional, Items: items}})
	}},
}

func projected(mode *int32, from ...v1.VolumeProjection) v1.VolumeSource {
	return v1.VolumeSource{Projected: &v1.ProjectedVolumeSource{DefaultMode: mode, Sources: from}}
}

// mounted adds a volume to a pod, which its first container mounts below
// /vol; it returns the path there.
func mounted(p *v1.Pod, name string, source v1.VolumeSource, change ...func(*v1.VolumeMount)) string {
	p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: name, VolumeSource: source})
	vm := v1.VolumeMount{Name: name, MountPath: "/vol/" + name}
	for _, c := range change {
		c(&vm)
	}
	p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, vm)
	return vm.MountPath
}

// stat is the mode and owner that a container sees of a file: "-rw-r--r-- 0 0".
func (m *machine) stat(p *v1.Pod, path string) string {
	m.t.Helper()
	return strings.TrimSpace(m.fetch(p, "/stat?name="+path))
}

// putKeys makes or replaces a ConfigMap and a Secret of one name.
func (m *machine) putKeys(namespace, name string, data map[string]string, binary []byte) {
	m.t.Helper()
	meta := metav1.ObjectMeta{Name: name, Namespace: namespace}
	secret := &v1.Secret{ObjectMeta: meta, Data: map[string][]byte{}}
	for k, v := range data {
		secret.Data[k] = []byte(v)
	}
	cm := &v1.ConfigMap{ObjectMeta: meta, Data: data}
	if binary != nil {
		cm.BinaryData = map[string][]byte{"binary": binary}
	}
	core := m.api.CoreV1()
	if _, err := core.ConfigMaps(namespace).Get(m.t.Context(), name, metav1.GetOptions{}); err == nil {
		must(core.ConfigMaps(namespace).Update(m.t.Context(), cm, metav1.UpdateOptions{}))
		must(core.Secrets(namespace).Update(m.t.Context(), secret, metav1.UpdateOptions{}))
		return
	}
	must(core.ConfigMaps(namespace).Create(m.t.Context(), cm, metav1.CreateOptions{}))
	must(core.Secrets(namespace).Create(m.t.Context(), secret, metav1.CreateOptions{}))
}

// asUser makes a pod of one server that does not run as root.
func asUser(name string, group *int64) *v1.Pod {
	p := newPod(name, app("web"))
	p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: ptr.To[int64](1000), FSGroup: group}
	return p
}

// TestRootKeyVolumes: ConfigMaps and Secrets as files, by each kind of volume:
// what is in them, with which modes, for whom, and how they follow their source.
func TestRootKeyVolumes(t *testing.T) {
	m := newMachine(t)
	binary := []byte{0, 0xff, '\n', 0xfe, 1}
	m.putKeys("default", "keys", map[string]string{"a": "one", "b": "two\n"}, binary)
	m.putKeys("other", "keys", map[string]string{"a": "somebody else's"}, nil)
	m.putKeys("default", "fleeting", map[string]string{"k": "here"}, nil)

	root, user, group := newPod("root", app("web")), asUser("user", nil), asUser("group", ptr.To[int64](1001))
	mapping := v1.KeyToPath{Key: "b", Path: "path/to/b"}
	private := mapping
	private.Mode = ptr.To[int32](0o400)
	for _, s := range sources {
		for _, p := range []*v1.Pod{root, user} {
			mounted(p, s.kind, s.make("keys", nil, false))
			mounted(p, s.kind+"-items", s.make("keys", nil, false, mapping))
		}
		mounted(root, s.kind+"-mode", s.make("keys", ptr.To[int32](0o400), false))
		mounted(root, s.kind+"-item-mode", s.make("keys", nil, false, private))
		mounted(root, s.kind+"-late", s.make("late", nil, true))
		mounted(root, s.kind+"-fleeting", s.make("fleeting", nil, true))
		mounted(group, s.kind, s.make("keys", ptr.To[int32](0o440), false))
		mounted(root, s.kind+"-sub", s.make("keys", nil, false), func(vm *v1.VolumeMount) { vm.SubPath = "a" })
	}
	// On a file that the image has.
	root.Spec.Containers[0].VolumeMounts = append(root.Spec.Containers[0].VolumeMounts, v1.VolumeMount{Name: "configmap", MountPath: "/etc/group", SubPath: "a"})
	for _, p := range []*v1.Pod{root, user, group} {
		m.create(p)
	}
	root, user, group = m.ready("root"), m.ready("user"), m.ready("group")
	same := func(t *testing.T, what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	// rows of CONFORMANCE, in the order of sources.
	for i, s := range sources {
		at := "/vol/" + s.kind
		for _, tt := range []struct {
			name  string
			rows  [4]int
			check func(t *testing.T)
		}{
			{"plain", [4]int{378, 419, 447, 439}, func(t *testing.T) {
				same(t, "a", m.file(root, at+"/a"), "one")
				same(t, "mode", m.stat(root, at+"/a"), "-rw-r--r-- 0 0")
			}},
			{"another user", [4]int{379, 420}, func(t *testing.T) {
				same(t, "b", m.file(user, at+"/b"), "two\n")
			}},
			{"a group of its own", [4]int{0, 0, 448, 440}, func(t *testing.T) {
				same(t, "a", m.file(group, at+"/a"), "one")
				same(t, "mode", m.stat(group, at+"/a"), "-r--r----- 0 1001")
			}},
			{"defaultMode", [4]int{380, 421, 449, 441}, func(t *testing.T) {
				same(t, "a", m.file(root, at+"-mode/a"), "one")
				same(t, "mode", m.stat(root, at+"-mode/a"), "-r-------- 0 0")
			}},
			{"mappings", [4]int{381, 422, 450, 442}, func(t *testing.T) {
				same(t, "b", m.file(root, at+"-items/path/to/b"), "two\n")
				if got := m.stat(root, at+"-items/a"); !strings.Contains(got, "no such file") {
					t.Errorf("a key that no item names: %q", got)
				}
			}},
			{"mappings for another user", [4]int{383, 424}, func(t *testing.T) {
				same(t, "b", m.file(user, at+"-items/path/to/b"), "two\n")
			}},
			{"mode of an item", [4]int{382, 423, 451, 443}, func(t *testing.T) {
				same(t, "b", m.file(root, at+"-item-mode/path/to/b"), "two\n")
				same(t, "mode", m.stat(root, at+"-item-mode/path/to/b"), "-r-------- 0 0")
			}},
			{"several volumes of one object", [4]int{384, 425, 452, 444}, func(t *testing.T) {
				same(t, "in one", m.file(root, at+"/b"), "two\n")
				same(t, "in another", m.file(root, at+"-items/path/to/b"), "two\n")
			}},
			{"by subPath", [4]int{455, 458, 459, 0}, func(t *testing.T) {
				same(t, "a", m.file(root, at+"-sub"), "one")
			}},
		} {
			t.Run(s.kind+"/"+tt.name, func(t *testing.T) {
				if row := tt.rows[i]; row > 0 {
					features.ConformsWithDoubles(t, row)
				}
				tt.check(t)
			})
		}
	}
	t.Run("binary", func(t *testing.T) {
		features.ConformsWithDoubles(t, 376)
		same(t, "binary", m.file(root, "/vol/configmap/binary"), string(binary))
		same(t, "text", m.file(root, "/vol/configmap/b"), "two\n")
	})
	t.Run("the pod's namespace alone", func(t *testing.T) {
		features.ConformsWithDoubles(t, 446, 414)
		same(t, "a", m.file(root, "/vol/secret/a"), "one")
	})
	t.Run("on a file of the image", func(t *testing.T) {
		features.ConformsWithDoubles(t, 456)
		same(t, "/etc/group", m.file(root, "/etc/group"), "one")
	})
	t.Run("where it lies", func(t *testing.T) {
		features.ShowsWithDoubles(t, 246)
		for kind, name := range map[string]string{"configmap": "configmap", "secret": "secret", "projected": "projected-secret"} {
			if _, err := os.Stat(filepath.Join(m.dir, "pods", string(root.UID), "volumes", "kubernetes.io~"+kind, name, "a")); err != nil {
				t.Error(err)
			}
		}
	})

	t.Run("follows its source", func(t *testing.T) {
		features.ConformsWithDoubles(t, 386, 426, 377, 418, 445, 438)
		m.putKeys("default", "keys", map[string]string{"a": "changed", "c": "new"}, nil)
		m.putKeys("default", "late", map[string]string{"k": "come"}, nil)
		if err := m.api.CoreV1().ConfigMaps("default").Delete(t.Context(), "fleeting", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := m.api.CoreV1().Secrets("default").Delete(t.Context(), "fleeting", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, s := range sources {
			at := "/vol/" + s.kind
			for path, want := range map[string]string{at + "/a": "changed", at + "/c": "new", at + "-late/k": "come"} {
				m.eventually("new content of "+path, func() bool { return m.file(root, path) == want })
			}
			for _, path := range []string{at + "/b", at + "-fleeting/k"} {
				m.eventually("end of "+path, func() bool { return strings.Contains(m.stat(root, path), "no such file") })
			}
			same(t, s.kind+" by its subPath, which never follows", m.file(root, at+"-sub"), "one")
			// The key that an item names is gone: the volume stays as it was.
			same(t, s.kind+" by an item", m.file(root, at+"-items/path/to/b"), "two\n")
		}
	})
}

// TestRootDownwardVolumes: what a pod is told of itself in files.
func TestRootDownwardVolumes(t *testing.T) {
	m := newMachine(t)
	web, bare := app("web"), app("bare", "serve", "8081")
	web.Resources = v1.ResourceRequirements{
		Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("250m"), v1.ResourceMemory: resource.MustParse("32Mi"), v1.ResourceEphemeralStorage: resource.MustParse("1Gi")},
		Limits:   v1.ResourceList{v1.ResourceCPU: resource.MustParse("1250m"), v1.ResourceMemory: resource.MustParse("64Mi")},
	}
	web.Env = []v1.EnvVar{
		{Name: "SUB", Value: "name"},
		{Name: "CPU_LIMIT", ValueFrom: &v1.EnvVarSource{ResourceFieldRef: &v1.ResourceFieldSelector{Resource: "limits.cpu", Divisor: resource.MustParse("1m")}}},
		{Name: "BARE_MEMORY", ValueFrom: &v1.EnvVarSource{ResourceFieldRef: &v1.ResourceFieldSelector{ContainerName: "bare", Resource: "limits.memory"}}},
	}
	p := newPod("p", web, bare)
	p.Annotations = map[string]string{"note": "first"}
	field := func(path, field string) v1.DownwardAPIVolumeFile {
		return v1.DownwardAPIVolumeFile{Path: path, FieldRef: &v1.ObjectFieldSelector{FieldPath: field}}
	}
	size := func(path, container, res, divisor string) v1.DownwardAPIVolumeFile {
		return v1.DownwardAPIVolumeFile{Path: path, ResourceFieldRef: &v1.ResourceFieldSelector{ContainerName: container, Resource: res, Divisor: resource.MustParse(divisor)}}
	}
	private := field("private", "metadata.name")
	private.Mode = ptr.To[int32](0o400)
	items := []v1.DownwardAPIVolumeFile{
		field("name", "metadata.name"), field("labels", "metadata.labels"), field("annotations", "metadata.annotations"), field("one", "metadata.annotations['note']"), private,
		size("cpu-limit", "web", "limits.cpu", "1"), size("cpu-limit-milli", "web", "limits.cpu", "1m"), size("cpu-request", "web", "requests.cpu", "1"), size("cpu-request-milli", "web", "requests.cpu", "1m"),
		size("memory-limit", "web", "limits.memory", "1"), size("memory-limit-mi", "web", "limits.memory", "1Mi"), size("memory-request", "web", "requests.memory", "1"),
		size("disk-request", "web", "requests.ephemeral-storage", "1Mi"), size("disk-limit", "web", "limits.ephemeral-storage", "1"),
		size("bare-cpu", "bare", "limits.cpu", "1"), size("bare-memory", "bare", "limits.memory", "1"),
	}
	mode := ptr.To[int32](0o400)
	kinds := []string{"downward", "projected"}
	mounted(p, "downward", v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: items}})
	mounted(p, "projected", projected(nil, v1.VolumeProjection{DownwardAPI: &v1.DownwardAPIProjection{Items: items}}))
	mounted(p, "downward-mode", v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: items[:1], DefaultMode: mode}})
	mounted(p, "projected-mode", projected(mode, v1.VolumeProjection{DownwardAPI: &v1.DownwardAPIProjection{Items: items[:1]}}))
	mounted(p, "sub", v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: items[:1]}}, func(vm *v1.VolumeMount) { vm.SubPath = "name" })
	mounted(p, "sub-expr", v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: items[:1]}}, func(vm *v1.VolumeMount) { vm.SubPathExpr = "$(SUB)" })
	m.putKeys("default", "keys", map[string]string{"a": "one"}, nil)
	mounted(p, "all", projected(nil,
		v1.VolumeProjection{ConfigMap: &v1.ConfigMapProjection{LocalObjectReference: v1.LocalObjectReference{Name: "keys"}, Items: []v1.KeyToPath{{Key: "a", Path: "map/a"}}}},
		v1.VolumeProjection{Secret: &v1.SecretProjection{LocalObjectReference: v1.LocalObjectReference{Name: "keys"}, Items: []v1.KeyToPath{{Key: "a", Path: "secret/a"}}}},
		v1.VolumeProjection{DownwardAPI: &v1.DownwardAPIProjection{Items: items[:1]}}))
	m.create(p)
	p = m.ready("p")
	node := must(m.api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{}))
	whole := func(name v1.ResourceName) string {
		q := node.Status.Allocatable[name]
		return fmt.Sprint(q.Value())
	}
	for i, kind := range kinds {
		for _, tt := range []struct {
			file, want string
			rows       [2]int
		}{
			{"cpu-limit", "2", [2]int{387, 427}}, {"cpu-limit-milli", "1250", [2]int{}},
			{"cpu-request", "1", [2]int{388, 428}}, {"cpu-request-milli", "250", [2]int{}},
			{"memory-limit", "67108864", [2]int{389, 429}}, {"memory-limit-mi", "64", [2]int{}},
			{"memory-request", "33554432", [2]int{390, 430}},
			{"disk-request", "1024", [2]int{}}, {"disk-limit", whole(v1.ResourceEphemeralStorage), [2]int{}},
			{"bare-cpu", whole(v1.ResourceCPU), [2]int{391, 431}}, {"bare-memory", whole(v1.ResourceMemory), [2]int{392, 432}},
			{"name", "p", [2]int{393, 433}},
		} {
			t.Run(kind+"/"+tt.file, func(t *testing.T) {
				if row := tt.rows[i]; row > 0 {
					features.ConformsWithDoubles(t, row)
				}
				if got := m.file(p, "/vol/"+kind+"/"+tt.file); got != tt.want {
					t.Errorf("%q, want %q", got, tt.want)
				}
			})
		}
		t.Run(kind+"/modes", func(t *testing.T) {
			features.ConformsWithDoubles(t, [][]int{{394, 395}, {434, 435}}[i]...)
			for path, want := range map[string]string{"/name": "-rw-r--r-- 0 0", "/private": "-r-------- 0 0", "-mode/name": "-r-------- 0 0"} {
				if got := m.stat(p, "/vol/"+kind+path); got != want {
					t.Errorf("%s: %q, want %q", path, got, want)
				}
			}
		})
	}
	t.Run("all sources", func(t *testing.T) {
		features.ConformsWithDoubles(t, 417, 457)
		for path, want := range map[string]string{"/vol/all/map/a": "one", "/vol/all/secret/a": "one", "/vol/all/name": "p", "/vol/sub": "p", "/vol/sub-expr": "p"} {
			if got := m.file(p, path); got != want {
				t.Errorf("%s: %q, want %q", path, got, want)
			}
		}
	})
	t.Run("variables", func(t *testing.T) {
		env := m.fetch(p, "/env")
		for _, want := range []string{"CPU_LIMIT=1250\n", "BARE_MEMORY=" + whole(v1.ResourceMemory) + "\n"} {
			if !strings.Contains(env, want) {
				t.Errorf("no %q in %s", want, env)
			}
		}
	})
	t.Run("labels and annotations change", func(t *testing.T) {
		features.ConformsWithDoubles(t, 396, 397, 436, 437)
		m.eventually("the change of the pod", func() bool { // the agent writes too
			now := m.get("p")
			now.Labels["added"], now.Annotations["note"] = "later", "second"
			_, err := m.api.CoreV1().Pods("default").Update(t.Context(), now, metav1.UpdateOptions{})
			return err == nil
		})
		for _, kind := range kinds {
			for path, want := range map[string]string{"labels": "added=\"later\"\napp=\"p\"", "annotations": `note="second"`, "one": "second"} {
				m.eventually(kind+" of the new "+path, func() bool { return m.file(p, "/vol/"+kind+"/"+path) == want })
			}
		}
	})
}

// TestRootEmptyDirs: directories that every user may write to, on disk and in
// memory, and whose files have the modes that they were given.
func TestRootEmptyDirs(t *testing.T) {
	m := newMachine(t)
	for _, p := range []*v1.Pod{newPod("root", app("web")), asUser("user", nil), asUser("group", ptr.To[int64](1001))} {
		for _, medium := range []v1.StorageMedium{v1.StorageMediumDefault, v1.StorageMediumMemory} {
			mounted(p, "empty"+strings.ToLower(string(medium)), v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: medium}})
		}
		m.create(p)
	}
	for _, who := range []struct {
		pod, owner string
		first      int // row of CONFORMANCE: 0644 on disk, then in memory, then the next mode
	}{{"root", "0 0", 405}, {"user", "1000 0", 399}} {
		p := m.ready(who.pod)
		for i, mode := range []os.FileMode{0o644, 0o666, 0o777} {
			for j, at := range []string{"/vol/empty", "/vol/emptymemory"} {
				t.Run(fmt.Sprintf("%s/%s/%o", who.pod, at[5:], mode), func(t *testing.T) {
					features.ConformsWithDoubles(t, who.first+2*i+j)
					file := fmt.Sprintf("%s/f%o", at, mode)
					if got := m.fetch(p, fmt.Sprintf("/fill?size=3&mode=%d&name=%s", mode, file)); strings.TrimSpace(got) != "<nil>" {
						t.Fatalf("write: %s", got)
					}
					if got, want := m.stat(p, file), mode.String()+" "+who.owner; got != want {
						t.Errorf("%s, want %s", got, want)
					}
					if got := m.file(p, file); got != "\x00\x00\x00" {
						t.Errorf("content %q", got)
					}
					isTmpfs := false
					for line := range strings.Lines(m.file(p, "/proc/self/mountinfo")) {
						isTmpfs = isTmpfs || strings.Contains(line, " "+at+" ") && strings.Contains(line, " - tmpfs ")
					}
					if isTmpfs != (j == 1) {
						t.Errorf("tmpfs: %v", isTmpfs)
					}
				})
			}
		}
	}
	t.Run("the folder", func(t *testing.T) {
		features.ConformsWithDoubles(t, 411, 412)
		for _, path := range []string{"/vol/empty", "/vol/emptymemory"} {
			if got := m.stat(m.ready("root"), path); got != "drwxrwxrwx 0 0" {
				t.Errorf("%s: %s", path, got)
			}
			// What is made in it belongs to the pod's group.
			p := m.ready("group")
			if got := m.stat(p, path); got != "dgrwxrwxrwx 0 1001" {
				t.Errorf("%s with a group: %s", path, got)
			}
			m.fetch(p, "/fill?size=1&mode=420&name="+path+"/f")
			if got := m.stat(p, path+"/f"); got != "-rw-r--r-- 1000 1001" {
				t.Errorf("a file in %s: %s", path, got)
			}
		}
	})
}
