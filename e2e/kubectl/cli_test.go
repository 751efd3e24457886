package kubectl

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXCommandLine goes through commands as the conformance tests use them.
func TestE2EXCommandLine(t *testing.T) {
	t.Parallel()
	k := start(t, "cli")
	k.applyAll(simple("one", "serve"), simple("counts", "count"), web("web", 1))
	k.sub("about the cluster", func(k *kit) {
		features.Conforms(k, 100, 190, 191, 200)
		k.has("\n"+k.ok("api-versions"), "\nv1\n")
		k.has(k.ok("cluster-info"), "Kubernetes control plane", "is running at")
		var v struct {
			ServerVersion struct{ Major, Minor, GitVersion, GitCommit, BuildDate, GoVersion, Compiler, Platform string }
			ClientVersion struct{ GitVersion string }
		}
		k.decode(k.ok("version", "-o", "json"), &v)
		s := v.ServerVersion
		for field, value := range map[string]string{"gitVersion": s.GitVersion, "gitCommit": s.GitCommit, "buildDate": s.BuildDate, "goVersion": s.GoVersion,
			"compiler": s.Compiler, "platform": s.Platform, "the client's": v.ClientVersion.GitVersion} {
			if value == "" {
				k.Errorf("version: %s is empty", field)
			}
		}
		for _, number := range []string{s.Major, s.Minor} {
			if _, err := strconv.Atoi(number); err != nil {
				k.Errorf("version: %v", err)
			}
		}
	})
	k.sub("changes", func(k *kit) {
		features.Conforms(k, 193, 195, 197, 199)
		k.ready("one")
		k.ok("label", "pod", "one", "testing=yes")
		k.is("-l", k.ok("get", "pods", "-l", "testing=yes", "-o", "name"), "pod/one\n")
		k.ok("label", "pod", "one", "testing-")
		k.is("-l without it", k.ok("get", "pods", "-l", "testing=yes", "-o", "name"), "")
		k.ok("patch", "pod", "one", "--dry-run=server", "-p", `{"spec":{"containers":[{"name":"main","image":"a/b:2"}]}}`)
		k.is("image after a dry run", k.field("pod/one", "{.spec.containers[0].image}"), image)
		out, errs, code := k.in(strings.Replace(web("web", 1), image, "a/b:2", 1), "diff", "-f", "-")
		if code != 1 {
			k.Errorf("diff: exit %d: %s", code, errs)
		}
		k.has(out, "-        image: "+image, "+        image: a/b:2")
		k.is("image after a diff", k.field("deploy/web", "{.spec.template.spec.containers[0].image}"), image)
		k.eventually("it is replaced as it was got", func(context.Context) error { // unless its node has written its status since
			whole := strings.Replace(k.ok("get", "pod", "one", "-o", "json"), `"image": "`+image+`"`, `"image": "a/b:2"`, 1)
			if _, errs, code := k.in(whole, "replace", "-f", "-"); code != 0 {
				return errors.New(errs)
			}
			return nil
		})
		k.is("image after replace", k.field("pod/one", "{.spec.containers[0].image}"), "a/b:2")
	})
	k.sub("logs", func(k *kit) {
		features.Conforms(k, 205)
		k.ready("counts")
		k.eventuallyHas([]string{"logs", "counts"}, "\n9\n")
		k.is("lines of --tail", fmt.Sprint(strings.Count(k.ok("logs", "counts", "--tail=1"), "\n")), "1")
		k.is("--limit-bytes", k.ok("logs", "counts", "--limit-bytes=1"), "0")
		stamped := k.ok("logs", "counts", "--tail=1", "--timestamps")
		if !regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z \d+\n$`).MatchString(stamped) {
			k.Errorf("--timestamps: %q", stamped)
		}
		k.has(k.ok("logs", "counts", "--since=24h"), "0\n1\n2\n")
	})
	k.sub("proxy", func(k *kit) {
		features.Conforms(k, 201, 202)
		socket := filepath.Join(k.dir, "s")
		answer := func(client *http.Client, url string) string {
			k.Helper()
			resp, err := client.Get(url)
			if err != nil {
				k.Fatal(err)
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != http.StatusOK {
				k.Errorf("%s: %d, %v", url, resp.StatusCode, err)
			}
			return string(b)
		}
		for _, flag := range []string{"--unix-socket=" + socket, "--port=0"} {
			ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
			cmd := k.command(ctx, "proxy", flag)
			out, err := cmd.StdoutPipe()
			k.must(err)
			k.must(cmd.Start())
			s := bufio.NewScanner(out)
			if !s.Scan() {
				k.Errorf("proxy %s says nothing: %v", flag, s.Err())
			}
			client, url := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, "http://"+strings.TrimPrefix(s.Text(), "Starting to serve on ")+"/api/"
			if strings.Contains(flag, "socket") {
				url = "http://localhost/api/"
				client.Transport.(*http.Transport).DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
					return (&net.Dialer{}).DialContext(ctx, "unix", socket)
				}
			}
			k.has(answer(client, url), "APIVersions")
			cancel()
			_ = cmd.Wait() // it was killed
		}
	})
	k.ok("delete", "deploy", "web", "--wait=false")
	k.ok("delete", "pod", "--all", "--wait=false")
}
