package wireguard

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/clusterd/clusterd/durable"
)

// Key is a private or a public key. The zero Key is none.
type Key = wgtypes.Key

// Public is what a node tells the others of itself.
type Public struct {
	Key  Key
	Port int // where it listens, UDP
}

// String is the text form: the port and the key, with a space between.
func (p Public) String() string { return strconv.Itoa(p.Port) + " " + p.Key.String() }

// ParsePublic reads the text form.
func ParsePublic(text string) (Public, error) {
	port, key, two := strings.Cut(text, " ")
	n, err := strconv.ParseUint(port, 10, 16)
	if !two || err != nil || n == 0 {
		return Public{}, fmt.Errorf("%q: a port and a key are required, with a space between", text)
	}
	k, err := wgtypes.ParseKey(key)
	if err != nil {
		return Public{}, fmt.Errorf("%q: the key: %w", text, err)
	}
	if k == (Key{}) {
		return Public{}, fmt.Errorf("%q: the key is all zeros", text)
	}
	return Public{Key: k, Port: int(n)}, nil
}

// Private is a node's own key, as its file has it.
type Private struct {
	Key     Key
	Created time.Time
}

// keyFile is the content of the file.
type keyFile struct {
	Version int       `json:"version"` // 1
	Private string    `json:"privateKey"`
	Created time.Time `json:"created"`
}

// EnsureKey reads the key of the file. It makes one where there is none, and
// another when that is older than age; age 0: the key has no end. The key is on
// disk before it is returned.
func EnsureKey(file string, age time.Duration, now time.Time) (Private, error) {
	p, err := readKey(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return Private{}, fmt.Errorf("WireGuard key: %w", err)
	case age <= 0 || now.Sub(p.Created) < age:
		return p, nil
	}
	key, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		return Private{}, fmt.Errorf("WireGuard key: %w", err)
	}
	p = Private{Key: key, Created: now.UTC().Truncate(time.Second)}
	b, err := json.Marshal(keyFile{Version: 1, Private: key.String(), Created: p.Created})
	if err == nil {
		err = durable.ReplaceFile(file, b, 0o600)
	}
	if err != nil {
		return Private{}, fmt.Errorf("WireGuard key: %w", err)
	}
	return p, nil
}

func readKey(file string) (Private, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return Private{}, err
	}
	var f keyFile
	if err := json.Unmarshal(b, &f); err != nil {
		return Private{}, fmt.Errorf("%s: %w: remove the file, the node makes another key", file, err)
	}
	if f.Version != 1 {
		return Private{}, fmt.Errorf("%s has version %d, this program knows 1", file, f.Version)
	}
	key, err := wgtypes.ParseKey(f.Private)
	if err != nil || key == (Key{}) {
		return Private{}, fmt.Errorf("%s holds no key: remove it, the node makes another", file) // not what it holds
	}
	return Private{Key: key, Created: f.Created}, nil
}
