// Package cells makes the columns and cells of server-side tables.
package cells

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
)

// Name is the column every table starts with; Age the one most end with.
var (
	Name = metav1.TableColumnDefinition{Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]}
	Age  = Text("Age", metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"])
)

// Text is a column of text.
func Text(name, description string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "string", Description: description}
}

// Number is a column of whole numbers.
func Number(name, description string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "integer", Description: description}
}

// Wide makes column one that only -o wide shows.
func Wide(column metav1.TableColumnDefinition) metav1.TableColumnDefinition {
	column.Priority = 1
	return column
}

// Since is the age of t in words ("5m", "3d4h"), "<unknown>" if t is not set.
func Since(t metav1.Time, now time.Time) string {
	if t.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(now.Sub(t.Time))
}

// None is what tables show for an empty text.
func None(text string) string {
	if text == "" {
		return "<none>"
	}
	return text
}

// Containers lists the names and the images of containers.
func Containers(containers []corev1.Container) (names, images string) {
	n, i := make([]string, len(containers)), make([]string, len(containers))
	for k := range containers {
		n[k], i[k] = containers[k].Name, containers[k].Image
	}
	return strings.Join(n, ","), strings.Join(i, ",")
}
