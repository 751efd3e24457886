package kubectl

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// look is one run of the hello program in a pod, and what it prints. An empty
// want is not compared.
type look struct {
	want string
	args []string
}

func sees(want string, args ...string) look { return look{want, args} }

// volumeRow is a pod that shows a row of CONFORMANCE.md: its volumes are mounted
// at /v and /w, and its containers look one after the other.
type volumeRow struct {
	row    int
	name   string
	v      corev1.VolumeSource
	w      *corev1.VolumeSource
	user   int64 // 0: root
	group  int64 // fsGroup; 0: none
	limits corev1.ResourceList
	sub    string // subPath of /v
	looks  []look
}

func (r *volumeRow) pod() *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("row-%d", r.row), Labels: map[string]string{"case": "volumes"}},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: ptr.To(int64(1)),
			SecurityContext:               &corev1.PodSecurityContext{},
			Volumes:                       []corev1.Volume{{Name: "v", VolumeSource: r.v}},
		},
	}
	mounts := []corev1.VolumeMount{{Name: "v", MountPath: "/v", SubPath: r.sub}}
	if r.w != nil {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "w", VolumeSource: *r.w})
		mounts = append(mounts, corev1.VolumeMount{Name: "w", MountPath: "/w"})
	}
	p.Spec.SecurityContext.RunAsUser = &r.user
	if r.group != 0 {
		p.Spec.SecurityContext.FSGroup = &r.group
	}
	for i, l := range r.looks {
		c := corev1.Container{
			Name: fmt.Sprintf("look-%d", i), Image: image, ImagePullPolicy: corev1.PullNever, Args: l.args, VolumeMounts: mounts,
			Resources: corev1.ResourceRequirements{Limits: r.limits, Requests: r.limits},
		}
		if i == len(r.looks)-1 {
			p.Spec.Containers = append(p.Spec.Containers, c)
		} else {
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		}
	}
	return p
}

// printed is what a container has printed.
func (k *kit) printed(pod, container string) string {
	k.Helper()
	stream, err := k.api.CoreV1().Pods(k.ns).GetLogs(pod, &corev1.PodLogOptions{Container: container}).Stream(k.Context())
	if err != nil {
		k.Fatal(err)
	}
	defer stream.Close()
	b, err := io.ReadAll(stream)
	if err != nil {
		k.Fatal(err)
	}
	return string(b)
}

func items(name, mode string) []corev1.KeyToPath {
	item := corev1.KeyToPath{Key: "two", Path: "path/to/" + name}
	if mode != "" {
		item.Mode = ptr.To(int32(0o400))
	}
	return []corev1.KeyToPath{item}
}

// sourceRows are the rows that ConfigMaps, Secrets and projections of either
// have in common. make returns the volume with these items and default mode.
// rows are in the order plain, nonRoot, defaultMode, mappings, itemMode,
// mappingsNonRoot, twoMounts; 0: there is none. fs is what they lie on: Secrets
// never on a disk.
func sourceRows(what, fs string, rows [7]int, source func(items []corev1.KeyToPath, mode *int32) corev1.VolumeSource) []volumeRow {
	const uid = 1000
	second := source(nil, nil)
	all := []volumeRow{
		{name: "plain", v: source(nil, nil), looks: []look{sees("-rw-r--r-- 0 0 "+fs, "stat", "/v/one"), sees("value-1", "cat", "/v/one"), sees("value-2", "cat", "/v/two")}},
		{name: "not root", v: source(nil, nil), user: uid, looks: []look{sees("1000 0", "id"), sees("value-1", "cat", "/v/one")}},
		{name: "default mode", v: source(nil, ptr.To(int32(0o400))), looks: []look{sees("-r-------- 0 0 "+fs, "stat", "/v/one"), sees("value-1", "cat", "/v/one")}},
		{name: "mappings", v: source(items("two", ""), nil), looks: []look{sees("value-2", "cat", "/v/path/to/two"), sees("-rw-r--r-- 0 0 "+fs, "stat", "/v/path/to/two")}},
		{name: "mode of an item", v: source(items("two", "0400"), nil), looks: []look{sees("-r-------- 0 0 "+fs, "stat", "/v/path/to/two"), sees("value-2", "cat", "/v/path/to/two")}},
		{name: "mappings, not root", v: source(items("two", ""), nil), user: uid, looks: []look{sees("1000 0", "id"), sees("value-2", "cat", "/v/path/to/two")}},
		{name: "two mounts", v: source(nil, nil), w: &second, looks: []look{sees("value-1", "cat", "/v/one"), sees("value-1", "cat", "/w/one")}},
	}
	var out []volumeRow
	for i, r := range all {
		if rows[i] != 0 {
			r.row, r.name = rows[i], what+": "+r.name
			out = append(out, r)
		}
	}
	return out
}

