package releases

import (
	"bufio"
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"

	"golang.org/x/crypto/blake2b"
)

// Signatures and keys are minisign's, so that its tools make and check them, too:
// ed25519 over BLAKE2b-512 of the file ("prehashed"), and over that signature with
// the trusted comment behind it, which is the Manifest. The formats are at
// https://jedisct1.github.io/minisign/.

const (
	keyAlgorithm    = "Ed"
	hashedAlgorithm = "ED"
	checkAlgorithm  = "B2"

	untrusted = "untrusted comment: "
	trusted   = "trusted comment: "

	// maxSignature bounds a signature or key file.
	maxSignature = 4 << 10
)

// Key is a public key that releases are signed with.
type Key struct {
	ID     [8]byte
	Public ed25519.PublicKey
}

// Name is the key's id as minisign shows it.
func (k Key) Name() string { return keyName(k.ID) }

func keyName(id [8]byte) string { return fmt.Sprintf("%016X", binary.LittleEndian.Uint64(id[:])) }

// String is the key on one line, as ParseKey reads it.
func (k Key) String() string {
	return base64.StdEncoding.EncodeToString(append(append([]byte(keyAlgorithm), k.ID[:]...), k.Public...))
}

// File is the key as a file of minisign's.
func (k Key) File() []byte {
	return fmt.Appendf(nil, "%sminisign public key %s\n%s\n", untrusted, k.Name(), k)
}

// ParseKey reads a public key: its one line of base64, or a file with a comment
// above that.
func ParseKey(text string) (Key, error) {
	b, err := payload(text, 42)
	if err != nil || string(b[:2]) != keyAlgorithm {
		return Key{}, fmt.Errorf("%.80q is no public key of minisign's: it has 56 letters of base64 and begins with RW, as `clusterctl upgrade key` and `minisign -G` write it", strings.TrimSpace(text))
	}
	return Key{ID: [8]byte(b[2:10]), Public: ed25519.PublicKey(b[10:])}, nil
}

// ParseKeys reads public keys with commas between.
func ParseKeys(text string) ([]Key, error) {
	var keys []Key
	for _, one := range strings.Split(text, ",") {
		if one = strings.TrimSpace(one); one == "" {
			continue
		}
		k, err := ParseKey(one)
		if err != nil {
			return nil, err
		}
		keys = append(keys, k)
	}
	return keys, nil
}

// payload is the last line of a key file, decoded; it has to have n bytes.
func payload(text string, n int) ([]byte, error) {
	if len(text) > maxSignature {
		return nil, errors.New("it is too long")
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(lines[len(lines)-1]))
	if err == nil && len(b) != n {
		err = fmt.Errorf("%d bytes, not %d", len(b), n)
	}
	return b, err
}

// SecretKey signs releases.
type SecretKey struct {
	id     [8]byte
	secret ed25519.PrivateKey
}

// NewSecretKey makes one.
func NewSecretKey() (SecretKey, error) {
	var k SecretKey
	_, secret, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return k, err
	}
	k.secret = secret
	_, err = rand.Read(k.id[:])
	return k, err
}

// Public is the key that its signatures are checked with.
func (k SecretKey) Public() Key {
	return Key{k.id, k.secret.Public().(ed25519.PublicKey)}
}

// A secret key file's content: algorithm, key derivation, checksum's algorithm, salt,
// two limits; then, encrypted unless the key derivation is 0, id, key and checksum.
const (
	secretLen  = 158
	secretBody = 2 + 2 + 2 + 32 + 8 + 8
)

// File is the key as a file of minisign's, without a password.
func (k SecretKey) File() []byte {
	b := make([]byte, secretBody, secretLen)
	copy(b, keyAlgorithm)
	copy(b[4:], checkAlgorithm)
	b = append(append(b, k.id[:]...), k.secret...)
	sum := k.checksum()
	b = append(b, sum[:]...)
	return fmt.Appendf(nil, "%sminisign secret key %s\n%s\n", untrusted, keyName(k.id), base64.StdEncoding.EncodeToString(b))
}

func (k SecretKey) checksum() [32]byte {
	return blake2b.Sum256(append(append([]byte(keyAlgorithm), k.id[:]...), k.secret...))
}

// ParseSecretKey reads the file of a secret key without a password.
func ParseSecretKey(file []byte) (SecretKey, error) {
	var k SecretKey
	b, err := payload(string(file), secretLen)
	if err != nil || string(b[:2]) != keyAlgorithm || string(b[4:6]) != checkAlgorithm {
		return k, errors.New("it is no secret key of minisign's, as `clusterctl upgrade key` and `minisign -G -W` write it")
	}
	if b[2] != 0 || b[3] != 0 {
		return k, errors.New("the secret key has a password: sign with `minisign -S -H -t 'clusterd VERSION linux/ARCH' -m FILE`, which asks for it")
	}
	k.id, k.secret = [8]byte(b[secretBody:secretBody+8]), ed25519.PrivateKey(b[secretBody+8:secretBody+72])
	sum, none := k.checksum(), [32]byte{} // minisign writes none where there is no password
	if subtle.ConstantTimeCompare(none[:], b[secretBody+72:]) != 1 && subtle.ConstantTimeCompare(sum[:], b[secretBody+72:]) != 1 {
		return SecretKey{}, errors.New("the secret key is damaged: its checksum is wrong")
	}
	return k, nil
}

