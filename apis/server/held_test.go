package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
)

// queued is flow control in which what some users ask for waits until end.
type queued struct {
	flowcontrol.Interface
	waits   func(user.Info) bool
	waiting atomic.Int64
	end     chan struct{}
}

// Handle implements flowcontrol.Interface.
func (q *queued) Handle(_ context.Context, digest flowcontrol.RequestDigest,
	_ func(*flowcontrolv1.FlowSchema, *flowcontrolv1.PriorityLevelConfiguration, string),
	_ func() flowcontrolrequest.WorkEstimate, _ fairqueuing.QueueNoteFn, execute func(),
) {
	if q.waits(digest.User) {
		q.waiting.Add(1)
		<-q.end
	}
	execute()
}

// TestHeldFairly: four tenants with many accounts each, whose bodies are slow or whose
// requests wait, hold what they may. Nodes, administrators, this process and other
// tenants write on.
func TestHeldFairly(t *testing.T) {
	const kib, accounts, each = 1 << 10, 3, 100
	tenant := func(i, j int) *user.DefaultInfo {
		return &user.DefaultInfo{Name: serviceaccount.MakeUsername(fmt.Sprintf("tenant-%d", i), fmt.Sprintf("a%d", j))}
	}
	floods := map[string]bool{}
	q := &queued{waits: func(who user.Info) bool { return floods[who.GetName()] }, end: make(chan struct{})}
	b := newBodies(q, 3<<20, time.Hour)
	b.users.size, b.users.least, b.users.spare = 1024*kib, 32*kib, 512*kib
	b.cluster.size = 256 * kib
	// A request that was refused gives back what it holds before it has ended.
	var refused, ended atomic.Int64
	send := func(who user.Info, resource bool, body io.Reader, length int64) *incoming {
		in := &incoming{body: io.NopCloser(body), ctx: t.Context(), length: length, deadline: func(time.Time) error { return errors.ErrUnsupported }}
		in.rest = in.body
		ctx := context.WithValue(t.Context(), incomingKey{}, in)
		b.Handle(ctx, flowcontrol.RequestDigest{User: who, RequestInfo: &request.RequestInfo{IsResourceRequest: resource}}, nil, nil, nil, func() {
			if in.refusal != nil {
				refused.Add(1)
			}
		})
		return in
	}
	text := func(n int) (io.Reader, int64) { return bytes.NewReader(make([]byte, n)), int64(n) }
	for i := range 4 {
		for j := range accounts {
			floods[tenant(i, j).Name] = true
		}
	}
	var all sync.WaitGroup
	for i := range 4 {
		for j := range accounts {
			for range each {
				all.Go(func() {
					body, n := text(8 * kib)
					send(tenant(i, j), true, body, n)
					ended.Add(1)
				})
			}
		}
	}
	for ended.Load()+q.waiting.Load() < 4*accounts*each {
		time.Sleep(time.Millisecond)
	}
	t.Logf("%d wait, %d refused", q.waiting.Load(), refused.Load())
	if q.waiting.Load() == 0 || refused.Load() == 0 {
		t.Error("nothing waits, or nothing was refused")
	}
	b.mu.Lock()
	held := b.users.held
	b.mu.Unlock()
	if held > b.users.size {
		t.Errorf("%d of %d bytes are held by four", held, b.users.size)
	}
	for _, who := range []user.Info{
		&user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup}},
		&user.DefaultInfo{Name: "ann", Groups: []string{user.SystemPrivilegedGroup}},
		&user.DefaultInfo{Name: "bob"}, tenant(4, 0), tenant(5, 0),
	} {
		body, n := text(16 * kib)
		if in := send(who, true, body, n); in.refusal != nil || len(in.data) != int(n) {
			t.Errorf("%s: %v", who.GetName(), in.refusal)
		}
	}
	// Of sixteen more each holds what it can, and there is something for the next.
	for i := 6; i < 22; i++ {
		floods[tenant(i, 0).Name] = true
		before := ended.Load() + q.waiting.Load()
		for range each {
			all.Go(func() {
				body, n := text(8 * kib)
				send(tenant(i, 0), true, body, n)
				ended.Add(1)
			})
		}
		for ended.Load()+q.waiting.Load() < before+each {
			time.Sleep(time.Millisecond)
		}
	}
	body, n := text(16 * kib)
	if in := send(tenant(22, 0), true, body, n); in.refusal != nil {
		t.Errorf("the next: %v", in.refusal)
	}
	// A tenant that has much is refused still, whichever account it uses.
	body, n = text(512 * kib)
	if in := send(tenant(0, 99), true, body, n); in.refusal == nil || in.refusal.ErrStatus.Code != http.StatusTooManyRequests {
		t.Errorf("one more of the first tenant: %v", in.refusal)
	}
	// What is no resource is not read, whoever asks.
	if in := send(&user.DefaultInfo{Name: user.Anonymous}, false, notRead{}, -1); in.refusal != nil || in.data != nil {
		t.Errorf("a body for no resource: %v", in.refusal)
	}
	close(q.end)
	all.Wait()
	if b.users.held != 0 || b.cluster.held != 0 || len(b.users.clients) != 0 || len(b.cluster.clients) != 0 {
		t.Errorf("still held: %+v, %+v", b.users, b.cluster)
	}
}

// notRead is a body that must not be read.
type notRead struct{}

// Read implements io.Reader.
func (notRead) Read([]byte) (int, error) { panic("it was read") }

// The buffers of a body grow to its length, and never beyond what is read of one.
func TestBodyBuffers(t *testing.T) {
	b := &bodies{limit: 3 << 20}
	for _, test := range []struct {
		length  int64
		buffers []int64
	}{
		{0, []int64{1}}, {100, []int64{101}}, {1 << 20, []int64{firstBuffer, 1<<20 + 1}}, {1 << 40, []int64{firstBuffer, 3<<20 + 1}},
		{-1, []int64{firstBuffer / 16, firstBuffer / 8, firstBuffer / 4}},
	} {
		size := int64(0)
		for _, want := range test.buffers {
			if size = b.next(size, test.length); size != want {
				t.Errorf("length %d: %d, want %d", test.length, size, want)
			}
		}
	}
}

// TestAccounts: which bodies are counted together, and to what.
func TestAccounts(t *testing.T) {
	b := newBodies(nil, 1<<20, time.Hour)
	account := func(namespace, name string) *user.DefaultInfo {
		return &user.DefaultInfo{Name: serviceaccount.MakeUsername(namespace, name)}
	}
	pools := map[*pool]string{nil: "none", &b.users: "users", &b.cluster: "cluster"}
	for _, test := range []struct {
		who          *user.DefaultInfo
		pool, client string
	}{
		{&user.DefaultInfo{Name: "ann"}, "users", `user "ann"`},
		{&user.DefaultInfo{Name: "root", Groups: []string{user.SystemPrivilegedGroup}}, "cluster", `user "root"`},
		{&user.DefaultInfo{Name: "system:node:n", Groups: []string{user.NodesGroup}}, "cluster", `user "system:node:n"`},
		{account("t", "a"), "users", `service accounts of namespace "t"`},
		{account("t", "b"), "users", `service accounts of namespace "t"`},
		{account("kube-system", "dns"), "cluster", `user "system:serviceaccount:kube-system:dns"`},
		{account("kube-system-2", "dns"), "users", `service accounts of namespace "kube-system-2"`},
	} {
		if a := b.accountOf(t.Context(), test.who); pools[a.of] != test.pool || a.client != test.client {
			t.Errorf("%s: %s of %s, want %s of %s", test.who.Name, a.client, pools[a.of], test.client, test.pool)
		}
	}
}
