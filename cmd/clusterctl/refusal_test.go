package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestUnknownKindIsNotAskedToBeInstalled(t *testing.T) {
	// As apply puts it, for two objects.
	unknown := (&meta.NoKindMatchError{GroupKind: schema.GroupKind{Group: "example.com", Kind: "Oven"}, SearchedVersions: []string{"v1"}}).Error()
	message := plainly("error: resource mapping not found: " + unknown + "\n" + hint + "\nerror: " + unknown + "\n" + hint)
	if strings.Contains(message, hint) || strings.Count(message, "clusterd does not serve this kind") != 2 || !strings.Contains(message, `"Oven"`) {
		t.Errorf("says: %s", message)
	}
}

const asNobody = "CLUSTERCTL_TEST_AS_NOBODY"

// TestKubeconfigOfAnotherUser: whoever exports the KUBECONFIG that only root reads is
// told of sudo, by kubectl's verbs and by our own.
func TestKubeconfigOfAnotherUser(t *testing.T) {
	if verb := os.Getenv(asNobody); verb != "" {
		speakPlainly()
		root := newRoot(genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}, places())
		root.SetArgs(strings.Fields(verb))
		cmdutil.CheckErr(root.Execute())
		os.Exit(0)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "admin.kubeconfig")
	if err := os.WriteFile(file, []byte("apiVersion: v1\nkind: Config\n"), 0); err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"get nodes", "members"} {
		cmd := exec.Command("/proc/self/exe", "-test.run", "^TestKubeconfigOfAnotherUser$")
		cmd.Env = []string{asNobody + "=" + verb, "KUBECONFIG=" + file, "HOME=" + dir}
		if os.Geteuid() == 0 { // root reads all; the directory itself stays closed to others, which is a refusal too
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			cmd.Dir = "/"
		}
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), file+" may not be read by this user; use sudo") || strings.Contains(string(out), "error loading config") {
			t.Errorf("clusterctl %s: %v\n%s", verb, err, out)
		}
	}
}
