package api

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden messages")

// TestGoldenMessages holds what the messages look like on the wire, with every field
// set. A podmon of an older version may hold containers while a new clusterd speaks to
// it, so a field that is there keeps its name, type and meaning: a diff may only add
// lines. (OpReopenLog, which no clusterd asked for any more, was taken away once.)
func TestGoldenMessages(t *testing.T) {
	for name, message := range map[string]any{"request": &Request{}, "response": &Response{}} {
		n := 0
		fill(t, reflect.ValueOf(message).Elem(), &n)
		got, err := json.MarshalIndent(message, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, '\n')
		path := filepath.Join("testdata", name+".json")
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("a %s is not as in %s; if the change only adds: go test ./agent/podmon/api -run Golden -update\n%s", name, path, got)
		}
		back := reflect.New(reflect.TypeOf(message).Elem())
		d := json.NewDecoder(bytes.NewReader(want))
		d.DisallowUnknownFields()
		if err := d.Decode(back.Interface()); err != nil {
			t.Errorf("read %s: %v", path, err)
		}
		if !reflect.DeepEqual(back.Interface(), message) {
			t.Errorf("%s says %+v, want %+v", path, back.Elem(), message)
		}
	}
}

// fill sets every field below v to a value of its own.
func fill(t *testing.T, v reflect.Value, n *int) {
	t.Helper()
	*n++
	switch v.Kind() {
	case reflect.String:
		v.SetString("s" + string(rune('a'+*n%26)))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64, reflect.Int32:
		v.SetInt(int64(*n))
	case reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, v.Index(0), n)
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, key, n)
		fill(t, value, n)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i), n)
		}
	default:
		t.Fatalf("a field of kind %s: teach the test about it", v.Kind())
	}
}
