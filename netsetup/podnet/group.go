package podnet

import (
	"errors"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// groupDeleter deletes interface groups, a request that the netlink library
// has no call for. Its socket belongs to the namespace it was opened in.
type groupDeleter struct {
	sock *nl.SocketHandle
}

func newGroupDeleter() (groupDeleter, error) {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return groupDeleter{}, err
	}
	return groupDeleter{sock: &nl.SocketHandle{Socket: s}}, nil
}

func (d groupDeleter) close() { d.sock.Close() }

// deleteGroup deletes all interfaces of the group; an empty group is no error.
func (d groupDeleter) deleteGroup(group uint32) error {
	req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: d.sock}
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC)) // index 0 and no name: the group decides
	req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}
