package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

const (
	defaultTokenTTL = 24 * time.Hour
	maxTokenTTL     = 30 * 24 * time.Hour
	// initTokenUses is how many machines may join by a line of `clusterd init`:
	// enough for the first afternoon. Tokens made later are good for one.
	initTokenUses = 16
	maxTokenUses  = 10_000

	// tokenEnv is the environment variable that `clusterd join` reads.
	tokenEnv = "CLUSTERD_TOKEN"
)

// printJoinLines makes a token for each role and prints the lines to run on
// other machines.
func (m *Main) printJoinLines(ctx context.Context, out io.Writer, ttl time.Duration, uses int) error {
	for _, line := range []struct {
		role pki.Role
		what string
	}{
		{pki.Server, "add a server, which runs pods and keeps the cluster's state"},
		{pki.Agent, "add an agent, which runs pods and holds no state and no key of the cluster"},
	} {
		token, _, err := join.CreateToken(ctx, m.store, m.trust.Load().Signer().Cert, join.TokenOptions{Role: line.role, Uses: uses, TTL: ttl}, m.clock.Now())
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "# %s%s:\n%s\n", strings.ToUpper(line.what[:1]), line.what[1:], joinCommand(m.cfg.addr(), token))
	}
	return nil
}

// joinCommand is the command line that makes another machine join.
func joinCommand(server netip.AddrPort, token pki.Token) string {
	at := server.String()
	if server.Addr().Is6() {
		at = "'" + at + "'" // shells expand brackets
	}
	return fmt.Sprintf("clusterd join %s --token %s", at, token)
}

// maxTokenOrigins is how many ranges of addresses a token may name.
const maxTokenOrigins = 32

// tokenOrigins reads addresses and ranges of them.
func tokenOrigins(list []string) (out []netip.Prefix, err error) {
	if len(list) > maxTokenOrigins {
		return nil, fmt.Errorf("from: %d ranges; give at most %d", len(list), maxTokenOrigins)
	}
	for _, text := range list {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			a, aerr := netip.ParseAddr(text)
			if aerr != nil {
				return nil, fmt.Errorf("from %q: give an address such as 192.0.2.7, or a range such as 192.0.2.0/24", text)
			}
			p = netip.PrefixFrom(a.Unmap().WithZone(""), a.Unmap().BitLen())
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// readToken takes the token from where it was given: the flag, a file, the
// standard input ("-"), or the environment. The line that was printed with it may
// stand around it.
func readToken(flag, file string, stdin io.Reader) (string, error) {
	text, err := tokenText(flag, file, stdin)
	if err != nil {
		return "", err
	}
	return tokenIn(text)
}

// tokenIn is the one token in a text such as `clusterd join ADDRESS --token cd1.…`. A
// text without any is returned as it is: pki says what is wrong with it.
func tokenIn(text string) (string, error) {
	var found []string
	for _, word := range strings.Fields(text) {
		if _, value, ok := strings.Cut(word, "="); ok { // --token=cd1.…
			word = value
		}
		if word = strings.Trim(word, "'\"`"); strings.HasPrefix(word, pki.TokenPrefix) {
			found = append(found, word)
		}
	}
	if found = slices.Compact(found); len(found) > 1 {
		return "", fmt.Errorf("%d join tokens were given: give one of the lines, that for the role this machine is to have", len(found))
	}
	if len(found) == 1 {
		return found[0], nil
	}
	return text, nil
}

func tokenText(flag, file string, stdin io.Reader) (string, error) {
	fromEnv := os.Getenv(tokenEnv)
	os.Unsetenv(tokenEnv) // no child needs it
	switch {
	case flag != "" && file != "":
		return "", errors.New("--token and --token-file: give one of them")
	case flag != "":
		flag = strings.Clone(flag)
		hideArgument(flag)
		return flag, nil
	case file == "-":
		b, err := io.ReadAll(io.LimitReader(stdin, 4096))
		return string(b), err
	case file != "":
		b, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("--token-file: %w", err)
		}
		return string(b), nil
	case fromEnv != "":
		return fromEnv, nil
	}
	return "", errors.New("--token is required (or --token-file, or " + tokenEnv + "): `clusterd init` printed one, and `clusterctl token create` makes another; with --ask a person approves this machine instead")
}

// hideArgument wipes a secret from this process's command line, which every
// user of the machine can read: on Linux the bytes of os.Args are the very
// ones that /proc/PID/cmdline shows.
func hideArgument(secret string) {
	for i, arg := range os.Args {
		at := strings.Index(arg, secret)
		if at < 0 {
			continue
		}
		shown := unsafe.Slice(unsafe.StringData(arg), len(arg))
		for j := at; j < at+len(secret); j++ {
			shown[j] = '*'
		}
		os.Args[i] = strings.Clone(arg)
	}
}
