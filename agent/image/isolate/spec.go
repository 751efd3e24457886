// Package isolate runs a program on hostile bytes: in namespaces and a cgroup of its
// own, with a bound on its memory and next to no rights.
//
// Runner and Child are the side of the process that starts it; Enter is called by the
// program itself, before it reads what it must not trust. The package knows nothing of
// images.
package isolate

// Spec is what the program may do once Enter has returned.
type Spec struct {
	// Root is an empty directory of the machine; the program's root is mounted there,
	// for it alone.
	Root string `json:"root"`
	// Binds are the directories that it sees.
	Binds []Bind `json:"binds,omitempty"`
	// Files are copied as they are now, to where they are; those that are not there are
	// left out.
	Files []string `json:"files,omitempty"`
	// Proc: it sees its own process in /proc.
	Proc bool `json:"proc,omitempty"`
	// User it becomes; 0: it stays root, with Capabilities and no others.
	User         int   `json:"user,omitempty"`
	Capabilities []int `json:"capabilities,omitempty"`
	// Network: it may open connections, IPv4 and IPv6.
	Network bool `json:"network,omitempty"`
	// Memory bounds its heap and stacks in bytes; 0: no bound.
	Memory int64 `json:"memory,omitempty"`
	// FileSize bounds each file that it writes, in bytes; 0: no bound.
	FileSize int64 `json:"fileSize,omitempty"`
}

// Bind is a directory of the machine in the program's root. Devices, set-uid bits and
// programs in it have no effect for the program.
type Bind struct {
	From  string `json:"from"`
	To    string `json:"to"` // absolute, one component
	Write bool   `json:"write,omitempty"`
}
