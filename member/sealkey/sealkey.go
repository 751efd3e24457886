// Package sealkey seals the files in which a node's keys lie with a key that lies
// elsewhere: on another disk, in memory that an agent of a key service fills, or
// in a credential that systemd has bound to the machine's TPM. A sealed file is one of age
// (age-encryption.org/v1), which its own tools open, too.
//
// It decides nothing about which files are sealed, and knows no directory of a node.
package sealkey

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"filippo.io/age"
)

// magic is how a sealed file begins.
const magic = "age-encryption.org/"

// maxKeyFile bounds the file of sealing keys: a few lines are enough.
const maxKeyFile = 64 << 10

var (
	// ErrSealed is returned when a sealed file is to be read without a sealing key.
	ErrSealed = errors.New("it is sealed, and no sealing key was given")
	// ErrWrongKey is returned when a file was sealed with none of the keys that were given.
	ErrWrongKey = errors.New("it was sealed with another key")
	// ErrDamaged is returned for a sealed file that is not what was written.
	ErrDamaged = errors.New("the sealed file is damaged")
)

// Key seals and opens. A nil Key seals nothing and opens what is in clear; its methods may be
// called from several goroutines.
type Key struct {
	file string
	// identities open; the first one seals.
	identities []*age.X25519Identity
}

// New makes the content of a file with one new sealing key.
func New() ([]byte, error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "# seals the key files of one node of clusterd; public key: %s\n%s\n", id.Recipient(), id), nil
}

// Read reads the sealing keys of a file: lines AGE-SECRET-KEY-1…, as `age-keygen` and
// New write them. The first one seals, all of them open. Others may not read the file,
// it belongs to root or to the process's user, and it may not lie in the directory outside, whose files it seals.
func Read(file, outside string) (*Key, error) {
	if err := apart(file, outside); err != nil {
		return nil, err
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file: the key is read again at each start", file)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("%s has the mode %04o, so that others may read or write the sealing key: chmod 0600 %s", file, mode, file)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && !trusted(st.Uid, os.Geteuid()) {
		return nil, fmt.Errorf("%s belongs to the user %d, who can read and replace the sealing key: chown root %s", file, st.Uid, file)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxKeyFile {
		return nil, fmt.Errorf("%s has more than %d bytes: a line AGE-SECRET-KEY-1… for each key is expected", file, maxKeyFile)
	}
	k, err := Parse(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	k.file = file
	return k, nil
}

// trusted reports whether a file's owner may have the sealing key of a process.
func trusted(owner uint32, process int) bool { return owner == 0 || int64(owner) == int64(process) }

// apart says no to a sealing key beside what it seals: who reads the one reads the other.
func apart(file, folder string) error {
	real, err := filepath.EvalSymlinks(file)
	if err != nil {
		return err
	}
	if at, err := filepath.EvalSymlinks(folder); err == nil {
		folder = at
	}
	if rel, err := filepath.Rel(folder, real); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
		return fmt.Errorf("%s lies in %s, whose files it is to seal: put it on another disk, into memory, or into a credential of systemd", file, folder)
	}
	return nil
}

// Parse is the key of a file's content. Its errors repeat nothing of that.
func Parse(content []byte) (*Key, error) {
	k := &Key{}
	n := 0
	for line := range strings.Lines(string(content)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if strings.HasPrefix(line, "AGE-PLUGIN-") {
			return nil, fmt.Errorf("line %d is a key of a plugin of age, which is not supported: for a TPM use a credential of systemd", n)
		}
		id, err := age.ParseX25519Identity(line)
		if err != nil {
			return nil, fmt.Errorf("line %d is no secret key of age: AGE-SECRET-KEY-1… is expected, as `clusterd keys new` writes it", n)
		}
		k.identities = append(k.identities, id)
	}
	if len(k.identities) == 0 {
		return nil, errors.New("there is no key in it: make one with `clusterd keys new`")
	}
	return k, nil
}

// File is where the key was read from.
func (k *Key) File() string {
	if k == nil {
		return ""
	}
	return k.file
}

// Sealed reports whether content is a sealed file's.
func Sealed(content []byte) bool { return bytes.HasPrefix(content, []byte(magic)) }

// Seal is the content of the file for something secret.
func (k *Key) Seal(secret []byte) ([]byte, error) {
	if k == nil {
		return secret, nil
	}
	var out bytes.Buffer
	w, err := age.Encrypt(&out, k.identities[0].Recipient())
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(secret); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Open is the secret of a file's content, in clear or sealed. Errors: ErrSealed,
// ErrWrongKey, ErrDamaged.
func (k *Key) Open(content []byte) ([]byte, error) {
	secret, _, err := k.open(content)
	return secret, err
}

// With says what a file's content is sealed with: the number of the key in its file, from 1
// on; 0: it is in clear.
func (k *Key) With(content []byte) (int, error) {
	_, n, err := k.open(content)
	return n, err
}

// Current reports whether the content is as Seal would leave it: sealed with the first
// key, or in clear if there is none.
func (k *Key) Current(content []byte) bool {
	n, err := k.With(content)
	return err == nil && (k == nil || n == 1)
}

func (k *Key) open(content []byte) (secret []byte, with int, err error) {
	if !Sealed(content) {
		return content, 0, nil
	}
	if k == nil {
		return nil, 0, ErrSealed
	}
	for i, id := range k.identities {
		plain, err := age.Decrypt(bytes.NewReader(content), id)
		var wrong *age.NoIdentityMatchError
		if errors.As(err, &wrong) {
			continue
		}
		if err != nil {
			return nil, 0, fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		secret, err := io.ReadAll(plain)
		if err != nil {
			return nil, 0, fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		return secret, i + 1, nil
	}
	return nil, 0, ErrWrongKey
}
