package backup

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"filippo.io/age"
)

// Lock says what seals a file, and Key what opens it. The file is one of age
// (age-encryption.org/v1): its own tools open it too.
type (
	Lock []age.Recipient
	Key  []age.Identity
)

// minPassphrase is how long a passphrase must be: the file holds the
// cluster's authority, and can be attacked without a time limit.
const minPassphrase = 8

// Passphrase is the lock and the key of one passphrase. To open a file with it
// takes about a second, so that guessing takes long.
func Passphrase(p string) (Lock, Key, error) { return passphrase(p, 18) }

// passphrase takes scrypt's work factor as a power of two.
func passphrase(p string, work int) (Lock, Key, error) {
	if len(p) < minPassphrase {
		return nil, nil, fmt.Errorf("the passphrase has %d characters: use at least %d", len(p), minPassphrase)
	}
	lock, err := age.NewScryptRecipient(p)
	if err != nil {
		return nil, nil, err
	}
	key, err := age.NewScryptIdentity(p)
	if err != nil {
		return nil, nil, err
	}
	lock.SetWorkFactor(work)
	return Lock{lock}, Key{key}, nil
}

// Once is a lock and a key that nobody else has and that are not kept: beside another
// lock it lets whoever writes a file read it again, to see that it is whole.
func Once() (Lock, Key, error) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		return nil, nil, err
	}
	return Lock{id.Recipient()}, Key{id}, nil
}

// ReadPassphrase reads a passphrase from the first line of a file.
func ReadPassphrase(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSuffix(line, "\r"), nil
}

// Recipients is the lock of public keys, as age-keygen prints them (age1…).
func Recipients(keys []string) (Lock, error) {
	var lock Lock
	for _, k := range keys {
		r, err := age.ParseX25519Recipient(strings.TrimSpace(k))
		if err != nil {
			return nil, fmt.Errorf("public key %q: %w", k, err)
		}
		lock = append(lock, r)
	}
	return lock, nil
}

// ReadIdentities reads the secret keys that age-keygen wrote to a file.
func ReadIdentities(path string) (Key, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	ids, err := age.ParseIdentities(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return ids, nil
}

// Seal returns a writer whose content goes to w sealed. It is whole once it is
// closed.
func Seal(w io.Writer, lock Lock) (io.WriteCloser, error) {
	return age.Encrypt(w, lock...)
}

// Open returns the content of a sealed file. A change anywhere in it is an
// error while it is read.
func Open(r io.Reader, key Key) (io.Reader, error) {
	plain, err := age.Decrypt(r, key...)
	var wrong *age.NoIdentityMatchError
	if errors.As(err, &wrong) {
		return nil, errors.New("it does not open with this passphrase or key")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return plain, nil
}
