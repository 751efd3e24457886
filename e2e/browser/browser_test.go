//go:build chromium

package browser

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// testTimeout is how long anything may take to show. The machine is busy.
const testTimeout = time.Minute

// page is a browser's tab at the cluster's page.
type page struct {
	t   *testing.T
	ctx context.Context

	mu sync.Mutex
	// faults are what the browser complained of: exceptions, refused by policy.
	faults []string
}

// server is where the page is; the test is skipped where there is no cluster.
func server(t *testing.T) string {
	t.Helper()
	url := os.Getenv("CLUSTERD_UI")
	if url == "" {
		t.Skip("needs root and Chromium: make ui-test")
	}
	return url
}

// open makes a fresh tab, without anything that another test has left.
func open(t *testing.T) *page {
	t.Helper()
	url := server(t)
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.Flag("ignore-certificate-errors", true),
		chromedp.Flag("disable-gpu", true), chromedp.Flag("disable-dev-shm-usage", true), chromedp.WindowSize(1280, 900), chromedp.WSURLReadTimeout(testTimeout))
	alloc, cancel := chromedp.NewExecAllocator(context.Background(), options...) // it outlives the test, for the last picture
	t.Cleanup(cancel)
	ctx, end := chromedp.NewContext(alloc)
	t.Cleanup(end)
	p := &page{t: t, ctx: ctx}
	chromedp.ListenTarget(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			p.fault("exception: " + e.ExceptionDetails.Error())
		case *log.EventEntryAdded:
			// That a request is refused is the page's business: it says so.
			if e.Entry.Level == log.LevelError && e.Entry.Source != log.SourceNetwork {
				p.fault(fmt.Sprintf("%s: %s", e.Entry.Source, e.Entry.Text))
			}
		}
	})
	if err := chromedp.Run(ctx); err != nil { // the browser lives as long as this context
		t.Fatal(err)
	}
	p.do(chromedp.Navigate(url))
	t.Cleanup(func() {
		if t.Failed() {
			p.shoot("failed-" + t.Name())
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, fault := range p.faults {
			t.Errorf("the browser complains: %s", fault)
		}
	})
	return p
}

func (p *page) fault(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, text)
}

