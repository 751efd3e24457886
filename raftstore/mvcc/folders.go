package mvcc

import (
	"strings"
	"sync"
)

// Use is how much live data there is.
type Use struct {
	Keys  int64 `json:"keys"`
	Bytes int64 `json:"bytes"` // of keys and values
}

func (u Use) minus(v Use) Use { return Use{u.Keys - v.Keys, u.Bytes - v.Bytes} }

// use is what v takes; nothing when it is not live.
func (v *version) use() Use {
	if !v.live() {
		return Use{}
	}
	return Use{Keys: 1, Bytes: int64(len(v.kv.Key) + len(v.kv.Value))}
}

// folders counts live data by folder. A folder is a part of a key up to and
// with a slash: /a/b is in / and /a/. It follows from the live keys, so it is
// in no snapshot and no hash.
type folders struct {
	mu sync.RWMutex
	by map[string]*folder
}

type folder struct {
	Use
	rev int64 // of the last change of Keys, at least
}

func (f *folders) init() { f.by = make(map[string]*folder) }

// note adds d, a change of revision rev, to all folders of key.
func (f *folders) note(key string, rev int64, d Use) {
	if d == (Use{}) {
		return
	}
	f.noteIn(key, rev, d)
}

// folderRun gathers live keys of one folder that come one after the other.
type folderRun struct {
	folder string
	rev    int64
	use    Use
}

func (r *folderRun) add(f *folders, v *version) {
	key := v.kv.Key
	if n := len(r.folder); n == 0 || !strings.HasPrefix(key, r.folder) || strings.IndexByte(key[n:], '/') >= 0 {
		r.flush(f)
		r.folder = key[:strings.LastIndexByte(key, '/')+1]
	}
	use := v.use()
	r.use.Keys += use.Keys
	r.use.Bytes += use.Bytes
	r.rev = max(r.rev, v.kv.ModRevision)
}

func (r *folderRun) flush(f *folders) {
	if r.use.Keys > 0 {
		f.noteIn(r.folder, r.rev, r.use)
	}
	*r = folderRun{}
}

func (f *folders) noteIn(key string, rev int64, d Use) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for end := 0; ; {
		n := strings.IndexByte(key[end:], '/')
		if n < 0 {
			return
		}
		end += n + 1
		u := f.by[key[:end]]
		if u == nil {
			u = new(folder)
			f.by[strings.Clone(key[:end])] = u
		}
		u.Keys += d.Keys
		u.Bytes += d.Bytes
		if d.Keys != 0 {
			u.rev = max(u.rev, rev)
		}
		if u.Keys == 0 {
			delete(f.by, key[:end])
		}
	}
}

// Folder is the live data below a folder, which ends in a slash.
func (k *Keyspace) Folder(folder string) Use {
	k.folders.mu.RLock()
	defer k.folders.mu.RUnlock()
	if u := k.folders.by[folder]; u != nil {
		return u.Use
	}
	return Use{}
}

// keysAt is how many keys a folder held at rev; false where it cannot tell,
// because keys came or went since.
func (f *folders) keysAt(folder string, rev int64) (int64, bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	u := f.by[folder]
	if u == nil || u.rev > rev {
		return 0, false
	}
	return u.Keys, true
}

// Folders is the live data below every folder that has any.
func (k *Keyspace) Folders() map[string]Use {
	k.folders.mu.RLock()
	defer k.folders.mu.RUnlock()
	all := make(map[string]Use, len(k.folders.by))
	for folder, u := range k.folders.by {
		all[folder] = u.Use
	}
	return all
}

// Size is what key takes as of the last batch, 0 when it does not exist.
func (k *Keyspace) Size(key string) int64 {
	it, _ := k.view.Load().tree.Get(item{key: key})
	return it.head.use().Bytes
}

// origins keeps one copy of each origin that came lately. Which are shared
// differs between nodes after a restore, and does not matter.
type origins struct{ known map[string]string }

// maxOrigins bounds what is kept for nothing.
const maxOrigins = 1024

func (o *origins) shared(s string) string {
	if s == "" {
		return ""
	}
	if known, ok := o.known[s]; ok {
		return known
	}
	if o.known == nil || len(o.known) >= maxOrigins {
		o.known = make(map[string]string)
	}
	s = strings.Clone(s)
	o.known[s] = s
	return s
}