func projected(mode *int32, sources ...corev1.VolumeProjection) corev1.VolumeSource {
	return corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{DefaultMode: mode, Sources: sources}}
}

// downwardRows are the rows of the downward API, in a volume of its own or in a
// projection. rows are in the order cpu limit, cpu request, memory limit, memory
// request, default cpu limit, default memory limit, pod name, default mode, item
// mode.
func downwardRows(what string, rows [9]int, capacity corev1.ResourceList, source func(mode *int32, file corev1.DownwardAPIVolumeFile) corev1.VolumeSource) []volumeRow {
	limits := corev1.ResourceList{"cpu": resource.MustParse("1250m"), "memory": resource.MustParse("64Mi")}
	of := func(field, container, divisor string) corev1.DownwardAPIVolumeFile {
		return corev1.DownwardAPIVolumeFile{Path: "file", ResourceFieldRef: &corev1.ResourceFieldSelector{
			ContainerName: container, Resource: field, Divisor: resource.MustParse(divisor),
		}}
	}
	name := func(mode *int32) corev1.DownwardAPIVolumeFile {
		return corev1.DownwardAPIVolumeFile{Path: "file", Mode: mode, FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}
	}
	content := func(want string) []look { return []look{sees(want, "cat", "/v/file")} }
	cpu, memory := capacity["cpu"], capacity["memory"]
	owner := ptr.To(int32(0o400))
	all := []volumeRow{
		{name: "cpu limit", v: source(nil, of("limits.cpu", "look-0", "1m")), limits: limits, looks: content("1250")},
		{name: "cpu request", v: source(nil, of("requests.cpu", "look-0", "1m")), limits: limits, looks: content("1250")},
		{name: "memory limit", v: source(nil, of("limits.memory", "look-0", "1Mi")), limits: limits, looks: content("64")},
		{name: "memory request", v: source(nil, of("requests.memory", "look-0", "1")), limits: limits, looks: content("67108864")},
		{name: "cpu limit of the node", v: source(nil, of("limits.cpu", "look-0", "1m")), looks: content(fmt.Sprint(cpu.MilliValue()))},
		{name: "memory limit of the node", v: source(nil, of("limits.memory", "look-0", "1")), looks: content(fmt.Sprint(memory.Value()))},
		{name: "name", v: source(nil, name(nil)), looks: content(fmt.Sprintf("row-%d", rows[6]))},
		{name: "default mode", v: source(owner, name(nil)), looks: []look{sees("-r-------- 0 0 disk", "stat", "/v/file")}},
		{name: "mode of an item", v: source(nil, name(owner)), looks: []look{sees("-r-------- 0 0 disk", "stat", "/v/file")}},
	}
	for i := range all {
		all[i].row, all[i].name = rows[i], what+": "+all[i].name
	}
	return all
}

