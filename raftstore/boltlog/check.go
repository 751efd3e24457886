package boltlog

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
	"os"

	"github.com/clusterd/clusterd/raftstore/seglog"
)

// bolt trusts its file: a page number that points anywhere is followed, beyond
// the end of the file and in goroutines of its own, where no caller can recover a panic;
// a count of keys that is too low hides the last ones. So the structure is
// checked before bolt sees it. bolt's format has been the same since 2013:
// pages of a B+tree that begin with their number, and two descriptions of the
// file (meta), of which the newer one counts that has its checksum.

const (
	pageHeader  = 16 // number 8, flags 2, keys 2, further pages 4
	pageElement = 16
	metaBytes   = 64
	metaMagic   = 0xED0CDAED
	metaVersion = 2

	flagBranch = 1
	flagLeaf   = 2
	flagMeta   = 4
)

type boltMeta struct {
	root, pages, tx uint64
}

// CheckFile looks at all pages that the file's newest description refers to. A
// file that is not there is fine. whole: both descriptions have their checksum;
// if one has not, a crash tore it, or it is damaged.
func CheckFile(path string) (whole bool, err error) {
	f, err := os.Open(path)
	if os.IsNotExist(err) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return true, err // bolt was about to write its first pages
	}
	c := &checker{f: f, path: path, size: info.Size()}
	return c.check()
}

type checker struct {
	f    *os.File
	path string
	size int64
	meta boltMeta
	seen map[uint64]bool
}

func (c *checker) damage(page uint64, format string, args ...any) error {
	return &seglog.CorruptError{File: c.path, Offset: int64(page * PageSize), Reason: fmt.Sprintf(format, args...)}
}

func (c *checker) check() (whole bool, err error) {
	whole = true
	for i := range uint64(2) {
		m, reason, err := c.readMeta(i)
		switch {
		case err != nil:
			return false, err
		case reason != "":
			whole = false
		case m.tx >= c.meta.tx:
			c.meta = m
		}
	}
	if c.meta.pages == 0 {
		return false, c.damage(0, "neither of its two descriptions is whole")
	}
	if int64(c.meta.pages)*PageSize > c.size && int64(c.meta.root+1)*PageSize > c.size {
		return false, c.damage(c.meta.pages, "the file ends, and has %d pages", c.meta.pages)
	}
	c.seen = map[uint64]bool{0: true, 1: true}
	var last []byte
	return whole, c.tree(c.meta.root, true, nil, &last, 0)
}

func (c *checker) readMeta(page uint64) (m boltMeta, reason string, err error) {
	b := make([]byte, pageHeader+metaBytes)
	if _, err := c.f.ReadAt(b, int64(page*PageSize)); err == io.EOF {
		return m, "the file ends", nil
	} else if err != nil {
		return m, "", err
	}
	le := binary.LittleEndian
	body := b[pageHeader:]
	h := fnv.New64a()
	_, _ = h.Write(body[:metaBytes-8])
	switch {
	case le.Uint64(b) != page || le.Uint16(b[8:]) != flagMeta:
		return m, "it is no description", nil
	case h.Sum64() != le.Uint64(body[56:]):
		return m, "its checksum is wrong", nil
	case le.Uint32(body) != metaMagic || le.Uint32(body[4:]) != metaVersion || le.Uint32(body[8:]) != PageSize:
		return m, "it is of another format", nil
	}
	return boltMeta{root: le.Uint64(body[16:]), pages: le.Uint64(body[40:]), tx: le.Uint64(body[48:])}, "", nil
}

// maxDepth is more than a tree of 4096-byte pages can have.
const maxDepth = 32

// tree walks a B+tree. last is the key before it: keys have to ascend; none of
// them is below least. top: the tree of buckets.
func (c *checker) tree(page uint64, top bool, least []byte, last *[]byte, depth int) error {
	if depth > maxDepth {
		return c.damage(page, "the tree is too deep")
	}
	b, err := c.page(page)
	if err != nil {
		return err
	}
	return c.keys(page, b, top, least, last, depth)
}

