package policy

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/clusterd/clusterd/netsetup/nft"
)

// Kernel holds tables: *nft.Tables.
type Kernel = nft.TableKernel

// Config of an Enforcer.
type Config struct {
	Kernel Kernel       // required
	Logger *slog.Logger // default slog.Default()
	// Repaired is called when another program's change of the table was undone; see
	// nft.KeeperConfig.
	Repaired func(table, what string)
}

// Enforcer keeps the kernel's table in step with groups. Safe for concurrent
// use.
type Enforcer struct{ keeper *nft.Keeper }

// New returns an Enforcer; it changes nothing yet: rules of a former process
// stay in force until the first Set.
func New(cfg Config) *Enforcer {
	return &Enforcer{nft.NewKeeper(nft.KeeperConfig{Kernel: cfg.Kernel, Logger: cfg.Logger, Repaired: cfg.Repaired})}
}

// Set brings the kernel to the groups, in one transaction.
func (e *Enforcer) Set(groups []Group) error {
	if err := e.keeper.Set(Compile(groups)); err != nil {
		return fmt.Errorf("rules of network policies: %w", err)
	}
	return nil
}

// Run puts right what others change, until ctx ends.
func (e *Enforcer) Run(ctx context.Context) { e.keeper.Run(ctx) }

// Check undoes the changes of other programs. It reads one number while no rule
// of any table changes.
func (e *Enforcer) Check() error { return e.keeper.Check() }

// CleanUp removes the table.
func (e *Enforcer) CleanUp() error { return e.keeper.CleanUp(nft.Table{Name: TableName}) }