// emptyDirRows are who writes a file of which mode to which medium, and the
// folder itself.
func emptyDirRows() []volumeRow {
	var out []volumeRow
	row := 399
	source := func(medium corev1.StorageMedium) corev1.VolumeSource {
		return corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: medium}}
	}
	media := []struct {
		medium corev1.StorageMedium
		fs     string
	}{{corev1.StorageMediumDefault, "disk"}, {corev1.StorageMediumMemory, "tmpfs"}}
	for _, user := range []int64{1001, 0} {
		for _, mode := range []struct{ octal, text string }{{"0644", "-rw-r--r--"}, {"0666", "-rw-rw-rw-"}, {"0777", "-rwxrwxrwx"}} {
			for _, m := range media {
				out = append(out, volumeRow{row: row, name: fmt.Sprintf("emptyDir: user %d, %s, %q", user, mode.octal, m.medium), v: source(m.medium), user: user, looks: []look{
					sees("", "make", mode.octal, "/v/file", "mount-tester", "new", "file"),
					sees(fmt.Sprintf("%s %d 0 %s", mode.text, user, m.fs), "stat", "/v/file"),
					sees("mount-tester new file", "cat", "/v/file"),
				}})
				row++
			}
		}
	}
	for _, m := range media {
		out = append(out, volumeRow{row: row, name: fmt.Sprintf("emptyDir: the folder, %q", m.medium), v: source(m.medium), looks: []look{sees("drwxrwxrwx 0 0 "+m.fs, "stat", "/v")}})
		row++
	}
	return out
}

func mountedRows(capacity corev1.ResourceList) []volumeRow {
	configMap := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }
	rows := sourceRows("ConfigMap", "disk", [7]int{378, 379, 380, 381, 382, 383, 384}, func(items []corev1.KeyToPath, mode *int32) corev1.VolumeSource {
		return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: configMap("both"), Items: items, DefaultMode: mode}}
	})
	rows = append(rows, sourceRows("projected ConfigMap", "disk", [7]int{419, 420, 421, 422, 423, 424, 425}, func(items []corev1.KeyToPath, mode *int32) corev1.VolumeSource {
		return projected(mode, corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: configMap("both"), Items: items}})
	})...)
	secret := func(items []corev1.KeyToPath, mode *int32) corev1.VolumeSource {
		return corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "both", Items: items, DefaultMode: mode}}
	}
	projectedSecret := func(items []corev1.KeyToPath, mode *int32) corev1.VolumeSource {
		return projected(mode, corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: configMap("both"), Items: items}})
	}
	rows = append(rows, sourceRows("Secret", "tmpfs", [7]int{447, 0, 449, 450, 451, 0, 452}, secret)...)
	rows = append(rows, sourceRows("projected Secret", "tmpfs", [7]int{439, 0, 441, 442, 443, 0, 444}, projectedSecret)...)
	readable := []look{sees("1000 0", "id"), sees("-r--r----- 0 1001 tmpfs", "stat", "/v/one"), sees("value-1", "cat", "/v/one")}
	rows = append(rows,
		volumeRow{row: 448, name: "Secret: not root, by its group", v: secret(nil, ptr.To(int32(0o440))), user: 1000, group: 1001, looks: readable},
		volumeRow{row: 440, name: "projected Secret: not root, by its group", v: projectedSecret(nil, ptr.To(int32(0o440))), user: 1000, group: 1001, looks: readable},
		volumeRow{row: 446, name: "Secret: of the pod's namespace", v: secret(nil, nil), looks: []look{sees("value-1", "cat", "/v/one")}},
		volumeRow{row: 376, name: "ConfigMap: binary data", v: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: configMap("binary")}},
			looks: []look{sees("text", "cat", "/v/text"), sees(string(notText), "cat", "/v/dump")}},
		volumeRow{row: 417, name: "all sources in one", v: projected(nil,
			corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: configMap("both"), Items: []corev1.KeyToPath{{Key: "one", Path: "cm"}}}},
			corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: configMap("both"), Items: []corev1.KeyToPath{{Key: "two", Path: "secret"}}}},
			corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{Path: "name", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}},
		), looks: []look{sees("value-1", "cat", "/v/cm"), sees("value-2", "cat", "/v/secret"), sees("row-417", "cat", "/v/name")}},
		volumeRow{row: 414, name: "Secret beside ConfigMap", v: secret(nil, nil),
			w:     &corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: configMap("both")}},
			looks: []look{sees("value-1", "cat", "/v/one"), sees("value-1", "cat", "/w/one")}},
	)
	rows = append(rows, downwardRows("downward API", [9]int{387, 388, 389, 390, 391, 392, 393, 394, 395}, capacity, func(mode *int32, file corev1.DownwardAPIVolumeFile) corev1.VolumeSource {
		return corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{DefaultMode: mode, Items: []corev1.DownwardAPIVolumeFile{file}}}
	})...)
	rows = append(rows, downwardRows("projected downward API", [9]int{427, 428, 429, 430, 431, 432, 433, 434, 435}, capacity, func(mode *int32, file corev1.DownwardAPIVolumeFile) corev1.VolumeSource {
		return projected(mode, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{file}}})
	})...)
	name := []corev1.DownwardAPIVolumeFile{{Path: "name", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}
	rows = append(rows,
		volumeRow{row: 455, name: "subPath of a ConfigMap", v: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: configMap("both")}}, sub: "one", looks: []look{sees("value-1", "cat", "/v")}},
		volumeRow{row: 457, name: "subPath of the downward API", v: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: name}}, sub: "name", looks: []look{sees("row-457", "cat", "/v")}},
		volumeRow{row: 458, name: "subPath of a projection", v: projected(nil, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: name}}), sub: "name", looks: []look{sees("row-458", "cat", "/v")}},
		volumeRow{row: 459, name: "subPath of a Secret", v: secret(nil, nil), sub: "two", looks: []look{sees("value-2", "cat", "/v")}},
	)
	return append(rows, emptyDirRows()...)
}

