package tokens

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// memory is a Store in memory.
type memory struct {
	mu   sync.Mutex // guards keys
	keys []StoredKey
}

func (m *memory) List(context.Context) ([]StoredKey, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.keys), nil
}

func (m *memory) Create(_ context.Context, key StoredKey) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.ContainsFunc(m.keys, func(k StoredKey) bool { return k.Number == key.Number }) {
		return ErrKeyExists
	}
	m.keys = append(m.keys, key)
	return nil
}

func (m *memory) Delete(_ context.Context, number int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.keys = slices.DeleteFunc(m.keys, func(k StoredKey) bool { return k.Number == number })
	return nil
}

// oneAccount is Objects of the ServiceAccount default/robot.
type oneAccount struct{ Objects }

func (oneAccount) ServiceAccount(context.Context, string, string) (*corev1.ServiceAccount, error) {
	return &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "robot", UID: types.UID("u")}}, nil
}

// servers are two API servers of one cluster, at a time that the test sets.
type servers struct {
	t        *testing.T
	now      time.Time
	store    memory
	issuers  [2]*Issuer
	verifies [2]*Authenticator
}

func newServers(t *testing.T) *servers {
	s := &servers{t: t, now: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)}
	clock := func() time.Time { return s.now }
	for i := range s.issuers {
		keys := NewKeys(&s.store)
		keys.now = clock
		s.issuers[i] = NewIssuer("us", keys)
		s.issuers[i].By(clock)
		s.verifies[i] = NewAuthenticator("us", keys, []string{"us"}, oneAccount{})
		s.verifies[i].By(clock)
	}
	return s
}

// token is one of that server that lives for years.
func (s *servers) token(server int) string {
	s.t.Helper()
	text, _, err := s.issuers[server].Issue(s.t.Context(), Grant{Namespace: "default", Account: Ref{Name: "robot", UID: "u"}, Audiences: []string{"us"}, Expires: s.now.Add(3 * extended)})
	if err != nil {
		s.t.Fatal(err)
	}
	return text
}

// good reports whether all servers agree that a token is good, or is not.
func (s *servers) good(token string, want bool, when string) {
	s.t.Helper()
	for i, v := range s.verifies {
		if _, ok, err := v.AuthenticateToken(s.t.Context(), token); ok != want {
			s.t.Errorf("server %d, %s: token good: %t (%v), want %t", i, when, ok, err, want)
		}
	}
}

func (s *servers) follow(server int, cause Cause, want bool) {
	s.t.Helper()
	if made, err := s.issuers[server].Keys.Follow(s.t.Context(), cause); err != nil || made != want {
		s.t.Fatalf("follow %+v: made %t, %v, want %t", cause, made, err, want)
	}
}

