package apis

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand" //nolint:depguard // what upstream's fuzzer takes
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	"k8s.io/apimachinery/pkg/api/apitesting/roundtrip"
	"k8s.io/apimachinery/pkg/api/equality"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/randfill"
)

var roundTripSeed = flag.Int64("round-trip-seed", 1, "seed of the random objects of round trips; 0: another one each time")

// begin says which seed repeats a test, and bounds how long upstream's suite takes.
func begin(t *testing.T) (seed int64) {
	seed = *roundTripSeed
	if seed == 0 {
		seed = time.Now().UnixNano()
	}
	t.Logf("again: go test ./apis -run %s -round-trip-seed %d", t.Name(), seed)
	rounds := *roundtrip.FuzzIters
	*roundtrip.FuzzIters = 4
	t.Cleanup(func() { *roundtrip.FuzzIters = rounds })
	return seed
}

// settled makes random objects of each kind such as a decode leaves them: empty
// fields are absent, and then they have defaults. (What a client sends as empty
// may be refused where its absence is not, as upstream does.)
func settled(serializer.CodecFactory) []any {
	// What is embedded is kept byte by byte in JSON, and by its content in all else.
	funcs := []any{func(r *runtime.RawExtension, c randfill.Continue) {
		*r = runtime.RawExtension{Raw: fmt.Appendf(nil, `{"apiVersion":"example.com/v1","kind":"Random","n":%d,"on":%t,"words":["a","%x"]}`, c.Uint32(), c.Bool(), c.Uint64())}
	}}
	for _, k := range Kinds() {
		of := reflect.TypeOf(k.New())
		signature := reflect.FuncOf([]reflect.Type{of, reflect.TypeFor[randfill.Continue]()}, nil, false)
		funcs = append(funcs, reflect.MakeFunc(signature, func(args []reflect.Value) []reflect.Value {
			obj := args[0].Interface().(runtime.Object)
			args[1].Interface().(randfill.Continue).FillNoCustom(obj)
			text, err := json.Marshal(obj)
			if err != nil {
				panic(err)
			}
			args[0].Elem().SetZero()
			if err := json.Unmarshal(text, obj); err != nil {
				panic(err)
			}
			Scheme.Default(obj)
			return nil
		}).Interface())
	}
	return funcs
}

// TestRoundTripOfRandomObjects runs upstream's suite, and YAML beside it: objects
// of every kind that we serve and their lists, in every version, are the same
// after every way through the scheme and the serializers, and encode the same twice.
func TestRoundTripOfRandomObjects(t *testing.T) {
	seed := begin(t)
	yaml, _ := runtime.SerializerInfoForMediaType(Codecs.SupportedMediaTypes(), runtime.ContentTypeYAML)
	for _, k := range Kinds() {
		hub := schema.GroupVersionKind{Group: k.GVK.Group, Version: runtime.APIVersionInternal, Kind: k.GVK.Kind}
		// The hub goes through each version and back; a version through the bare
		// serializers, which default nothing.
		ways := map[schema.GroupVersionKind]fuzzer.FuzzerFuncs{
			hub:   fuzzer.MergeFuzzerFuncs(metafuzzer.Funcs, settled),
			k.GVK: metafuzzer.Funcs,
		}
		for _, view := range k.Views {
			ways[k.ViewGVK(view)] = metafuzzer.Funcs
		}
		for gvk, funcs := range ways {
			for _, suffix := range []string{"", "List"} {
				gvk := gvk.GroupVersion().WithKind(gvk.Kind + suffix)
				t.Run(gvk.Group+"."+gvk.Version+"."+gvk.Kind, func(t *testing.T) {
					roundtrip.RoundTripSpecificKind(t, gvk, Scheme, Codecs, fuzzer.FuzzerFor(funcs, rand.NewSource(seed), Codecs), nil)
				})
			}
		}
		t.Run(k.GVK.Kind+".yaml", func(t *testing.T) {
			codec := Codecs.CodecForVersions(yaml.Serializer, yaml.Serializer, k.GVK.GroupVersion(), hub.GroupVersion())
			obj := k.New()
			fuzzer.FuzzerFor(fuzzer.MergeFuzzerFuncs(metafuzzer.Funcs, settled), rand.NewSource(seed), Codecs).Fill(obj)
			data, err := runtime.Encode(codec, obj)
			if err != nil {
				t.Fatal(err)
			}
			back, err := runtime.Decode(codec, data)
			if err != nil {
				t.Fatal(err)
			}
			if !equality.Semantic.DeepEqual(obj, back) {
				t.Errorf("through YAML (-want +got):\n%s", cmp.Diff(obj, back))
			}
		})
	}
}

// TestRoundTripToUnstructured runs upstream's suite over all types of the scheme,
// options and questions too: JSON and CBOR say the same.
func TestRoundTripToUnstructured(t *testing.T) {
	t.Setenv("TEST_RAND_SEED", strconv.FormatInt(begin(t), 10))
	alone := sets.New[schema.GroupVersionKind]() // types that have no internal version
	for gvk := range Scheme.AllKnownTypes() {
		if !Scheme.Recognizes(schema.GroupVersionKind{Group: gvk.Group, Version: runtime.APIVersionInternal, Kind: gvk.Kind}) {
			alone.Insert(gvk)
		}
	}
	roundtrip.RoundtripToUnstructured(t, Scheme, settled, nil, alone)
}
