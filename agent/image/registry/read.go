package registry

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"sigs.k8s.io/yaml"
)

// fileForm is the file's form; docs/images.md explains it.
type fileForm struct {
	DockerConfigFile string               `json:"dockerConfigFile,omitempty"`
	Registries       map[string]*hostForm `json:"registries,omitempty"`
}

type hostForm struct {
	Mirrors          *[]string `json:"mirrors,omitempty"`
	Fallback         *bool     `json:"fallback,omitempty"`
	PlainHTTP        bool      `json:"plainHTTP,omitempty"`
	CAFile           string    `json:"caFile,omitempty"`
	ClientCertFile   string    `json:"clientCertFile,omitempty"`
	ClientKeyFile    string    `json:"clientKeyFile,omitempty"`
	Username         string    `json:"username,omitempty"`
	PasswordFile     string    `json:"passwordFile,omitempty"`
	DockerConfigFile string    `json:"dockerConfigFile,omitempty"`
}

// hostKeys are the keys of a registry.
func hostKeys() (out []string) {
	for f := range reflect.TypeFor[hostForm]().Fields() {
		key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		out = append(out, key)
	}
	return out
}

// maxFile bounds each file that is read: they are small, and a wrong path must not
// fill the memory.
const maxFile = 1 << 20

// reader reads files and remembers how they were before: a change of any of them is a
// change of the settings.
type reader struct{ seen []stamp }

func (r *reader) read(path string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		return nil, errors.New("an absolute path is required")
	}
	r.seen = append(r.seen, stamps([]string{path})...)
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > maxFile {
		return nil, fmt.Errorf("it is no file of at most %d bytes", maxFile)
	}
	return os.ReadFile(path)
}

// Parse reads the text of a file. Errors name the field, the value and the cure.
func Parse(text []byte) (*Settings, error) { return (&reader{}).parse(text) }

