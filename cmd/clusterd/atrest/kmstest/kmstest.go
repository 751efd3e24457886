// Package kmstest is a KMS plugin of version 2 for tests: it keeps keys in memory, can
// take another one, be slow, and end and begin again.
package kmstest

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	kmsapi "k8s.io/kms/apis/v2"
)

// Plugin answers at a socket. Its methods may be called concurrently.
type Plugin struct {
	kmsapi.UnimplementedKeyManagementServiceServer
	t      testing.TB
	socket string

	mu     sync.Mutex
	keys   map[string]cipher.AEAD // by their id
	newest string
	slow   time.Duration
	server *grpc.Server
	done   chan error

	encrypted, decrypted atomic.Int64
}

// Start begins a plugin with one key, at a socket in a directory of its own. It ends with
// the test.
func Start(t testing.TB, id string) *Plugin {
	t.Helper()
	// A path of a socket is short, and that of a test's directory may not be.
	folder, err := os.MkdirTemp("", "kms")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	p := &Plugin{t: t, socket: folder + "/kms.sock", keys: map[string]cipher.AEAD{}}
	p.Rotate(id)
	p.Begin()
	t.Cleanup(p.End)
	return p
}

// Endpoint is what an EncryptionConfiguration calls it.
func (p *Plugin) Endpoint() string { return "unix://" + p.socket }

// Rotate has it encrypt with a new key from now on; it keeps those before.
func (p *Plugin) Rotate(id string) {
	p.t.Helper()
	secret := make([]byte, 32)
	_, _ = rand.Read(secret)
	block, err := aes.NewCipher(secret)
	if err != nil {
		p.t.Fatal(err)
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keys[id], p.newest = gcm, id
}

// Forget drops a key.
func (p *Plugin) Forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.keys, id)
}

// Slow has each answer take so long.
func (p *Plugin) Slow(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.slow = d
}

// Decrypted is how often it was asked to decrypt.
func (p *Plugin) Decrypted() int64 { return p.decrypted.Load() }

// Begin has it answer.
func (p *Plugin) Begin() {
	p.t.Helper()
	l, err := net.Listen("unix", p.socket)
	if err != nil {
		p.t.Fatal(err)
	}
	server, done := grpc.NewServer(), make(chan error, 1)
	kmsapi.RegisterKeyManagementServiceServer(server, p)
	p.mu.Lock()
	p.server, p.done = server, done
	p.mu.Unlock()
	go func() { done <- server.Serve(l) }()
}

// End is its death: connections break, and there is no socket.
func (p *Plugin) End() {
	p.t.Helper()
	p.mu.Lock()
	server, done := p.server, p.done
	p.server = nil
	p.mu.Unlock()
	if server == nil {
		return
	}
	server.Stop()
	if err := <-done; err != nil {
		p.t.Error(err)
	}
}

func (p *Plugin) wait(ctx context.Context) error {
	p.mu.Lock()
	slow := p.slow
	p.mu.Unlock()
	select {
	case <-time.After(slow):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Status implements the plugin's protocol.
func (p *Plugin) Status(ctx context.Context, _ *kmsapi.StatusRequest) (*kmsapi.StatusResponse, error) {
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return &kmsapi.StatusResponse{Version: "v2", Healthz: "ok", KeyId: p.newest}, nil
}

// Encrypt implements the plugin's protocol.
func (p *Plugin) Encrypt(ctx context.Context, r *kmsapi.EncryptRequest) (*kmsapi.EncryptResponse, error) {
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	p.encrypted.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	gcm := p.keys[p.newest]
	nonce := make([]byte, gcm.NonceSize())
	_, _ = rand.Read(nonce)
	return &kmsapi.EncryptResponse{Ciphertext: gcm.Seal(nonce, nonce, r.Plaintext, nil), KeyId: p.newest}, nil
}

// Decrypt implements the plugin's protocol.
func (p *Plugin) Decrypt(ctx context.Context, r *kmsapi.DecryptRequest) (*kmsapi.DecryptResponse, error) {
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	p.decrypted.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	gcm, ok := p.keys[r.KeyId]
	if !ok {
		return nil, fmt.Errorf("no key %q", r.KeyId)
	}
	if len(r.Ciphertext) < gcm.NonceSize() {
		return nil, errors.New("no ciphertext")
	}
	nonce, sealed := r.Ciphertext[:gcm.NonceSize()], r.Ciphertext[gcm.NonceSize():]
	plain, err := gcm.Open(nil, nonce, sealed, nil)
	if err != nil {
		return nil, err
	}
	return &kmsapi.DecryptResponse{Plaintext: plain}, nil
}
