package pod

import (
	"fmt"
	"os"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Mandatory access control: what AppArmor and SELinux would confine. No
// container of this node gets a profile or a label, so a pod that asks for one
// is refused: it is not run with less protection than it asks for.

// appArmorAnnotation opens the annotation, one a container, that named
// AppArmor profiles before there was a field.
const appArmorAnnotation = v1.DeprecatedAppArmorBetaContainerAnnotationKeyPrefix

// forbiddenMAC refuses a pod for an AppArmor profile or SELinux options;
// nil: it asks for none. Unconfined is what every container is.
func forbiddenMAC(pod *v1.Pod) *Verdict {
	var aa *v1.AppArmorProfile
	if sc := pod.Spec.SecurityContext; sc != nil {
		aa = sc.AppArmorProfile
		if wantsLabel(sc.SELinuxOptions) {
			return &Verdict{"SELinux", "Cannot apply spec.securityContext.seLinuxOptions: " + noSELinux()}
		}
	}
	if wantsProfile(aa) {
		return &Verdict{"AppArmor", fmt.Sprintf("Cannot enforce AppArmor: spec.securityContext.appArmorProfile.type is %s, and %s", aa.Type, noAppArmor())}
	}
	for _, c := range allContainers(&pod.Spec) {
		if v := forbiddenContainerMAC(c, pod.Annotations[appArmorAnnotation+c.Name]); v != nil {
			return v
		}
	}
	return nil
}

// forbiddenContainerMAC is forbiddenMAC for what one container says itself.
func forbiddenContainerMAC(c *v1.Container, annotated string) *Verdict {
	sc := c.SecurityContext
	switch {
	case sc != nil && wantsLabel(sc.SELinuxOptions):
		return &Verdict{"SELinux", fmt.Sprintf("Cannot apply securityContext.seLinuxOptions of container %s: %s", c.Name, noSELinux())}
	case sc != nil && wantsProfile(sc.AppArmorProfile):
		return &Verdict{"AppArmor", fmt.Sprintf("Cannot enforce AppArmor: securityContext.appArmorProfile.type of container %s is %s, and %s",
			c.Name, sc.AppArmorProfile.Type, noAppArmor())}
	case sc != nil && sc.AppArmorProfile != nil:
		return nil // the field comes before the annotation
	case annotated != "" && annotated != v1.DeprecatedAppArmorBetaProfileNameUnconfined:
		return &Verdict{"AppArmor", fmt.Sprintf("Cannot enforce AppArmor: annotation %s%s is %q, and %s", appArmorAnnotation, c.Name, annotated, noAppArmor())}
	}
	return nil
}

func wantsProfile(p *v1.AppArmorProfile) bool {
	return p != nil && p.Type != v1.AppArmorProfileTypeUnconfined
}

func wantsLabel(o *v1.SELinuxOptions) bool { return o != nil && *o != (v1.SELinuxOptions{}) }

func noAppArmor() string {
	on, err := os.ReadFile("/sys/module/apparmor/parameters/enabled")
	if err != nil || !strings.HasPrefix(string(on), "Y") {
		return "AppArmor is not enabled on the host: remove it or use Unconfined, or let another node run the pod"
	}
	return "this node loads no AppArmor profiles: remove it or use Unconfined, or let another node run the pod"
}

func noSELinux() string {
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		return "SELinux is not enabled on the host: remove the field, or let another node run the pod"
	}
	return "this node labels no containers: remove the field, or let another node run the pod"
}
