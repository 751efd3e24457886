package releases

import (
	"archive/tar"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
)

// The programs of a release lie in one of these directories of its tarball. What else
// is in it (manual pages, the unit) is a package manager's.
var (
	programDirs = []string{".", "bin", "usr/bin", "usr/local/bin"}
	programs    = []string{"clusterd", "clusterctl"}
)

// eachProgram calls do with each program of a tarball, once.
func eachProgram(file io.Reader, do func(name string, content io.Reader) error) error {
	z, err := gzip.NewReader(file)
	if err != nil {
		return refusedf("the file is no gzip-compressed tarball: %v", err)
	}
	seen := map[string]bool{}
	for t := tar.NewReader(z); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return refusedf("the tarball cannot be read: %v", err)
		}
		name := path.Clean(h.Name)
		dir, base := path.Dir(name), path.Base(name)
		if h.Typeflag != tar.TypeReg || !slices.Contains(programDirs, dir) || !slices.Contains(programs, base) {
			continue
		}
		if seen[base] {
			return refusedf("the release has two programs %s", base)
		}
		seen[base] = true
		if err := do(base, t); err != nil {
			return err
		}
	}
}

// machines are ELF's names of architectures.
var machines = map[string]elf.Machine{
	"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64, "arm": elf.EM_ARM, "386": elf.EM_386,
	"riscv64": elf.EM_RISCV, "ppc64le": elf.EM_PPC64, "s390x": elf.EM_S390, "loong64": elf.EM_LOONGARCH,
}

// checkProgram refuses what is no program for the architecture.
func checkProgram(f io.ReaderAt, name, arch string) error {
	e, err := elf.NewFile(f)
	if err != nil {
		return refusedf("%s in the release is no program: %v", name, err)
	}
	if want, known := machines[arch]; !known || e.Machine != want {
		return refusedf("%s in the release is a program for %s, and not for %s as its signature says", name, e.Machine, arch)
	}
	return nil
}

// Look finds out the architecture of a release's clusterd, whose program is written
// to into, a new file, to be asked for its version.
func Look(file io.Reader, into interface {
	io.Writer
	io.ReaderAt
}) (arch string, err error) {
	found := false
	err = eachProgram(file, func(name string, content io.Reader) error {
		if name != "clusterd" {
			return nil
		}
		found = true
		if _, err := io.Copy(into, io.LimitReader(content, maxProgram)); err != nil {
			return err
		}
		e, err := elf.NewFile(into)
		if err != nil {
			return refusedf("clusterd in the release is no program: %v", err)
		}
		for name, machine := range machines {
			if machine == e.Machine {
				arch = name
				return nil
			}
		}
		return fmt.Errorf("clusterd in the release is a program for %s, which is not known here", e.Machine)
	})
	if err == nil && !found {
		err = refusedf("there is no clusterd in the release: it has to be a tarball as `make deb` writes it")
	}
	return arch, err
}
