package server_test

import (
	"context"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) {
	leaktest.Main(m, servertest.LeftRunning()...)
}

// testTimeout bounds every wait in these tests. CI is busy.
const testTimeout = time.Minute

func meta(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

func configMap(name string, data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: meta(name), Data: data}
}

func pod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "web:1"}}},
	}
}

func deployment(name string, replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       pod(name).Spec,
			},
		},
	}
}

// must returns what a call gave, or ends the test.
func must[T any](t *testing.T) func(T, error) T {
	t.Helper()
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

// createPod makes a pod and, if node is given, binds it.
func createPod(t *testing.T, client kubernetes.Interface, p *corev1.Pod, node string) *corev1.Pod {
	t.Helper()
	pods := client.CoreV1().Pods("default")
	made := must[*corev1.Pod](t)(pods.Create(t.Context(), p, metav1.CreateOptions{}))
	if node == "" {
		return made
	}
	if err := pods.Bind(t.Context(), binding(p.Name, node), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return must[*corev1.Pod](t)(pods.Get(t.Context(), p.Name, metav1.GetOptions{}))
}

func binding(pod, node string) *corev1.Binding {
	return &corev1.Binding{ObjectMeta: meta(pod), Target: corev1.ObjectReference{Kind: "Node", Name: node}}
}

// waitContext is the context for a wait.
func waitContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}