// notText is no text in any encoding.
var notText = []byte{0, 1, 0xfe, 0xff, '\n', 0x80, 0}

// TestE2EXVolumeContents mounts every kind of volume that the API itself fills,
// and looks from inside.
func TestE2EXVolumeContents(t *testing.T) {
	t.Parallel()
	k := start(t, "volumes-contents")
	values := map[string]string{"one": "value-1", "two": "value-2"}
	k.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "both"}, Data: values})
	k.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "binary"}, Data: map[string]string{"text": "text"}, BinaryData: map[string][]byte{"dump": notText}})
	k.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "both"}, StringData: values})
	k.ok("create", "namespace", "volumes-elsewhere")
	k.ok("create", "secret", "generic", "both", "-n", "volumes-elsewhere", "--from-literal=one=of another namespace")
	n, err := k.api.CoreV1().Nodes().Get(k.Context(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	rows := mountedRows(n.Status.Allocatable)
	for i := range rows {
		k.create(rows[i].pod())
	}
	for _, r := range rows {
		k.sub(r.name, func(k *kit) {
			features.Conforms(k, r.row)
			name := r.pod().Name
			k.podIs(name, "has ended", func(p *corev1.Pod) bool {
				return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
			})
			for i, l := range r.looks {
				got := k.printed(name, fmt.Sprintf("look-%d", i))
				if l.args[0] == "id" {
					got = strings.Join(strings.Fields(got)[:2], " ") // groups are not of interest
				}
				if want := l.want; l.args[0] != "cat" && strings.TrimSpace(got) != want || l.args[0] == "cat" && got != want {
					k.Errorf("%v printed %q, want %q", l.args, got, want)
				}
			}
			k.is("phase", string(k.pod(name).Status.Phase), "Succeeded")
		})
	}
	k.ok("delete", "pods", "-l", "case=volumes", "--wait=false")
	k.ok("delete", "namespace", "volumes-elsewhere", "--wait=false")
}

// create makes an object in the test's namespace.
func (k *kit) create(obj any) {
	k.Helper()
	var err error
	switch o := obj.(type) {
	case *corev1.Pod:
		_, err = k.api.CoreV1().Pods(k.ns).Create(k.Context(), o, metav1.CreateOptions{})
	case *corev1.ConfigMap:
		_, err = k.api.CoreV1().ConfigMaps(k.ns).Create(k.Context(), o, metav1.CreateOptions{})
	case *corev1.Secret:
		_, err = k.api.CoreV1().Secrets(k.ns).Create(k.Context(), o, metav1.CreateOptions{})
	default:
		k.Fatalf("create %T: not known here", obj)
	}
	if err != nil {
		k.Fatal(err)
	}
}

// TestE2EXVolumeUpdates changes what volumes show while their pods run.
func TestE2EXVolumeUpdates(t *testing.T) {
	t.Parallel()
	k := start(t, "volumes-updates")
	for _, name := range []string{"deleted", "changed"} {
		k.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"key": "before"}})
		k.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: map[string]string{"key": "before"}})
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "watcher", Labels: map[string]string{"a": "before"}, Annotations: map[string]string{"a": "before"}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To(int64(1)),
			Containers:                    []corev1.Container{{Name: "main", Image: image, ImagePullPolicy: corev1.PullNever, Args: []string{"sleep"}}},
		},
	}
	mount := func(name string, source corev1.VolumeSource) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: source})
		p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: name, MountPath: "/" + name})
	}
	for _, name := range []string{"deleted", "changed", "created"} {
		ref := corev1.LocalObjectReference{Name: name}
		mount("cm-"+name, corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: ref, Optional: ptr.To(true)}})
		mount("secret-"+name, corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name, Optional: ptr.To(true)}})
		mount("pcm-"+name, projected(nil, corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: ref, Optional: ptr.To(true)}}))
		mount("psecret-"+name, projected(nil, corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: ref, Optional: ptr.To(true)}}))
	}
	files := []corev1.DownwardAPIVolumeFile{
		{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}},
		{Path: "annotations", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.annotations['a']"}},
	}
	mount("down", corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: files}})
	mount("pdown", projected(nil, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: files}}))
	k.create(p)
	k.ready("watcher")
	sources := []string{"cm", "secret", "pcm", "psecret"}
	for _, s := range sources {
		k.is(s, k.exec("watcher", "main", "cat", "/"+s+"-changed/key"), "before")
		k.is(s, k.exec("watcher", "main", "cat", "/"+s+"-deleted/key"), "before")
		k.absent("/" + s + "-created/key")
	}
	k.ok("patch", "cm", "changed", "-p", `{"data":{"key":"after"}}`)
	k.ok("patch", "secret", "changed", "-p", `{"stringData":{"key":"after"}}`)
	k.ok("delete", "cm", "deleted")
	k.ok("delete", "secret", "deleted")
	k.ok("create", "cm", "created", "--from-literal=key=new")
	k.ok("create", "secret", "generic", "created", "--from-literal=key=new")
	k.ok("label", "pod", "watcher", "a=after", "--overwrite")
	k.ok("annotate", "pod", "watcher", "a=after", "--overwrite")
	for s, rows := range map[string][]int{"cm": {377, 386}, "secret": {445}, "pcm": {418, 426}, "psecret": {438}} {
		k.sub(s, func(k *kit) {
			features.Conforms(k, rows...)
			k.shows("/"+s+"-changed/key", "after")
			k.shows("/"+s+"-created/key", "new")
			k.eventually("the deleted one's file is gone", func(context.Context) error { return k.present("/" + s + "-deleted/key") })
		})
	}
	for path, rows := range map[string][]int{"down": {396, 397}, "pdown": {436, 437}} {
		k.sub(path, func(k *kit) {
			features.Conforms(k, rows...)
			k.shows("/"+path+"/labels", `a="after"`)
			k.shows("/"+path+"/annotations", "after")
		})
	}
}

// shows waits until a file in the pod watcher has the content.
func (k *kit) shows(path, want string) {
	k.Helper()
	k.eventually(fmt.Sprintf("%s is %q", path, want), func(context.Context) error {
		if out, errs, code := k.in("", "exec", "watcher", "--", "/hello", "cat", path); code != 0 || strings.TrimSpace(out) != want {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		return nil
	})
}

// present returns an error while the file is there.
func (k *kit) present(path string) error {
	if out, errs, code := k.in("", "exec", "watcher", "--", "/hello", "cat", path); code == 0 || !strings.Contains(errs, "no such file") {
		return fmt.Errorf("exit %d: %s%s", code, out, errs)
	}
	return nil
}

func (k *kit) absent(path string) {
	k.Helper()
	if err := k.present(path); err != nil {
		k.Error(err)
	}
}