// page reads a page with those that belong to it.
func (c *checker) page(page uint64) ([]byte, error) {
	if page >= c.meta.pages || page < 2 {
		return nil, c.damage(0, "page %d is referred to, of %d", page, c.meta.pages)
	}
	at := int64(page) * PageSize
	head := make([]byte, pageHeader)
	if _, err := c.f.ReadAt(head, at); err == io.EOF {
		return nil, c.damage(page, "the file ends")
	} else if err != nil {
		return nil, err
	}
	more := uint64(binary.LittleEndian.Uint32(head[12:]))
	if got := binary.LittleEndian.Uint64(head); got != page || page+more >= c.meta.pages {
		return nil, c.damage(page, "page %d says that it is page %d, with %d more", page, got, more)
	}
	for i := page; i <= page+more; i++ {
		if c.seen[i] {
			return nil, c.damage(page, "page %d is referred to twice", i)
		}
		c.seen[i] = true
	}
	b := make([]byte, (more+1)*PageSize)
	if _, err := c.f.ReadAt(b, at); err == io.EOF {
		return nil, c.damage(page, "the file ends")
	} else if err != nil {
		return nil, err
	}
	return b, nil
}

// keys checks one page, whose bytes are b; page says where it is.
func (c *checker) keys(page uint64, b []byte, top bool, least []byte, last *[]byte, depth int) error {
	le := binary.LittleEndian
	flags, n := le.Uint16(b[8:]), int(le.Uint16(b[10:]))
	if flags != flagBranch && flags != flagLeaf || pageHeader+n*pageElement > len(b) || flags == flagBranch && n == 0 {
		return c.damage(page, "it has the flags %x and %d keys", flags, n)
	}
	for i := range n {
		at := pageHeader + i*pageElement
		e := b[at : at+pageElement]
		var pos, key, value uint64
		if flags == flagBranch {
			pos, key = uint64(le.Uint32(e)), uint64(le.Uint32(e[4:]))
		} else {
			pos, key, value = uint64(le.Uint32(e[4:])), uint64(le.Uint32(e[8:])), uint64(le.Uint32(e[12:]))
		}
		from := uint64(at) + pos
		if pos < pageElement || from+key+value > uint64(len(b)) {
			return c.damage(page, "key %d lies outside of it", i)
		}
		k := b[from : from+key]
		if flags == flagBranch {
			if *last != nil && bytes.Compare(k, *last) <= 0 || bytes.Compare(k, least) < 0 {
				return c.damage(page, "key %d is not above the one before", i)
			}
			if err := c.tree(le.Uint64(e[8:]), top, k, last, depth+1); err != nil {
				return err
			}
			continue
		}
		if bytes.Compare(k, least) < 0 {
			return c.damage(page, "key %d is below the one that leads here", i)
		}
		if *last != nil && bytes.Compare(k, *last) <= 0 {
			return c.damage(page, "key %d is not above the one before", i)
		}
		*last = bytes.Clone(k)
		if bucket := le.Uint32(e) != 0; bucket != top || le.Uint32(e) > 1 {
			return c.damage(page, "key %d is of the wrong kind", i)
		}
		if top {
			if err := c.bucket(page, b[from+key:from+key+value], depth); err != nil {
				return err
			}
		}
	}
	return nil
}

// bucket checks a bucket: its own tree, or one page inside of the value.
func (c *checker) bucket(page uint64, value []byte, depth int) error {
	if len(value) < 16 {
		return c.damage(page, "a bucket is too short")
	}
	var last []byte
	if root := binary.LittleEndian.Uint64(value); root != 0 {
		return c.tree(root, false, nil, &last, depth+1)
	}
	inside := value[16:]
	if len(inside) < pageHeader || binary.LittleEndian.Uint16(inside[8:]) != flagLeaf {
		return c.damage(page, "a bucket's page is no page")
	}
	return c.keys(page, inside, false, nil, &last, depth+1)
}
