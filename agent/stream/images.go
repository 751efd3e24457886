package stream

import (
	"context"
	"errors"
	"io"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/agent/image"
)

// Images are the images of this node.
type Images interface {
	List(ctx context.Context) ([]image.Image, error)
	Load(ctx context.Context, r io.Reader) ([]image.Image, error)
	// Preload pulls an image with the node's own credentials.
	Preload(ctx context.Context, ref string) error
	// Pulling are the pulls under way.
	Pulling() []image.Progress
	// Remove takes a name away, and with the last one the image. image.ErrInUse: a pod
	// of this node needs it; image.ErrNotFound.
	Remove(ctx context.Context, ref string) error
	// Prune removes the images that no pod of this node needs and that are not pinned.
	Prune(ctx context.Context) ([]image.Image, error)
	// Pin says whether an image stays when space is made. image.ErrNotFound.
	Pin(ctx context.Context, ref string, pinned bool) error
}

func (h *handler) routeImages(mux *http.ServeMux) {
	mux.HandleFunc("GET /images", h.images)
	mux.HandleFunc("POST /images/load", h.load)
	mux.HandleFunc("POST /images/prune", h.prune)
	mux.HandleFunc("POST /images/preload", h.named("preload", func(ctx context.Context, ref string) error { return h.cfg.Images.Preload(ctx, ref) }))
	mux.HandleFunc("DELETE /images", h.named("remove", func(ctx context.Context, ref string) error { return h.cfg.Images.Remove(ctx, ref) }))
	mux.HandleFunc("PUT /images/pin", h.named("pin", func(ctx context.Context, ref string) error { return h.cfg.Images.Pin(ctx, ref, true) }))
	mux.HandleFunc("DELETE /images/pin", h.named("unpin", func(ctx context.Context, ref string) error { return h.cfg.Images.Pin(ctx, ref, false) }))
}

// changed tells of images that came, went or were pinned.
func (h *handler) changed() {
	if h.cfg.ImagesChanged != nil {
		h.cfg.ImagesChanged()
	}
}

// named answers a request about the one image that the parameter "name" names.
func (h *handler) named(what string, do func(ctx context.Context, ref string) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ref := r.URL.Query().Get("name")
		if _, err := image.Normalize(ref); err != nil {
			refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "parameter name: %v", err)
			return
		}
		if !h.ready(w, r) { // which pods there are is not known yet
			return
		}
		var pull *image.PullError
		switch err := do(r.Context(), ref); {
		case err == nil:
			h.changed()
			answer(w, struct{}{})
		case errors.Is(err, image.ErrNotFound):
			refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound, "%s image %s: this node has no such image; `clusterctl image ls` lists those it has", what, ref)
		case errors.As(err, &pull):
			refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "%s image: %v", what, err)
		case errors.Is(err, image.ErrInUse):
			refuse(w, http.StatusConflict, metav1.StatusReasonConflict, "%v", err)
		default:
			refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError, "%v", err)
		}
	}
}

func (h *handler) prune(w http.ResponseWriter, r *http.Request) {
	if !h.ready(w, r) {
		return
	}
	removed, err := h.cfg.Images.Prune(r.Context())
	if err != nil {
		refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError, "%v", err)
		return
	}
	if len(removed) > 0 {
		h.changed()
	}
	answer(w, entries(removed))
}

// imageList is the answer of GET /images.
type imageList struct {
	Images  []imageEntry   `json:"images"`
	Pulling []pullingEntry `json:"pulling,omitempty"`
}

// pullingEntry is a pull under way: compressed bytes.
type pullingEntry struct {
	Ref   string `json:"ref"`
	Done  int64  `json:"done"`
	Total int64  `json:"total"`
}

type imageEntry struct {
	Refs []string `json:"refs"`
	ID   string   `json:"id"`
	Size int64    `json:"size"`
	// Pinned: it stays when space is made.
	Pinned bool `json:"pinned,omitempty"`
}

func (h *handler) images(w http.ResponseWriter, r *http.Request) {
	list, err := h.cfg.Images.List(r.Context())
	if err != nil {
		refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError, "list images: %v", err)
		return
	}
	out := entries(list)
	for _, p := range h.cfg.Images.Pulling() {
		out.Pulling = append(out.Pulling, pullingEntry{Ref: p.Ref, Done: p.Done, Total: p.Total})
	}
	answer(w, out)
}

func entries(list []image.Image) imageList {
	out := imageList{Images: []imageEntry{}}
	for _, i := range list {
		out.Images = append(out.Images, imageEntry{Refs: i.Refs, ID: i.ID, Size: i.Size, Pinned: i.Pinned})
	}
	return out
}

// loadResult is the answer of POST /images/load.
type loadResult struct {
	Images []loadEntry `json:"images"`
}

type loadEntry struct {
	Ref    string `json:"ref"`
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
}

func (h *handler) load(w http.ResponseWriter, r *http.Request) {
	list, err := h.cfg.Images.Load(r.Context(), r.Body)
	if len(list) > 0 {
		h.changed()
	}
	if err != nil {
		refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "load image: %v", err)
		return
	}
	out := loadResult{Images: []loadEntry{}}
	for _, i := range list {
		refs := i.Refs
		if len(refs) == 0 {
			refs = []string{""}
		}
		for _, ref := range refs {
			out.Images = append(out.Images, loadEntry{Ref: ref, Digest: i.ID, Size: i.Size})
		}
	}
	answer(w, out)
}
