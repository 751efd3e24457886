package podspec

import (
	"fmt"
	"os"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Mandatory access control: what AppArmor and SELinux would confine. No
// container of this node gets a profile or a label, so one that asks for it is
// not made: it is not run with less protection than it asks for. Its pod waits
// and says so; failed, its controller would make another at once, and another.
// Where the kernel has no SELinux a label confines nothing on any runtime, and
// is ignored, as by all of them.

// appArmorAnnotation opens the annotation, one a container, that named
// AppArmor profiles before there was a field.
const appArmorAnnotation = v1.DeprecatedAppArmorBetaContainerAnnotationKeyPrefix

// forbiddenMAC refuses a container for an AppArmor profile or SELinux options
// of its own or of its pod; nil: it asks for none. Unconfined is what every
// container is. The container's field comes before the annotation, and that
// before the pod's field.
func forbiddenMAC(pod *v1.Pod, c *v1.Container) error {
	sc, psc := c.SecurityContext, pod.Spec.SecurityContext
	if sc == nil {
		sc = &v1.SecurityContext{}
	}
	if psc == nil {
		psc = &v1.PodSecurityContext{}
	}
	refuse := func(format string, args ...any) error { return createError{fmt.Errorf(format, args...)} }
	switch {
	case wantsLabel(sc.SELinuxOptions) && seLinux():
		return refuse("Cannot apply securityContext.seLinuxOptions of container %s: %s", c.Name, noLabels)
	case wantsLabel(psc.SELinuxOptions) && seLinux():
		return refuse("Cannot apply spec.securityContext.seLinuxOptions: %s", noLabels)
	}
	annotated := pod.Annotations[appArmorAnnotation+c.Name]
	switch {
	case wantsProfile(sc.AppArmorProfile):
		return refuse("Cannot enforce AppArmor: securityContext.appArmorProfile.type of container %s is %s, and %s", c.Name, sc.AppArmorProfile.Type, noAppArmor())
	case sc.AppArmorProfile != nil || annotated == v1.DeprecatedAppArmorBetaProfileNameUnconfined:
		return nil
	case annotated != "":
		return refuse("Cannot enforce AppArmor: annotation %s%s is %q, and %s", appArmorAnnotation, c.Name, annotated, noAppArmor())
	case wantsProfile(psc.AppArmorProfile):
		return refuse("Cannot enforce AppArmor: spec.securityContext.appArmorProfile.type is %s, and %s", psc.AppArmorProfile.Type, noAppArmor())
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

const noLabels = "SELinux is enabled on the host, and this node labels no containers: remove the field, or let another node run the pod"

// seLinuxEnforce is a file of the kernel that is there if SELinux is enabled.
var seLinuxEnforce = "/sys/fs/selinux/enforce"

func seLinux() bool {
	_, err := os.Stat(seLinuxEnforce)
	return err == nil
}
