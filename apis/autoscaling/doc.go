// Package autoscaling describes the kinds of the autoscaling API group. Their
// hub is autoscaling/v2; autoscaling/v1 is a view of it (view_v1.go).
package autoscaling
