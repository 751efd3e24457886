package doors

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/client-go/kubernetes"
)

// keyOf is the id of the key that has signed a token.
func keyOf(s *suite, token string) string {
	s.t.Helper()
	header, _, _ := strings.Cut(token, ".")
	var h struct{ Kid string }
	b, err := base64.RawURLEncoding.DecodeString(header)
	if err == nil {
		err = json.Unmarshal(b, &h)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return h.Kid
}

// tokenKeys: another key signs, on all servers and without a restart, and tokens of the one
// before stay good.
func tokenKeys(s *suite, line *tally) {
	pids := map[string]int{}
	for _, n := range s.Nodes() {
		pid, err := s.Pid(n.Name)
		if err != nil {
			s.t.Fatal(err)
		}
		pids[n.Name] = pid
	}
	old := s.robot.config.BearerToken
	s.tryGroup(line, []door{
		get("the keys, by the administrator", s.admin, "/clusterd/v1/token-keys", ok, keyOf(s, old)),
		call("an account rotates the keys", s.robot, http.MethodPost, "/clusterd/v1/token-keys", "", 403, `User "`+robotName+`" cannot post path "/clusterd/v1/token-keys"`),
		get("an account reads of the keys", s.robot, "/clusterd/v1/token-keys", 403, `cannot get path "/clusterd/v1/token-keys"`),
	})
	said := s.ctl("token-keys", "rotate", "--wait")
	young := s.token("robot", authenticationv1.TokenRequestSpec{})
	before, after := keyOf(s, old), keyOf(s, young)
	if before == after || !strings.Contains(said, after) {
		s.t.Errorf("the keys are %s and %s, and the command said: %s", before, after, said)
	}
	for _, n := range s.Nodes()[:servers] {
		client, err := kubernetes.NewForConfig(s.admin.at(s, n.Name))
		if err != nil {
			s.t.Fatal(err)
		}
		if err := s.within(waitLimit, func(ctx context.Context) error {
			b, err := client.Discovery().RESTClient().Get().AbsPath("/openid/v1/jwks").DoRaw(ctx)
			if err != nil {
				return err
			}
			var set struct{ Keys []struct{ Kid string } }
			if err := json.Unmarshal(b, &set); err != nil {
				return err
			}
			var ids []string
			for _, k := range set.Keys {
				ids = append(ids, k.Kid)
			}
			if !slices.Contains(ids, before) || !slices.Contains(ids, after) {
				return fmt.Errorf("%s publishes %q", n.Name, ids)
			}
			return nil
		}); err != nil {
			s.t.Error(err)
		}
		for what, token := range map[string]string{"before": old, "after": young} {
			got, err := get("", s.bearer("", token), core+ns+"/secrets/own", ok, "").try(s, n.Name, newID())
			if err != nil || got.code != ok {
				s.t.Errorf("a token of %s at %s: %d %s, %v", what, n.Name, got.code, got.message, err)
			}
		}
	}
	for _, n := range s.Nodes() {
		if pid, err := s.Pid(n.Name); err != nil || pid != pids[n.Name] {
			s.t.Errorf("%s was process %d, and is %d (%v)", n.Name, pids[n.Name], pid, err)
		}
	}
}