func (r *reader) parse(text []byte) (*Settings, error) {
	var form fileForm
	if err := yaml.UnmarshalStrict(text, &form); err != nil {
		return nil, fmt.Errorf("%w: the keys are dockerConfigFile and registries, and of each registry %s (docs/images.md)", err, strings.Join(hostKeys(), ", "))
	}
	s := &Settings{hosts: map[string]*host{}}
	var err error
	if form.DockerConfigFile != "" {
		if s.auths, err = r.dockerConfig(form.DockerConfigFile); err != nil {
			return nil, fmt.Errorf("dockerConfigFile %q: %w", form.DockerConfigFile, err)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(form.Registries)) {
		at := fmt.Sprintf("registries[%q]", key)
		if err := checkHost(key); err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		f := form.Registries[key]
		if f == nil {
			return nil, fmt.Errorf("%s: it says nothing: leave it out, or give it mirrors: [] if the mirrors of \"*\" do not have it", at)
		}
		h, err := r.host(key, f)
		if err != nil {
			return nil, fmt.Errorf("%s.%w", at, err)
		}
		s.hosts[key] = h
	}
	return s, nil
}

// checkHost takes the names of registries as image names have them.
func checkHost(h string) error {
	switch {
	case h == others:
		return nil
	case strings.Contains(h, "://"):
		return errors.New("give the host as image names have it, such as registry.example.org:5000, without https://; plainHTTP: true is for a registry without TLS")
	case strings.Contains(h, "/"):
		return errors.New("give the host alone, such as registry.example.org:5000; a path may stand in mirrors and in a docker config")
	case strings.Contains(h, "*"):
		return errors.New("a star stands alone, for all registries that are not named")
	case canonical(h) != h:
		return fmt.Errorf("image names have it as %s: write that", canonical(h))
	case h != "localhost" && !strings.ContainsAny(h, ".:"):
		return fmt.Errorf("image names have no such registry, %s/app is on %s: give a name with a dot or a port", h, hub)
	}
	if _, err := name.NewRegistry(h, name.StrictValidation); err != nil {
		return errors.New("it is no host, or host and port: give one such as registry.example.org:5000")
	}
	return nil
}

// host reads an entry; errors begin with its field.
func (r *reader) host(key string, f *hostForm) (*host, error) {
	h := &host{last: f.Fallback == nil || *f.Fallback, Connection: Connection{PlainHTTP: f.PlainHTTP}}
	if f.Mirrors != nil {
		h.set = true
		for _, text := range *f.Mirrors {
			m, err := parseMirror(text)
			if err == nil && m == (mirror{host: key}) {
				err = errors.New("that is the registry itself, which is asked after its mirrors by itself: leave it out")
			}
			if err == nil && slices.Contains(h.mirrors, m) {
				err = errors.New("it is there twice: leave one out")
			}
			if err != nil {
				return nil, fmt.Errorf("mirrors %q: %w", text, err)
			}
			h.mirrors = append(h.mirrors, m)
		}
	}
	if !h.last && len(h.mirrors) == 0 {
		return nil, errors.New("fallback false: without mirrors there would be nothing to ask: name some, or leave it out")
	}
	if key == others && *f != (hostForm{Mirrors: f.Mirrors, Fallback: f.Fallback}) {
		return nil, errors.New("*: mirrors and fallback alone can be said of all: name each registry for plainHTTP, certificates and credentials; dockerConfigFile at the top is for all")
	}
	if f.PlainHTTP && f.CAFile+f.ClientCertFile+f.ClientKeyFile != "" {
		return nil, errors.New("plainHTTP true: without TLS there are no certificates: leave out caFile, clientCertFile and clientKeyFile, or plainHTTP")
	}
	var err error
	if err = r.certificates(f, &h.Connection); err != nil {
		return nil, err
	}
	if h.tls, err = h.Connection.tls(); err != nil {
		return nil, err
	}
	h.auths, err = r.auths(key, f)
	return h, err
}

// path components of a repository, as the store checks them in images' names.
var component = regexp.MustCompile(`^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*$`)

func parseMirror(text string) (mirror, error) {
	at, path, slash := strings.Cut(text, "/")
	if strings.Contains(text, "://") {
		return mirror{}, errors.New("give host, port and path as an image's name would begin, such as mirror.example.org:5000/hub, without https://; plainHTTP: true in the mirror's own entry is for one without TLS")
	}
	if err := checkHost(at); err != nil {
		return mirror{}, err
	}
	if at == others {
		return mirror{}, errors.New("a mirror has a name")
	}
	for part := range strings.SplitSeq(path, "/") {
		if slash && !component.MatchString(part) {
			return mirror{}, fmt.Errorf("%q cannot be a part of a repository's name: lower case letters, digits and single separators can", part)
		}
	}
	return mirror{at, path}, nil
}

// certificates reads what is said of TLS.
func (r *reader) certificates(f *hostForm, c *Connection) error {
	if f.CAFile != "" {
		pem, err := r.read(f.CAFile)
		if err != nil {
			return fmt.Errorf("caFile %q: %w", f.CAFile, err)
		}
		if !x509.NewCertPool().AppendCertsFromPEM(pem) {
			return fmt.Errorf("caFile %q: there is no certificate in it: give a file of certificates in PEM", f.CAFile)
		}
		c.CA = pem
	}
	if (f.ClientCertFile == "") != (f.ClientKeyFile == "") {
		return fmt.Errorf("clientCertFile %q, clientKeyFile %q: give both, or none", f.ClientCertFile, f.ClientKeyFile)
	}
	if f.ClientCertFile != "" {
		cert, err := r.read(f.ClientCertFile)
		if err != nil {
			return fmt.Errorf("clientCertFile %q: %w", f.ClientCertFile, err)
		}
		key, err := r.read(f.ClientKeyFile)
		if err != nil {
			return fmt.Errorf("clientKeyFile %q: %w", f.ClientKeyFile, err)
		}
		if _, err := tls.X509KeyPair(cert, key); err != nil {
			return fmt.Errorf("clientCertFile %q, clientKeyFile %q: %w: give a certificate and its own key in PEM", f.ClientCertFile, f.ClientKeyFile, err)
		}
		c.Cert, c.Key = cert, key
	}
	return nil
}

// auths are the credentials of an entry.
func (r *reader) auths(key string, f *hostForm) (Auths, error) {
	if (f.Username == "") != (f.PasswordFile == "") {
		return nil, fmt.Errorf("username %q, passwordFile %q: give both, or none", f.Username, f.PasswordFile)
	}
	if f.Username != "" && f.DockerConfigFile != "" {
		return nil, fmt.Errorf("username %q, dockerConfigFile %q: give one of them", f.Username, f.DockerConfigFile)
	}
	if f.DockerConfigFile != "" {
		auths, err := r.dockerConfig(f.DockerConfigFile)
		if err != nil {
			return nil, fmt.Errorf("dockerConfigFile %q: %w", f.DockerConfigFile, err)
		}
		return auths, nil
	}
	if f.Username == "" {
		return nil, nil
	}
	b, err := r.read(f.PasswordFile)
	if err != nil {
		return nil, fmt.Errorf("passwordFile %q: %w", f.PasswordFile, err)
	}
	password := strings.TrimRight(string(b), "\r\n")
	if password == "" {
		return nil, fmt.Errorf("passwordFile %q: it is empty: write the password into it", f.PasswordFile)
	}
	return Auths{key: {Username: f.Username, Password: password}}, nil
}

func (r *reader) dockerConfig(path string) (Auths, error) {
	b, err := r.read(path)
	if err != nil {
		return nil, err
	}
	var helpers struct {
		CredsStore  string            `json:"credsStore"`
		CredHelpers map[string]string `json:"credHelpers"`
	}
	if json.Unmarshal(b, &helpers) == nil && (helpers.CredsStore != "" || len(helpers.CredHelpers) > 0) {
		return nil, errors.New("it has credsStore or credHelpers, and clusterd runs no program for credentials: give a file with them in auths, as docker login writes it without a helper")
	}
	auths, err := ParseDockerConfig(b)
	if err != nil {
		return nil, fmt.Errorf("%w: give a file such as docker login writes", err)
	}
	return auths, nil
}
