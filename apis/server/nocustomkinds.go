package server

import (
	"encoding/json"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// customKindsPath is where clients ask which kinds the users of a cluster have
// added.
const customKindsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// noCustomKinds answers: none. Custom kinds are not served yet, and discovery
// does not offer them; but kubectl asks here about any kind it does not find,
// and without an answer it tells its user about that instead of the kind.
func noCustomKinds(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodGet || req.URL.Query().Has("watch") {
		http.Error(w, "custom kinds are not served", http.StatusMethodNotAllowed)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	err := json.NewEncoder(w).Encode(struct {
		metav1.TypeMeta `json:",inline"`
		metav1.ListMeta `json:"metadata"`
		Items           []struct{} `json:"items"`
	}{
		TypeMeta: metav1.TypeMeta{Kind: "CustomResourceDefinitionList", APIVersion: "apiextensions.k8s.io/v1"},
		Items:    []struct{}{},
	})
	if err != nil {
		klog.FromContext(req.Context()).V(2).Info("Client went away", "path", req.URL.Path, "err", err)
	}
}
