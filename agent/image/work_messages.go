package image

import (
	"github.com/clusterd/clusterd/agent/image/isolate"
)

// The jobs of the program.
const (
	jobFetch   = "fetch"
	jobInflate = "inflate"
	jobUnpack  = "unpack"
	jobList    = "list"
	jobLayer   = "layer"
)

// order is the first message to the program. What a job reads beside it comes on its
// standard input, what it gives goes to its standard output.
type order struct {
	Spec   isolate.Spec  `json:"spec"`
	Fetch  *fetchRequest `json:"fetch,omitempty"`
	Unpack *unpackOrder  `json:"unpack,omitempty"`
	List   *listRequest  `json:"list,omitempty"`
	Layer  *dockerLayer  `json:"layer,omitempty"`
}

// unpackOrder is an unpackRequest with directories as the program sees them.
type unpackOrder struct {
	Limits Limits `json:"limits"`
	Below  int64  `json:"below"`
	From   int64  `json:"from"`
	Lowers int    `json:"lowers"` // /1 is the topmost
	Shown  string `json:"shown"`
}

// receiveOrder follows an order to fetch, with the file to write to.
type receiveOrder struct {
	Layer int    `json:"layer"`
	Have  int64  `json:"have"` // bytes of it that are in the file
	Name  string `json:"name"` // of the file, for errors
}

// report is every message of the program.
type report struct {
	Documents *documents     `json:"documents,omitempty"`
	Progress  *progressOf    `json:"progress,omitempty"`
	Received  *receivedLayer `json:"received,omitempty"`
	Unpacked  *unpacked      `json:"unpacked,omitempty"`
	Listed    []listed       `json:"listed,omitempty"`
	Err       *workError     `json:"err,omitempty"`
}

// progressOf is how many bytes of a layer are here.
type progressOf struct {
	Layer int   `json:"layer"`
	Done  int64 `json:"done"`
}

// receivedLayer is the end of a receiveOrder.
type receivedLayer struct {
	Layer int        `json:"layer"`
	Came  int64      `json:"came"` // bytes of the layer that are in the file
	Notes []string   `json:"notes,omitempty"`
	Err   *workError `json:"err,omitempty"`
}