func (s *servers) drop(want ...int) {
	s.t.Helper()
	if _, err := s.issuers[0].Keys.Drop(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	var left []int
	for _, k := range s.store.keys {
		left = append(left, k.Number)
	}
	if !slices.Equal(left, want) {
		s.t.Errorf("keys %v are left, want %v", left, want)
	}
}

// TestFollow: after a CA rotation tokens of the key before live as
// long as pods' tokens do, and no longer.
func TestFollow(t *testing.T) {
	s := newServers(t)
	old := s.token(0)
	s.good(old, true, "before")
	s.follow(0, Cause{Authority: 3}, true)
	s.follow(1, Cause{Authority: 3}, false) // another leader, later
	s.follow(1, Cause{Authority: 2}, false) // a leader that is behind
	s.now = s.now.Add(publishedFor + freshFor)
	young := s.token(1)
	s.good(young, true, "a minute later")
	s.now = s.now.Add(retiredFor - 2*freshFor)
	s.good(old, true, "almost a year later")
	s.drop(1, 2)
	s.now = s.now.Add(2 * freshFor)
	s.good(old, false, "a year later")
	s.good(young, true, "a year later")
	s.drop(2)
}

// TestRotate: another key, asked for or because of its age, is known at all servers before
// it signs; tokens of the one before stay good for a year, and a rotation of
// the CA before it is not followed again.
func TestRotate(t *testing.T) {
	s := newServers(t)
	rotate := func(server int, age time.Duration, want bool) {
		t.Helper()
		if made, err := s.issuers[server].Keys.Rotate(t.Context(), age); err != nil || made != want {
			t.Fatalf("rotate after %s: made %t, %v, want %t", age, made, err, want)
		}
	}
	states := func(server int, signs ...bool) {
		t.Helper()
		all, err := s.issuers[server].Keys.States(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got []bool
		for i, state := range all {
			got = append(got, state.Signs)
			if last := i == len(all)-1; state.Until.IsZero() != last || state.Signs && state.From.After(s.now) {
				t.Errorf("key %d of %d: %+v", i, len(all), state)
			}
		}
		if !slices.Equal(got, signs) {
			t.Errorf("which keys sign: %v, want %v", got, signs)
		}
	}
	states(0)
	s.follow(0, Cause{Authority: 3}, true)
	old := s.token(0)
	states(1, true)
	s.now = s.now.Add(publishedFor)
	rotate(0, time.Hour, false)
	rotate(1, 0, true)
	rotate(0, 0, false) // asked twice, at another server
	s.follow(0, Cause{Authority: 3}, false)
	states(0, true, false)
	before := s.token(0)
	s.now = s.now.Add(publishedFor)
	states(1, false, true)
	after := s.token(1)
	for what, token := range map[string]string{"of the old key": old, "signed while the new one was published": before, "of the new key": after} {
		s.good(token, true, what)
	}
	if of(t, before) != of(t, old) || of(t, after) == of(t, old) {
		t.Errorf("keys %s, %s, %s", of(t, old), of(t, before), of(t, after))
	}
	s.now = s.now.Add(retiredFor - time.Hour)
	rotate(0, retiredFor, false)
	s.good(old, true, "almost a year later")
	s.now = s.now.Add(2 * time.Hour)
	rotate(0, retiredFor, true)
	s.good(old, false, "a year later")
	s.drop(2, 3)
}

// TestRotateYoung: a key that signs is changed whatever its age, the first one and one that
// stands alone, too; it signs until the next one has been published for a minute.
func TestRotateYoung(t *testing.T) {
	s := newServers(t)
	old := s.token(0)
	for _, alone := range []bool{false, true} {
		if alone {
			s.follow(0, Cause{Authority: 3, Alone: true}, true)
			old = s.token(0)
		}
		for i, want := range []bool{true, false} {
			if made, err := s.issuers[i].Keys.Rotate(t.Context(), 0); err != nil || made != want {
				t.Fatalf("alone %t, asked %d times: made %t, %v, want %t", alone, i+1, made, err, want)
			}
		}
		states, err := s.issuers[1].Keys.States(t.Context())
		if err != nil || len(states) != 2 || !states[0].Signs || states[0].From.After(s.now) || !states[1].From.After(s.now) {
			t.Fatalf("alone %t: %+v, %v", alone, states, err)
		}
		before := s.token(0)
		s.now = s.now.Add(publishedFor)
		after := s.token(0)
		if of(t, before) != of(t, old) || of(t, after) == of(t, old) {
			t.Errorf("alone %t: keys %s, %s, %s", alone, of(t, old), of(t, before), of(t, after))
		}
		s.good(before, true, "after the change")
		s.good(after, true, "after the change")
	}
}

// of is the id of the key that has signed a token.
func of(t *testing.T, token string) string {
	t.Helper()
	parsed, err := jwt.ParseSigned(token, []jose.SignatureAlgorithm{algorithm})
	if err != nil {
		t.Fatal(err)
	}
	return parsed.Headers[0].KeyID
}

// TestFollowAlone: after a rotation that was finished at once tokens of the key
// before are refused as soon as a server has read the keys again.
func TestFollowAlone(t *testing.T) {
	s := newServers(t)
	old := s.token(0)
	s.good(old, true, "before")
	s.follow(0, Cause{Authority: 3, Alone: true}, true)
	if _, ok, _ := s.verifies[0].AuthenticateToken(t.Context(), old); ok {
		t.Error("the server that made the key takes a token of the one before")
	}
	young := s.token(0)
	s.now = s.now.Add(askAgain)
	s.good(young, true, "a second later")
	s.now = s.now.Add(freshFor)
	s.good(old, false, "when all have read the keys")
	s.drop(2)
	s.good(young, true, "when the old key is deleted")
	// A later rotation that is not finished at once leaves this key alone.
	s.follow(1, Cause{Authority: 6}, true)
	s.now = s.now.Add(time.Hour)
	s.good(young, true, "after another rotation")
	s.drop(2, 3)
}

// TestFollowFirst: in a cluster that has issued no token a rotation makes its
// first key, and a key that another server makes meanwhile does not pass for it.
func TestFollowFirst(t *testing.T) {
	s := newServers(t)
	s.follow(0, Cause{Authority: 3, Alone: true}, true)
	s.good(s.token(1), true, "the first key")
	raced := NewKeys(&racingStore{memory: &s.store, first: StoredKey{Number: 2, Created: s.now, Private: s.store.keys[0].Private}})
	raced.now = func() time.Time { return s.now }
	if made, err := raced.Follow(t.Context(), Cause{Authority: 6}); err == nil || made {
		t.Errorf("another server's key passed for one that follows the authority: %t", made)
	}
	if made, err := raced.Follow(t.Context(), Cause{Authority: 6}); err != nil || !made {
		t.Errorf("tried again: %t, %v", made, err)
	}
}

// racingStore is one in which another server is faster once.
type racingStore struct {
	*memory
	first StoredKey
	lost  bool
}

func (r *racingStore) Create(ctx context.Context, key StoredKey) error {
	if !r.lost {
		r.lost = true
		if err := r.memory.Create(ctx, r.first); err != nil {
			return errors.Join(errors.New("the other server's key"), err)
		}
	}
	return r.memory.Create(ctx, key)
}

// TestClocksApart: a server's tokens are good at another one whose clock is behind, and
// no longer than they were issued for at any.
func TestClocksApart(t *testing.T) {
	s := newServers(t)
	text, _, err := s.issuers[0].Issue(t.Context(), Grant{Namespace: "default", Account: Ref{Name: "robot", UID: "u"}, Audiences: []string{"us"}, Expires: s.now.Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	issued := s.now
	for _, at := range []struct {
		when string
		now  time.Time
		good bool
	}{
		{"a clock that is half a minute behind", issued.Add(-30 * time.Second), true},
		{"a clock that is five minutes behind", issued.Add(-5 * time.Minute), false},
		{"in time", issued.Add(59 * time.Minute), true},
		{"a second after its end", issued.Add(time.Hour + time.Second), false},
	} {
		s.now = at.now
		s.good(text, at.good, at.when)
	}
}
