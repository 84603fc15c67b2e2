"""Network of a launch: this node's address and interface, and connections that show when a process has ended."""

from __future__ import annotations

import contextlib
import os
import select
import socket

import psutil

from runtime.system.process import refuse, several_nodes

SILENCE = 15  # seconds after which a node that does not answer counts as gone


def own_address() -> str:
    """Return the IPv4 or IPv6 address by which other nodes of the launch reach this node; 127.0.0.1 on a single node.

    That of GLOO_SOCKET_IFNAME if it is set, else of the interface that leads to MASTER_ADDR. On the first node that
    name may be the loopback's (Debian's /etc/hosts); then the interface of the default route.
    """
    if not several_nodes():
        return "127.0.0.1"
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    if given:
        addresses = interface_addresses(given.split(",")[0])
        if not addresses:
            names = ", ".join(psutil.net_if_addrs())
            refuse(f"GLOO_SOCKET_IFNAME {given}: this node has no such interface with an address; it has {names}")
        return addresses[0]
    # The last two are addresses of no host, which only a default route reaches.
    for goal in (os.environ["MASTER_ADDR"], "192.0.2.1", "2001:db8::1"):
        address = local_end(goal)
        if address is not None and not address.startswith("127.") and address != "::1":
            return address
    refuse(
        f"several nodes, but {socket.gethostname()} has no route to MASTER_ADDR {os.environ['MASTER_ADDR']} other than "
        f"its loopback; pass --main_process_ip an address that all nodes can reach, or set GLOO_SOCKET_IFNAME"
    )


def local_end(goal: str) -> str | None:
    """Return this node's address from which packets to ``goal`` leave, or None without a route. Sends nothing."""
    try:
        ways = socket.getaddrinfo(goal, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in ways:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    return None


def interface_addresses(name: str) -> list[str]:
    """Return the IPv4 address of an interface, then its IPv6 addresses without link-local ones; [] without it."""
    own = psutil.net_if_addrs().get(name, [])
    found = [entry.address for family in (socket.AF_INET, socket.AF_INET6) for entry in own if entry.family == family]
    return [address for address in found if "%" not in address]  # fe80::1%eth0: of a link


def choose_interface() -> None:
    """Let Gloo use the interface on which several nodes reach each other, unless the user has chosen one.

    Gloo takes the address that the host name stands for, which in containers and on Debian is the loopback's: the
    ranks of one node would look for those of the other on their own.
    """
    if not several_nodes() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = own_address()
    names = [name for name in psutil.net_if_addrs() if address in interface_addresses(name)]
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def watch_other_end(line: socket.socket) -> None:
    """Let the kernel end a connection whose other end has not answered for SILENCE seconds, whatever Python does."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENCE - 5) // 2)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE * 1000)


class LivenessPort:
    """A port where a process can be seen to live: it lets nobody in, but a connection to it ends with the process."""

    def __init__(self) -> None:
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.create_server(("", 0), family=family, backlog=64)
        self.socket.setblocking(False)
        self.place = f"{socket.gethostname()} {address} {self.socket.getsockname()[1]}"

    def close(self) -> None:
        """Tell whoever looks that this process ends in good order."""
        while True:
            try:
                visitor, _ = self.socket.accept()
            except OSError:  # BlockingIOError: nobody else
                break
            with visitor:
                visitor.sendall(b".")
        self.socket.close()


class Neighbor:
    """Another rank, seen through its ``LivenessPort``."""

    def __init__(self, place: str) -> None:
        self.host, self.address, port = place.split()
        self.ended_well = False
        self.line = socket.create_connection((self.address, int(port)), timeout=5)
        watch_other_end(self.line)
        self.line.setblocking(False)

    def is_gone(self, patience: float = 0.0) -> bool:
        """Return True if the process ended without a message, or its node has not answered for SILENCE seconds."""
        if self.ended_well:
            return False
        select.select([self.line], [], [], patience)
        try:
            self.ended_well = self.line.recv(1) == b"."
        except BlockingIOError:
            return False
        except OSError:  # reset, timed out, no route
            return True
        return not self.ended_well
