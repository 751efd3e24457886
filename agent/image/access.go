package image

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
)

// Credential is what an image is pulled with, and whose it is.
type Credential struct {
	Auth
	// Secret is the object that it comes from; the zero value: none.
	Secret SecretID
}

// SecretID names a Secret of the cluster, and which of those that had its name.
type SecretID struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

// Access is what this node knows about who may have an image.
type Access struct {
	// Preloaded: it came by no pull that is on record. It was loaded from a file, or
	// pulled by a version that kept no record.
	Preloaded bool
	// Proven: it was pulled from the repository with one of the credentials that are
	// shown, or of a Secret that is shown; or without any, or with the node's own, so
	// that all pods of the node may have it.
	Proven bool
}

// maxPulledWith bounds the credentials on record for one repository of an image: the
// oldest go, and those who have them pull again.
const maxPulledWith = 100

// pulled is with whose credentials an image was pulled from a repository.
type pulled struct {
	Everyone bool         `json:"everyone,omitempty"` // none were needed, or the node's own opened it
	With     []pulledWith `json:"with,omitempty"`     // the latest last
}

type pulledWith struct {
	SecretID
	Hash string `json:"hash"` // of the credentials, keyed with the index's salt
}

// access is what one pull adds to the record of an image.
type access struct {
	repository string // full name
	everyone   bool
	with       Credential
}

// Access looks up who may have the image of that ID, by the name that it is asked for,
// whatever image has this name by now. It asks no registry. ErrNotFound: it is not here.
func (s *Store) Access(id, ref string, shown []Credential) (Access, error) {
	full, err := Normalize(ref)
	if err != nil {
		return Access{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, ok := s.index.Images[id]
	if !ok {
		return Access{}, ErrNotFound
	}
	out := Access{Preloaded: rec.Preloaded || len(rec.Pulled) == 0}
	if parsed, err := parse(ref); err == nil && full != id {
		out.Proven = s.index.proven(rec.Pulled[fullRepository(parsed.Context())], shown)
		return out, nil
	}
	for _, p := range rec.Pulled { // an ID says nothing of a repository
		out.Proven = out.Proven || s.index.proven(p, shown)
	}
	return out, nil
}

func (ix *index) proven(p pulled, shown []Credential) bool {
	return p.Everyone || slices.ContainsFunc(shown, func(c Credential) bool {
		return slices.ContainsFunc(p.With, func(w pulledWith) bool {
			return c.Secret.UID != "" && c.Secret == w.SecretID || c.Auth != (Auth{}) && hmac.Equal([]byte(w.Hash), []byte(ix.hash(c.Auth)))
		})
	})
}

// record notes a pull; ix is a copy that is about to be saved.
func (ix *index) record(rec *imageRecord, a access) {
	p := rec.Pulled[a.repository]
	if a.everyone {
		p.Everyone = true
	} else {
		if ix.Salt == "" {
			ix.Salt = rand.Text()
		}
		w := pulledWith{SecretID: a.with.Secret, Hash: ix.hash(a.with.Auth)}
		// A Secret that was changed counts with what it has now.
		p.With = slices.DeleteFunc(slices.Clone(p.With), func(o pulledWith) bool {
			return o == w || w.UID != "" && o.SecretID == w.SecretID
		})
		p.With = append(p.With, w)
		p.With = p.With[max(0, len(p.With)-maxPulledWith):]
	}
	rec.Pulled = maps.Clone(rec.Pulled)
	if rec.Pulled == nil {
		rec.Pulled = map[string]pulled{}
	}
	rec.Pulled[a.repository] = p
}

// hash tells whether credentials are the same without keeping them.
func (ix *index) hash(a Auth) string {
	b, err := json.Marshal(a)
	if err != nil {
		panic(err) // four strings
	}
	h := hmac.New(sha256.New, []byte(ix.Salt))
	h.Write(b)
	return hex.EncodeToString(h.Sum(nil))
}

// alsoPulledBy notes that a pull which others asked for was this credential's too.
func (s *Store) alsoPulledBy(id string, a access) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, ok := s.index.Images[id]
	p, on := rec.Pulled[a.repository]
	if !ok || !on || p.Everyone || s.closed {
		return nil
	}
	hash := s.index.hash(a.with.Auth)
	if slices.ContainsFunc(p.With, func(w pulledWith) bool { return w.SecretID == a.with.Secret && w.Hash == hash }) {
		return nil
	}
	ix := s.index.clone()
	ix.record(&rec, a)
	ix.Images[id] = rec
	if err := s.saveIndex(ix); err != nil {
		return err
	}
	s.index = ix
	return nil
}
