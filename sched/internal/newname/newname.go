// Package newname makes objects whose names are chosen when they are made.
package newname

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/rand"
)

// Tries bounds the names tried for one object.
const Tries = 8

// suffix is how many random characters follow the prefix.
const suffix = 5

// Of returns a new name of at most limit characters that begins with the prefix,
// or with as much of it as fits.
func Of(prefix string, limit int) string {
	if len(prefix) > limit-suffix {
		prefix = prefix[:limit-suffix]
	}
	return prefix + rand.String(suffix)
}

// Create calls create with a new name, and with another one while the name is
// taken. The server does so only for objects that have a generateName and no name,
// and a controller must know the name before it asks, as its cache may show the
// object before the answer comes.
func Create(prefix string, limit int, create func(name string) error) (err error) {
	for range Tries {
		if err = create(Of(prefix, limit)); !apierrors.IsAlreadyExists(err) {
			break
		}
	}
	return err
}
