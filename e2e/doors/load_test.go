package doors

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	clusterdv1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

// quotaRace: 50 writers over three servers, while the loop writes what is used, make
// what the quota lets in and nothing more; each answer is in the audit log.
func quotaRace(s *suite, line *tally) {
	const writers, hard, space = 50, 20, "race"
	ctx := s.t.Context()
	s.ctl("create", "namespace", space)
	s.ctl("create", "quota", "few", "-n", space, fmt.Sprintf("--hard=count/secrets=%d", hard))
	used := func(want int64) error {
		return s.within(waitLimit, func(ctx context.Context) error {
			q, err := s.api.CoreV1().ResourceQuotas(space).Get(ctx, "few", metav1.GetOptions{})
			if err != nil {
				return err
			}
			now, ok := q.Status.Used["count/secrets"]
			if !ok || now.Cmp(*resource.NewQuantity(want, resource.DecimalSI)) != 0 {
				return fmt.Errorf("%s are used, want %d", now.String(), want)
			}
			return nil
		})
	}
	if err := used(0); err != nil {
		s.t.Fatal(err)
	}
	// All servers know the quota when each has refused what is too much at once.
	var clients []kubernetes.Interface
	for _, n := range s.Nodes()[:servers] {
		client, err := kubernetes.NewForConfig(s.admin.at(s, n.Name))
		if err != nil {
			s.t.Fatal(err)
		}
		clients = append(clients, client)
	}
	s.ctl("create", "quota", "none", "-n", space, "--hard=count/configmaps=0")
	for i, client := range clients {
		if err := s.within(waitLimit, func(ctx context.Context) error {
			_, err := client.CoreV1().ConfigMaps(space).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if !apierrors.IsForbidden(err) {
				return fmt.Errorf("server %d: %w", i, errors.Join(err, errNotRefused))
			}
			return nil
		}); err != nil {
			s.t.Fatal(err)
		}
	}
	var mu sync.Mutex
	var made, refused, retried int
	var all []sent
	var running sync.WaitGroup
	for i := range writers {
		server := s.Nodes()[i%servers].Name
		running.Go(func() {
			for try := 0; ; try++ {
				id, body := newID(), fmt.Sprintf(`{"metadata":{"name":"s-%d"}}`, i)
				got, err := call("", s.admin, http.MethodPost, core+space+"/secrets", body, 0, "").try(s, server, id)
				mu.Lock()
				if err == nil {
					all = append(all, sent{door{name: fmt.Sprintf("writer %d, try %d", i, try), by: raw, code: got.code}, id, server})
				}
				var again bool
				switch {
				case err != nil:
					s.t.Errorf("writer %d: %v", i, err)
				case got.code == http.StatusCreated:
					made++
				case got.code == http.StatusForbidden && strings.Contains(got.message, `exceeded quota: few, requested: count/secrets=1, used: count/secrets=`+fmt.Sprint(hard)+`, limited: count/secrets=`+fmt.Sprint(hard)):
					refused++
				case got.code == http.StatusConflict || got.code == http.StatusInternalServerError && strings.Contains(got.message, "quota"):
					again = true // the writers were too many for admission's tries
				default:
					s.t.Errorf("writer %d: %d %s", i, got.code, got.message)
				}
				if again {
					retried++
				}
				mu.Unlock()
				if !again {
					return
				}
			}
		})
	}
	running.Wait()
	list, err := s.api.CoreV1().Secrets(space).List(ctx, metav1.ListOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	line.by[raw], line.tried, line.shut, line.controls = refused, writers-hard, refused, made
	if made != hard || len(list.Items) != hard || refused != writers-hard {
		s.t.Errorf("%d were told that they made one, %d are there, %d were refused; want %d, %d and %d", made, len(list.Items), refused, hard, hard, writers-hard)
	}
	if err := used(hard); err != nil {
		s.t.Error(err)
	}
	line.lines = s.oneLineEach(all) - retried
}

// idleWatches opens 10 000 watches at the leader at which nothing happens, and looks
// that it stays leader and answers.
func idleWatches(s *suite, line *tally) {
	const watches = 10_000
	before := s.members()
	leader := before.Leader
	memory := func() (kib int) {
		pid, err := s.Pid(leader)
		if err != nil {
			s.t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "status"))
		if err != nil {
			s.t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(b), "RssAnon:")
		_, _ = fmt.Sscan(rest, &kib)
		return kib
	}
	first := memory()
	client, err := rest.HTTPClientFor(s.admin.at(s, leader))
	if err != nil {
		s.t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithCancel(s.t.Context())
	defer cancel()
	began := time.Now()
	for i := range watches {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+s.addr(leader).String()+core+others+"/configmaps?watch=true&resourceVersion=0&fieldSelector=metadata.name%3Dnone", nil)
		if err != nil {
			s.t.Fatal(err)
		}
		res, err := client.Do(req)
		if err != nil {
			s.t.Fatal(err)
		}
		defer res.Body.Close()
		if res.StatusCode != http.StatusOK {
			s.t.Fatalf("watch %d: %s", i, res.Status)
		}
	}
	took, opened := time.Since(began), memory()
	// One more than an administrator may have at one server.
	id := newID()
	got, err := get("", s.admin, core+others+"/configmaps?watch=true", 0, "").try(s, leader, id)
	line.tried++
	line.by[raw]++
	if err != nil || got.code != http.StatusTooManyRequests || !strings.Contains(got.message, "watches and streams open at this server") {
		s.t.Errorf("one watch more: %d %s, %v", got.code, got.message, err)
	} else {
		line.shut++
	}
	// The leader writes and reads as before.
	for i := range 20 {
		got, err := call("", s.admin, http.MethodPost, core+others+"/configmaps", fmt.Sprintf(`{"metadata":{"name":"while-%d"}}`, i), 0, "").try(s, leader, newID())
		if err != nil || got.code != http.StatusCreated {
			s.t.Errorf("a write at %s: %d %s, %v", leader, got.code, got.message, err)
		}
		line.controls++
	}
	s.t.Logf("%d watches at %s in %s: %d KiB of memory of its own before, %d with them, %.1f KiB each", watches, leader, took.Round(time.Second), first, opened, float64(opened-first)/watches)
	after := s.members()
	if after.Leader != before.Leader || after.Term != before.Term {
		s.t.Errorf("%s led in term %d, and %s in term %d", before.Leader, before.Term, after.Leader, after.Term)
	}
	line.lines = s.oneLineEach([]sent{{door{name: "one watch more", by: raw, code: http.StatusTooManyRequests}, id, leader}})
}

// members is the cluster's list of itself.
func (s *suite) members() (list clusterdv1.MemberList) {
	s.t.Helper()
	if err := s.within(waitLimit, func(ctx context.Context) error {
		b, err := s.api.Discovery().RESTClient().Get().AbsPath(clusterdv1.Members).Do(ctx).Raw()
		if err == nil {
			err = json.Unmarshal(b, &list)
		}
		if err == nil && list.Leader == "" {
			err = errors.New("there is no leader")
		}
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	return list
}
