// Package projectquota keeps directories to a size by the project quotas of their
// file system, ext4 or XFS (quotactl(2), "project quotas"; xfs_quota(8)).
//
// A project is a number that a directory has and that what is made below it
// inherits. The file system counts what the files of a project take, and
// refuses more than the limit, ext4 with EDQUOT, XFS with ENOSPC. statfs(2) in such a directory shows
// the limit as the size of the file system.
//
// A project binds programs that do not mean to leave it: who owns a file, and
// is in the machine's own user namespace, may give it another project
// (ioctl_fs(2), FS_IOC_FSSETXATTR), and CAP_SYS_RESOURCE there passes all limits.
// In a user namespace of their own they may not.
package projectquota

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrUnsupported: the file system keeps no project to a limit: it has no project
// quotas, or was mounted without them (prjquota), or the kernel is older than
// 5.14 and has no quotactl_fd(2).
var ErrUnsupported = errors.New("the file system is not mounted with project quotas (option prjquota)")

// First is the lowest project that Assign gives. Those below are left to
// administrators, who count from 1 as a rule.
const First uint32 = 0x636c0000

// spread is how many projects, from First on, a search may begin with.
const spread = 1 << 24

// Usage of a project, in bytes. A limit of 0 is none.
type Usage struct{ Used, Limit int64 }

// Constants of quotactl(2) and linux/quota.h, linux/dqblk_xfs.h, linux/fs.h.
const (
	projectQuotas  = 2 // PRJQUOTA
	getQuota       = 0x800007
	setQuota       = 0x800008
	getStateV      = 'X'<<8 + 8
	enforced       = 1 << 5 // FS_QUOTA_PDQ_ENFD
	limitsOfBlocks = 1      // QIF_BLIMITS
	blockSize      = 1024   // QIF_DQBLKSIZE

	getXattr       = 0x801c581f // FS_IOC_FSGETXATTR
	setXattr       = 0x401c5820 // FS_IOC_FSSETXATTR
	inheritProject = 0x200      // FS_XFLAG_PROJINHERIT
)

// dqblk is struct if_dqblk.
type dqblk struct {
	hardBlocks, softBlocks, space  uint64
	hardInodes, softInodes, inodes uint64
	blockTime, inodeTime           uint64
	valid                          uint32
	_                              uint32
}

// stateV is struct fs_quota_statv.
type stateV struct {
	version int8
	_       uint8
	flags   uint16
	_       [156]byte
}

// fsxattr is struct fsxattr.
type fsxattr struct {
	flags, extentSize, extents, project, cowExtentSize uint32
	_                                                  [8]byte
}

// Folder is an open directory. It may be used by one goroutine at a time.
type Folder struct{ f *os.File }

// Open opens the directory dir, which is no link. Close it.
func Open(dir string) (Folder, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	return Folder{f}, err
}

// Close closes the directory.
func (d Folder) Close() error { return d.f.Close() }

// Supported returns ErrUnsupported if the directory's file system keeps no project
// to a limit.
func (d Folder) Supported() error {
	s := stateV{version: 1}
	err := d.control(getStateV, 0, unsafe.Pointer(&s))
	if err == nil && s.flags&enforced != 0 {
		return nil
	}
	return ErrUnsupported
}

// Project is the project of the directory; 0 if it has none of its own, or if its
// file system knows no projects.
func (d Folder) Project() (uint32, error) {
	x, err := d.attributes()
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return 0, nil
	}
	if err != nil || x.flags&inheritProject == 0 {
		return 0, err
	}
	return x.project, nil
}

// Assign gives the directory, which is empty, a project that no file of its file
// system has, and which has no limit. One that it has already stays. It is called for
// one directory of a file system at a time; as the search begins at a number that
// follows from the directory's path, other programs that do the same are no danger.
func (d Folder) Assign() (uint32, error) {
	x, err := d.attributes()
	if err != nil {
		return 0, d.fault("read the project of", err)
	}
	if x.flags&inheritProject != 0 && x.project != 0 {
		return x.project, nil
	}
	id, err := d.free()
	if err != nil {
		return 0, err
	}
	x.project = id
	x.flags |= inheritProject
	if err := d.ioctl(setXattr, &x); err != nil {
		return 0, d.fault("set the project of", err)
	}
	return id, nil
}

// free is a project that has neither files nor a limit.
func (d Folder) free() (uint32, error) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(d.f.Name()))
	for id := First + h.Sum32()%spread; id != 0; id++ {
		q, err := d.quota(id)
		if err != nil {
			return 0, err
		}
		if q.inodes == 0 && q.space == 0 && q.hardBlocks == 0 && q.softBlocks == 0 && q.hardInodes == 0 && q.softInodes == 0 {
			return id, nil
		}
	}
	return 0, fmt.Errorf("%s: its file system has no project left", d.f.Name())
}

// Usage is what a project of the directory's file system takes and may take.
func (d Folder) Usage(project uint32) (Usage, error) {
	q, err := d.quota(project)
	return Usage{Used: int64(q.space), Limit: int64(q.hardBlocks) * blockSize}, err
}

// SetLimit sets what a project of the directory's file system may take, in bytes,
// rounded up to 1 KiB; 0 is no limit. Less than it takes already is allowed: it
// cannot grow then.
func (d Folder) SetLimit(project uint32, bytes int64) error {
	q := dqblk{valid: limitsOfBlocks}
	if bytes > 0 {
		q.hardBlocks = uint64(bytes-1)/blockSize + 1
	}
	return d.fault("limit", d.control(setQuota, project, unsafe.Pointer(&q)))
}

func (d Folder) quota(project uint32) (dqblk, error) {
	var q dqblk
	err := d.control(getQuota, project, unsafe.Pointer(&q))
	if errors.Is(err, unix.ENOENT) { // XFS: it was never used
		err = nil
	}
	return q, d.fault("read the quota of", err)
}

func (d Folder) attributes() (fsxattr, error) {
	var x fsxattr
	return x, d.ioctl(getXattr, &x)
}

func (d Folder) ioctl(request uintptr, x *fsxattr) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, d.f.Fd(), request, uintptr(unsafe.Pointer(x))); e != 0 {
		return e
	}
	return nil
}

// control is quotactl_fd(2) for project quotas.
func (d Folder) control(command int, project uint32, arg unsafe.Pointer) error {
	_, _, e := unix.Syscall6(unix.SYS_QUOTACTL_FD, d.f.Fd(), uintptr(command<<8|projectQuotas), uintptr(project), uintptr(arg), 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

func (d Folder) fault(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s the folder %s: %w", doing, d.f.Name(), err)
}
