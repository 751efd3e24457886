package kubectl

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/clusterd/clusterd/features"
)

// marked is a ConfigMap with a label.
func marked(name, label, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"watched": label}}, Data: map[string]string{"v": value}}
}

// next is the next event, as TYPE NAME VALUE.
func (k *kit) next(w watch.Interface) string {
	k.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if m, is := e.Object.(*corev1.ConfigMap); ok && is {
			return fmt.Sprintf("%s %s %s", e.Type, m.Name, m.Data["v"])
		}
		k.Fatalf("the watch ended with %v", e.Object)
	case <-time.After(testTimeout):
		k.Fatal("no event came")
	}
	return ""
}

func watches(k *kit) {
	maps := k.api.CoreV1().ConfigMaps(k.ns)
	ctx := k.Context()
	open := func(k *kit, from string, labels ...string) watch.Interface {
		k.Helper()
		w, err := maps.Watch(ctx, metav1.ListOptions{ResourceVersion: from, LabelSelector: "watched in (" + strings.Join(labels, ",") + ")"})
		k.must(err)
		k.Cleanup(w.Stop)
		return w
	}
	create := func(m *corev1.ConfigMap) *corev1.ConfigMap {
		made, err := maps.Create(ctx, m, metav1.CreateOptions{})
		k.must(err)
		return made
	}
	update := func(m *corev1.ConfigMap, v string) *corev1.ConfigMap {
		m = m.DeepCopy()
		m.Data["v"] = v
		m, err := maps.Update(ctx, m, metav1.UpdateOptions{})
		k.must(err)
		return m
	}
	remove := func(m *corev1.ConfigMap) { k.must(maps.Delete(ctx, m.Name, metav1.DeleteOptions{})) }
	expect := func(k *kit, w watch.Interface, want ...string) {
		k.Helper()
		for _, one := range want {
			k.is("the next event", k.next(w), one)
		}
	}
	k.sub("several", func(k *kit) {
		features.Conforms(k, 97)
		a, b, both := open(k, "", "several-a"), open(k, "", "several-b"), open(k, "", "several-a", "several-b")
		one := create(marked("sa", "several-a", "1"))
		one = update(one, "2")
		update(one, "3")
		remove(one)
		other := create(marked("sb", "several-b", "1"))
		remove(other)
		last := create(marked("sa2", "several-a", "1")) // nothing else came before
		end := create(marked("sb2", "several-b", "1"))
		first := []string{"ADDED sa 1", "MODIFIED sa 2", "MODIFIED sa 3", "DELETED sa 3"}
		second := []string{"ADDED sb 1", "DELETED sb 1"}
		expect(k, a, append(slices.Clone(first), "ADDED sa2 1")...)
		expect(k, b, append(slices.Clone(second), "ADDED sb2 1")...)
		expect(k, both, append(append(slices.Clone(first), second...), "ADDED sa2 1", "ADDED sb2 1")...)
		remove(last)
		remove(end)
	})
	k.sub("from a version", func(k *kit) {
		features.Conforms(k, 96)
		m := create(marked("from", "from", "0"))
		first := update(m, "1")
		update(first, "2")
		remove(m)
		expect(k, open(k, first.ResourceVersion, "from"), "MODIFIED from 2", "DELETED from 2")
	})
	k.sub("from where it ended", func(k *kit) {
		features.Conforms(k, 95)
		w := open(k, "", "again")
		m := create(marked("again", "again", "0"))
		m = update(m, "1")
		expect(k, w, "ADDED again 0", "MODIFIED again 1")
		w.Stop()
		update(m, "2")
		remove(m)
		expect(k, open(k, m.ResourceVersion, "again"), "MODIFIED again 2", "DELETED again 2")
	})
}

// oneOrder opens a watch at each event of another one, while objects are written:
// each sees what the first one saw after it.
func oneOrder(k *kit) {
	features.Conforms(k, 99)
	const events = 60
	maps := k.api.CoreV1().ConfigMaps(k.ns)
	ctx, cancel := context.WithCancel(k.Context())
	options := metav1.ListOptions{LabelSelector: "watched=order"}
	w, err := maps.Watch(ctx, options)
	k.must(err)
	defer w.Stop()
	done := make(chan struct{})
	go func() { // writes until the test has seen enough
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			name := fmt.Sprintf("order-%d", i%5)
			switch i / 5 % 3 {
			case 0:
				_, _ = maps.Create(ctx, marked(name, "order", fmt.Sprint(i)), metav1.CreateOptions{})
			case 1:
				_, _ = maps.Update(ctx, marked(name, "order", fmt.Sprint(i)), metav1.UpdateOptions{})
			default:
				_ = maps.Delete(ctx, name, metav1.DeleteOptions{})
			}
		}
	}()
	defer func() { cancel(); <-done }()
	version := func(w watch.Interface) string {
		select {
		case e := <-w.ResultChan():
			if m, ok := e.Object.(*corev1.ConfigMap); ok {
				return m.ResourceVersion
			}
			k.Fatalf("the watch ended with %v", e.Object)
		case <-time.After(testTimeout):
			k.Fatal("no event came")
		}
		return ""
	}
	var seen []string
	var others []watch.Interface
	for range events {
		seen = append(seen, version(w))
		options.ResourceVersion = seen[len(seen)-1]
		other, err := maps.Watch(ctx, options)
		k.must(err)
		defer other.Stop()
		others = append(others, other)
	}
	for i, other := range others {
		for _, want := range seen[i+1:] {
			if got := version(other); got != want {
				k.Fatalf("the watch from %s saw %s where the first one saw %s", seen[i], got, want)
			}
		}
	}
}

func pages(k *kit) {
	templates := k.api.CoreV1().PodTemplates(k.ns)
	const all, limit = 40, 17
	for i := range all {
		_, err := templates.Create(k.Context(), &corev1.PodTemplate{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("page-%02d", i)},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "clusterd.local/none:1"}}}},
		}, metav1.CreateOptions{})
		k.must(err)
	}
	k.sub("in chunks", func(k *kit) {
		features.Conforms(k, 87)
		for range 2 {
			options, seen, version := metav1.ListOptions{Limit: limit}, 0, ""
			for {
				list, err := templates.List(k.Context(), options)
				k.must(err)
				for _, item := range list.Items {
					k.is("the next item", item.Name, fmt.Sprintf("page-%02d", seen))
					seen++
				}
				if version == "" {
					version = list.ResourceVersion
				}
				k.is("the version of a page", list.ResourceVersion, version)
				left := int64(0)
				if list.RemainingItemCount != nil {
					left = *list.RemainingItemCount
				}
				if len(list.Items) > limit || left != int64(all-seen) {
					k.Errorf("a page of %d, after %d of %d, says that %d are left", len(list.Items), seen, all, left)
				}
				if options.Continue = list.Continue; options.Continue == "" {
					break
				}
			}
			if seen != all {
				k.Errorf("the pages have %d of %d", seen, all)
			}
		}
		list, err := templates.List(k.Context(), metav1.ListOptions{})
		k.must(err)
		if len(list.Items) != all || list.Continue != "" {
			k.Errorf("without a limit: %d of %d", len(list.Items), all)
		}
	})
	k.sub("no table", func(k *kit) {
		features.Conforms(k, 89)
		code, said := k.ask(http.MethodPost, "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
			`{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectAccessReview","spec":{"nonResourceAttributes":{"path":"/","verb":"get"}}}`,
			"Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
		if code != http.StatusNotAcceptable {
			k.Errorf("%d %s", code, said)
		}
	})
}