// Sign signs a release.
func (k SecretKey) Sign(file io.Reader, m Manifest) ([]byte, error) {
	if err := m.Check(); err != nil {
		return nil, err
	}
	h := newDigest()
	if _, err := io.Copy(h, file); err != nil {
		return nil, err
	}
	sig := ed25519.Sign(k.secret, h.Sum(nil))
	global := ed25519.Sign(k.secret, append(bytes.Clone(sig), m.comment()...))
	encode := base64.StdEncoding.EncodeToString
	return fmt.Appendf(nil, "%ssignature of a clusterd release\n%s\n%s%s\n%s\n", untrusted,
		encode(append(append([]byte(hashedAlgorithm), k.id[:]...), sig...)), trusted, m.comment(), encode(global)), nil
}

// newDigest is of what is signed.
func newDigest() hash.Hash {
	h, err := blake2b.New512(nil)
	if err != nil { // only a key that is too long is an error
		panic(err)
	}
	return h
}

// Signature is a signature as it was read, not checked yet.
type Signature struct {
	key     [8]byte
	sig     []byte
	comment string
	global  []byte
}

// KeyName is the id of the key that it says to be made with.
func (s *Signature) KeyName() string { return keyName(s.key) }

// Claims is the manifest, of which Verify says whether it is true.
func (s *Signature) Claims() (Manifest, error) { return parseManifest(s.comment) }

// ParseSignature reads a signature's file.
func ParseSignature(file []byte) (*Signature, error) {
	bad := func(why string) (*Signature, error) {
		return nil, refusedf("the signature cannot be used: %s", why)
	}
	if len(bytes.TrimSpace(file)) == 0 {
		return bad("there is none; sign the file with `clusterctl upgrade sign`")
	}
	if len(file) > maxSignature {
		return bad("it is too long")
	}
	var lines []string
	for in := bufio.NewScanner(bytes.NewReader(file)); in.Scan(); {
		lines = append(lines, strings.TrimSuffix(in.Text(), "\r"))
	}
	if len(lines) != 4 || !strings.HasPrefix(lines[0], untrusted) || !strings.HasPrefix(lines[2], trusted) {
		return bad("it has not the four lines of a signature of minisign's")
	}
	b, err := base64.StdEncoding.DecodeString(lines[1])
	if err != nil || len(b) != 74 {
		return bad("its second line is no signature")
	}
	switch string(b[:2]) {
	case hashedAlgorithm:
	case keyAlgorithm:
		return bad("it is over the file and not over its hash: sign with -H")
	default:
		return bad("its algorithm is not known")
	}
	global, err := base64.StdEncoding.DecodeString(lines[3])
	if err != nil || len(global) != ed25519.SignatureSize {
		return bad("its last line is no signature")
	}
	return &Signature{[8]byte(b[2:10]), b[10:], strings.TrimPrefix(lines[2], trusted), global}, nil
}

// Trusted finds the key that made the signature among those that are trusted, and
// returns the manifest, which that key has signed. The file itself is not checked yet.
func (s *Signature) Trusted(keys []Key) (Key, Manifest, error) {
	for _, k := range keys {
		if k.ID != s.key {
			continue
		}
		if !ed25519.Verify(k.Public, append(bytes.Clone(s.sig), s.comment...), s.global) {
			return Key{}, Manifest{}, refusedf("the signature's comment was not signed by key %s: the signature is forged or damaged", k.Name())
		}
		m, err := s.Claims()
		if err != nil {
			return Key{}, Manifest{}, &RefusedError{err.Error()}
		}
		return k, m, nil
	}
	return Key{}, Manifest{}, refusedf("the release is signed with key %s, which is not trusted (trusted: %s); an administrator adds a key with `clusterctl upgrade trust KEY`", s.KeyName(), names(keys))
}

// verify checks the digest of the whole file.
func (s *Signature) verify(k Key, digest []byte) error {
	if !ed25519.Verify(k.Public, digest, s.sig) {
		return refusedf("the file is not what key %s has signed: it was changed or cut short on the way; fetch it again", k.Name())
	}
	return nil
}

// Verify checks a file against the keys that are trusted.
func (s *Signature) Verify(file io.Reader, keys []Key) (Manifest, error) {
	k, m, err := s.Trusted(keys)
	if err != nil {
		return Manifest{}, err
	}
	h := newDigest()
	if _, err := io.Copy(h, file); err != nil {
		return Manifest{}, err
	}
	return m, s.verify(k, h.Sum(nil))
}
