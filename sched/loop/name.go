package loop

import "context"

type nameKey struct{}

// WithName says in ctx which loop it is of, for the requests that are made in
// it: like a logger it is for people, and decides nothing.
func WithName(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, nameKey{}, name)
}

// NameOf is the name that WithName gave; "" outside of loops.
func NameOf(ctx context.Context) string {
	name, _ := ctx.Value(nameKey{}).(string)
	return name
}