func (p *page) do(actions ...chromedp.Action) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, testTimeout)
	defer cancel()
	if err := chromedp.Run(ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

// eval is the value of a JavaScript expression, which may be a promise.
func eval[T any](p *page, js string) T {
	p.t.Helper()
	var v T
	p.do(chromedp.Evaluate(js, &v, func(e *runtime.EvaluateParams) *runtime.EvaluateParams { return e.WithAwaitPromise(true) }))
	return v
}

func (p *page) text() string { return eval[string](p, "document.body.innerText") }

// shows waits until the page shows all of these texts.
func (p *page) shows(want ...string) {
	p.t.Helper()
	deadline := time.Now().Add(testTimeout)
	for {
		text, missing := p.text(), ""
		for _, w := range want {
			if !strings.Contains(text, w) {
				missing = w
				break
			}
		}
		if missing == "" {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("%q is not shown:\n%s", missing, text)
		}
		time.Sleep(100 * time.Millisecond) // the browser has nothing to wait on
	}
}

// goes opens a place of the page, as a link does.
func (p *page) goes(place string) {
	p.t.Helper()
	p.do(chromedp.Evaluate("location.hash = "+fmt.Sprintf("%q", place), nil))
}

// shoot keeps what is seen in CLUSTERD_UI_SHOTS.
func (p *page) shoot(name string) {
	dir := os.Getenv("CLUSTERD_UI_SHOTS")
	if dir == "" {
		return
	}
	var png []byte
	if err := chromedp.Run(p.ctx, chromedp.FullScreenshot(&png, 100)); err != nil {
		p.t.Errorf("screenshot %s: %v", name, err)
		return
	}
	if err := os.WriteFile(filepath.Join(dir, strings.ReplaceAll(name, "/", "-")+".png"), png, 0o644); err != nil {
		p.t.Error(err)
	}
}

// ctl runs clusterctl as the administrator.
func ctl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), os.Getenv("CLUSTERD_CTL"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("clusterctl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// signIn logs in with a token of a service account.
func (p *page) signIn(account string) {
	p.t.Helper()
	token := ctl(p.t, "-n", "hostile", "create", "token", account)
	p.do(chromedp.WaitVisible("#token"), chromedp.SetValue("#token", token), chromedp.Click("form.login button"))
	p.shows("Overview", "hostile/"+account)
}

// unharmed checks that no text of the cluster became an element or was run.
func (p *page) unharmed() {
	p.t.Helper()
	got := eval[string](p, `[document.title, document.querySelectorAll('img, iframe, object, script:not([src]), [onerror], a:not([href^="#"])').length].join(' ')`)
	if strings.Contains(got, "owned") || !strings.HasSuffix(got, " 0") {
		p.t.Errorf("a text was taken for HTML: %s", got)
	}
}

func TestNothingWithoutALogin(t *testing.T) {
	p := open(t)
	p.shows("Sign in", "Token of a service account")
	for _, secret := range []string{"n1", "hello", "leader"} {
		if text := p.text(); strings.Contains(text, secret) {
			t.Errorf("%q is shown without a login:\n%s", secret, text)
		}
	}
	p.do(chromedp.SetValue("#token", "nonsense"), chromedp.Click("form.login button"))
	p.shows("The server does not know this token")
	p.goes("#/pods")
	p.shows("Sign in")
	p.shoot("login")
}

func TestEverythingForAnAdministrator(t *testing.T) {
	p := open(t)
	p.signIn("admin")
	p.shows("5 of 5 Ready", "3 of 3 voters alive", "led by", "FailedScheduling")
	p.unharmed()
	p.shoot("overview")
	for place, want := range map[string][]string{
		"#/nodes":            {"n1", "n2", "n3", "a1", "a2", "Ready", "Internal-IP"},
		"#/workloads":        {"Deployments", "hello", "StatefulSets", "There are none."},
		"#/pods":             {"hostile", "nowhere", "Pending", "Running"},
		"#/members":          {"leader", "voter", "alive", "Term", "10.91.0.2:6443"},
		"#/store":            {"Quota", "Servers", "Largest folders", "Busiest writers"},
		"#/events":           {"<script>document.title='owned'</script>", "<b>Pod</b>", "Scheduled"},
		"#/services":         {"kubernetes", "ClusterIP"},
		"#/nodes/n1":         {"Capacity", "Conditions", "Pods here", "Who changed it"},
		"#/no/such/place":    {"No such place"},
		"#/pods/hostile/non": {"There is no such object."},
	} {
		p.goes(place)
		p.shows(want...)
		p.unharmed()
		p.shoot("admin-" + strings.Trim(strings.ReplaceAll(place, "/", "-"), "#-"))
	}
}

func TestAPodsStory(t *testing.T) {
	p := open(t)
	p.signIn("admin")
	p.goes("#/pods/hostile/hostile")
	p.shows("Asked", "Admitted", "Committed", "by a majority of the servers, revision", "Scheduled", "on node", "Pulled", "Started", "Ready", "it takes traffic")
	if done := eval[int](p, `document.querySelectorAll('.story li.done').length`); done != 7 {
		t.Errorf("%d of 7 stations are done:\n%s", done, p.text())
	}
	at := eval[[]float64](p, `[...document.querySelectorAll('.story time')].map((x) => Date.parse(x.dateTime))`)
	for i := 1; i < len(at); i++ {
		// Some sources have whole seconds: up to one is lost.
		if at[i]+1000 < at[i-1] {
			t.Errorf("station %d was %v ms before the one before it", i, at[i-1]-at[i])
		}
	}
	p.unharmed()
	p.shoot("pod")

	t.Run("its log follows", func(t *testing.T) {
		count := func() int { return eval[int](p, `document.querySelectorAll('.log span').length`) }
		before, deadline := count(), time.Now().Add(testTimeout)
		for count() < before+2 {
			if time.Now().After(deadline) {
				t.Fatalf("no new line: %d", before)
			}
			time.Sleep(200 * time.Millisecond)
		}
	})
	t.Run("a hostile log is text", func(t *testing.T) {
		p.t = t
		p.do(chromedp.SetValue(".logs select", "says"), chromedp.Evaluate(`document.querySelector('.logs select').dispatchEvent(new Event('change'))`, nil))
		p.shows("<b>bold</b><img src=x onerror=", "red", "The log ends here.")
		p.unharmed()
		p.shoot("pod-hostile-log")
	})
	t.Run("who waits, and why", func(t *testing.T) {
		p.t = t
		p.goes("#/pods/hostile/nowhere")
		p.shows("stuck", "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector")
		p.unharmed()
		p.shoot("pod-pending")
		p.goes("#/pods/hostile/no-image")
		p.shows("stuck", "127.0.0.1:1/no/such:image")
		p.shoot("pod-no-image")
	})
}

func TestItLives(t *testing.T) {
	p := open(t)
	p.signIn("admin")
	ctl(t, "-n", "hello", "scale", "deployment/hello", "--replicas=3")
	p.goes("#/deployments/hello/hello")
	p.shows("3 ready of 3")
	rows := func(n int) {
		t.Helper()
		deadline := time.Now().Add(testTimeout)
		for {
			if got := eval[int](p, `[...document.querySelectorAll('section.list')].find((s) => s.querySelector('h2').textContent.startsWith('Pods')).querySelectorAll('tbody tr').length`); got == n {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("not %d pods:\n%s", n, p.text())
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	rows(3)
	ctl(t, "-n", "hello", "scale", "deployment/hello", "--replicas=5")
	rows(5)
	p.shows("5 ready of 5", "spec.replicas: 3 → 5")
	p.shoot("deployment")
	ctl(t, "-n", "hello", "scale", "deployment/hello", "--replicas=3")
	rows(3)

	ctl(t, "-n", "hello", "run", "short", "--image=clusterd.local/hello:1", "--image-pull-policy=Never", "--", "count")
	p.goes("#/pods/hello/short")
	p.shows("it takes traffic")
	ctl(t, "-n", "hello", "delete", "pod", "short", "--now")
	p.shows("It was deleted.")
}

func TestWhatIsForbiddenIsSaid(t *testing.T) {
	p := open(t)
	p.signIn("guest")
	p.shows("You may not see these.")
	p.goes("#/pods")
	p.shows(`You may not see this: pods is forbidden: User "system:serviceaccount:hostile:guest" cannot list resource "pods"`)
	p.goes("#/members")
	p.shows("You may not see this", "/clusterd/v1/members")
	p.shoot("forbidden")
	p.goes("#/pods")
	p.do(chromedp.SetValue("input.ns", "hostile"), chromedp.Evaluate(`document.querySelector('input.ns').dispatchEvent(new Event('change'))`, nil))
	p.shows("hostile", "nowhere")
	if strings.Contains(p.text(), "You may not") {
		t.Errorf("in its own namespace something is refused:\n%s", p.text())
	}
	p.goes("#/pods/hostile/hostile")
	p.shows("it takes traffic", "Who changed it")
	p.do(chromedp.Click(`//button[text()="Sign out"]`))
	p.shows("Sign in")
	p.unharmed()
}

func TestSmallAndDark(t *testing.T) {
	p := open(t)
	p.signIn("admin")
	p.do(chromedp.EmulateViewport(360, 740, chromedp.EmulateMobile))
	for _, place := range []string{"#/", "#/nodes", "#/pods", "#/members", "#/store", "#/events", "#/pods/hostile/hostile", "#/nodes/n1"} {
		p.goes(place)
		p.do(chromedp.WaitVisible("h1"))
		p.shows(map[string]string{"#/": "led by", "#/nodes": "n3", "#/pods": "nowhere", "#/members": "voter", "#/store": "Largest", "#/events": "Scheduled", "#/nodes/n1": "Conditions", "#/pods/hostile/hostile": "it takes traffic"}[place])
		if width := eval[int](p, `document.documentElement.scrollWidth`); width > 360 {
			t.Errorf("%s is %d pixels wide on a screen of 360; the widest: %s", place, width, eval[string](p,
				`[...document.querySelectorAll('main *, header *')].filter((e) => e.getBoundingClientRect().right > 361).slice(0, 5).map((e) => e.tagName + '.' + e.className).join(' ')`))
		}
		p.shoot("small-" + strings.Trim(strings.ReplaceAll(place, "/", "-"), "#-"))
	}
	back := func() string { return eval[string](p, `getComputedStyle(document.body).backgroundColor`) }
	light := back()
	p.do(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}))
	dark := back()
	if light == dark {
		t.Errorf("light and dark look the same: %s", light)
	}
	p.do(chromedp.EmulateViewport(1280, 900))
	p.goes("#/")
	p.shows("led by")
	p.shoot("dark-overview")
	p.goes("#/pods/hostile/hostile")
	p.shows("it takes traffic")
	p.shoot("dark-pod")
	// The button goes on from the system's to light, dark, and back.
	for _, want := range []string{light, dark, dark} {
		p.do(chromedp.Click(`button[aria-label^="Colours"]`))
		if got := back(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// TestStory runs the story's function over values, in the browser that has it.
func TestStory(t *testing.T) {
	p := open(t)
	for _, test := range []struct{ name, pod, events, history, want string }{
		{"not scheduled yet", `{metadata: {creationTimestamp: '2026-01-01T00:00:00Z'}, spec: {containers: [{name: 'a'}]}}`, `[]`, `null`,
			"Asked done, Admitted done, Committed done, Scheduled now, Pulled later, Started later, Ready later"},
		{"no node fits", `{metadata: {}, spec: {containers: [{name: 'a'}]}, status: {conditions: [{type: 'PodScheduled', status: 'False', reason: 'Unschedulable', message: 'no'}]}}`, `[]`, `{changes: []}`,
			"Asked done, Admitted done, Committed done, Scheduled failed, Pulled later, Started later, Ready later"},
		{"image missing", `{metadata: {}, spec: {nodeName: 'n1', containers: [{name: 'a'}]}, status: {containerStatuses: [{name: 'a', state: {waiting: {reason: 'ImagePullBackOff'}}}]}}`, `[]`, `null`,
			"Asked done, Admitted done, Committed done, Scheduled done, Pulled failed, Started later, Ready later"},
		{"crashes", `{metadata: {}, spec: {nodeName: 'n1', containers: [{name: 'a'}]}, status: {containerStatuses: [{name: 'a', imageID: 'x', restartCount: 3, state: {waiting: {reason: 'CrashLoopBackOff'}}}]}}`, `[]`, `null`,
			"Asked done, Admitted done, Committed done, Scheduled done, Pulled done, Started failed, Ready later"},
		{"not ready yet", `{metadata: {}, spec: {nodeName: 'n1', containers: [{name: 'a'}]}, status: {containerStatuses: [{name: 'a', imageID: 'x', state: {running: {startedAt: '2026-01-01T00:00:09Z'}}}]}}`, `[]`, `null`,
			"Asked done, Admitted done, Committed done, Scheduled done, Pulled done, Started done, Ready now"},
		{"failed", `{metadata: {}, spec: {nodeName: 'n1', containers: [{name: 'a'}]}, status: {phase: 'Failed', containerStatuses: [{name: 'a', imageID: 'x', state: {terminated: {exitCode: 3, reason: 'Error', startedAt: '2026-01-01T00:00:09Z', finishedAt: '2026-01-01T00:00:10Z'}}}]}}`, `[]`, `null`,
			"Asked done, Admitted done, Committed done, Scheduled done, Pulled done, Started done, Ready later, Ended failed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := eval[string](p, fmt.Sprintf(`import('./story.js').then((m) => m.story(%s, %s, %s).map((s) => s.name + ' ' + s.state).join(', '))`, test.pod, test.events, test.history))
			if got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
	fields := eval[string](p, `import('./story.js').then((m) => m.fieldChanges({spec: {replicas: 2}, metadata: {resourceVersion: '1'}}, {spec: {replicas: 3}, metadata: {resourceVersion: '2', labels: {a: 'b'}}}).join('; '))`)
	if want := `spec.replicas: 2 → 3; metadata.labels: nothing → {"a":"b"}`; fields != want {
		t.Errorf("fields %q, want %q", fields, want)
	}
	if secret := eval[string](p, `import('./story.js').then((m) => m.fieldChanges({kind: 'Secret', data: {a: 'old'}}, {kind: 'Secret', data: {a: 'new'}}).join('; '))`); secret != "data.a: changed" {
		t.Errorf("a Secret's change is shown as %q", secret)
	}
}
