package bucket

import (
	"fmt"
	"net"
	"net/url"
	"strings"

	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// Location is a place in a bucket of an object store.
type Location struct {
	Endpoint string // HOST or HOST:PORT
	Bucket   string
	// Prefix is what names of objects begin with, with a slash at its end; empty: none.
	Prefix string
	// Plain: HTTP without TLS.
	Plain bool
}

// amazon is the host of URLs that name none.
const amazon = "s3.amazonaws.com"

// Parse reads https://HOST[:PORT]/BUCKET[/PREFIX], the same with http:// for a store
// without TLS, or s3://BUCKET[/PREFIX] for Amazon's.
func Parse(text string) (Location, error) {
	no := func(why string) (Location, error) {
		return Location{}, fmt.Errorf("%s: write it as https://HOST[:PORT]/BUCKET[/PREFIX], or s3://BUCKET[/PREFIX] for Amazon S3", why)
	}
	u, err := url.Parse(text)
	if err != nil {
		return no("it is no URL") // the error would repeat a password
	}
	var l Location
	path := strings.TrimPrefix(u.Path, "/")
	switch {
	case u.User != nil:
		return no("a key in it could be seen by every user of the machine, and is written to config.yaml: give it by --snapshot-store-credentials instead")
	case u.RawQuery != "" || u.Fragment != "" || u.Opaque != "":
		return no("nothing may follow the path")
	case u.Host == "":
		return no("it names no host")
	case u.Scheme == "s3":
		l.Endpoint, path = amazon, u.Host+"/"+path
	case u.Scheme == "https" || u.Scheme == "http":
		l.Endpoint, l.Plain = u.Host, u.Scheme == "http"
	default:
		return no(fmt.Sprintf("the scheme %q is none of https, http and s3", u.Scheme))
	}
	if google(l.Endpoint) {
		return Location{}, fmt.Errorf("%s: this store does not take uploads in parts that have an MD5 each: use another store that speaks S3", l.Endpoint)
	}
	var prefix string
	l.Bucket, prefix, _ = strings.Cut(path, "/")
	if err := s3utils.CheckValidBucketNameStrict(l.Bucket); err != nil {
		return no(fmt.Sprintf("bucket %q: %v", l.Bucket, err))
	}
	if prefix = strings.TrimSuffix(prefix, "/"); prefix != "" {
		for part := range strings.SplitSeq(prefix, "/") {
			if part == "" || part == "." || part == ".." {
				return no(fmt.Sprintf("prefix %q: no part of it may be empty, . or ..", prefix))
			}
		}
		l.Prefix = prefix + "/"
	}
	return l, nil
}

// google reports whether a host is Google's, whose store does not take what upload sends.
func google(endpoint string) bool {
	host := strings.ToLower(endpoint)
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(host, ".")
	return host == "storage.googleapis.com" || strings.HasSuffix(host, ".storage.googleapis.com")
}

// Split is Parse for the URL of one object: its Location, and its name there.
func Split(text string) (Location, string, error) {
	l, err := Parse(text)
	if err != nil {
		return l, "", err
	}
	if strings.HasSuffix(text, "/") {
		return l, "", nil
	}
	whole := strings.TrimSuffix(l.Prefix, "/")
	i := strings.LastIndex(whole, "/") + 1
	l.Prefix = whole[:i]
	return l, whole[i:], nil
}

// String is the URL of what is at the Location.
func (l Location) String() string {
	u := url.URL{Scheme: "https", Host: l.Endpoint, Path: "/" + l.Bucket + "/" + l.Prefix}
	if l.Plain {
		u.Scheme = "http"
	}
	if l.Endpoint == amazon {
		u = url.URL{Scheme: "s3", Host: l.Bucket, Path: "/" + l.Prefix}
	}
	return u.String()
}
