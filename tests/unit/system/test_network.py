"""Addresses of nodes: this node's address and interface, and a process that is seen to end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import two_nodes
from helpers import ROOT, rejected

from runtime.system import network


@pytest.fixture
def several_nodes(monkeypatch):
    """A rank of one of two nodes; MASTER_ADDR is this machine's loopback, as /etc/hosts on Debian has it."""
    for name in ("LAUNCH_WORLD_SIZE", "LAUNCH_LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")


def test_the_address_of_a_launch_on_one_node_is_the_loopback(monkeypatch, several_nodes):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none such")
    assert network.own_address() == "127.0.0.1"


def test_the_interface_that_the_user_names_is_taken(monkeypatch, several_nodes, capsys):
    """The first of several; one that is not there is rejected, with those that are."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert network.own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none such")
    said = rejected(capsys, network.own_address)
    assert "GLOO_SOCKET_IFNAME none such: this node has no such interface" in said
    assert "it has lo" in said


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({"127.0.0.2": "10.0.0.5", "192.0.2.1": "10.9.9.9"}, "10.0.0.5"),
        ({"127.0.0.2": "127.0.0.1", "192.0.2.1": "10.9.9.9"}, "10.9.9.9"),
        ({"127.0.0.2": None, "192.0.2.1": "10.9.9.9"}, "10.9.9.9"),
        ({"127.0.0.2": "127.0.0.1", "192.0.2.1": None}, None),
        ({"127.0.0.2": "fd00::5", "192.0.2.1": None}, "fd00::5"),
        ({"127.0.0.2": "::1", "192.0.2.1": None, "2001:db8::1": "fd00::9"}, "fd00::9"),
    ],
)
def test_the_address_is_that_of_the_way_to_the_first_node(monkeypatch, several_nodes, capsys, routes, expected):
    """The default route's where that way is the loopback; without either the run is rejected."""
    monkeypatch.setattr(network, "local_end", routes.get)
    if expected is not None:
        assert network.own_address() == expected
        return
    with pytest.raises(SystemExit) as end:
        network.own_address()
    assert (
        end.value.code == 2 and "no route to MASTER_ADDR 127.0.0.2 other than its loopback" in capsys.readouterr().err
    )


def test_the_end_of_a_way_is_an_address_of_this_machine():
    assert network.local_end("127.0.0.1") == "127.0.0.1"
    assert network.interface_addresses("lo")[0] == "127.0.0.1"
    assert network.interface_addresses("none such") == []


IPV6_NODE = """
import os, socket, subprocess, sys
ip = lambda *words: subprocess.run(["ip", *words], check=True)
ip("link", "set", "lo", "up")
ip("link", "add", "wire", "type", "veth", "peer", "name", "other")
ip("link", "set", "other", "up")
ip("link", "set", "wire", "up")
ip("addr", "add", "fd00:99::1/64", "dev", "wire", "nodad")
from runtime.system import network
os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "fd00:99::1"}
network.choose_interface()
assert os.environ["GLOO_SOCKET_IFNAME"] == "wire", os.environ["GLOO_SOCKET_IFNAME"]
assert network.own_address() == "fd00:99::1"
door = network.LivenessPort()
neighbor = network.Neighbor(door.place)
assert not neighbor.is_gone()
door.close()
assert not neighbor.is_gone(1.0) and neighbor.ended_well
print("fine")
"""


@pytest.mark.skipif(bool(two_nodes.reason_for_none()), reason=two_nodes.reason_for_none() or "there are nodes")
def test_a_node_with_ipv6_alone(several_nodes):
    """Its address, the interface of Gloo, and the connection by which a rank sees another one."""
    line = ["unshare", "--net", sys.executable, "-c", IPV6_NODE]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_gloo_gets_the_interface_of_the_address(monkeypatch, several_nodes):
    """It is set if there are several nodes and the user has not chosen one."""
    monkeypatch.setattr(network, "own_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    network.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    network.choose_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    network.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_silent_connection_ends_within_the_limit():
    """The wait before the first probe and those between the probes add up to SILENCE at most, and nearly to it."""
    with socket.socket() as line:
        network.watch_other_end(line)
        idle, between, count = (
            line.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert network.SILENCE - between < idle + between * count <= network.SILENCE


@pytest.mark.parametrize("in_good_order", [True, False])
def test_a_neighbor_is_gone_when_it_ended_without_a_word(in_good_order):
    """Not while it lives, and not once it has said that it ends."""
    door = network.LivenessPort()
    host, address, _ = door.place.split()
    assert (host, address) == (socket.gethostname(), "127.0.0.1")
    neighbor = network.Neighbor(door.place)
    assert not neighbor.is_gone()
    if in_good_order:
        door.close()
    else:
        door.socket.close()  # as the kernel does for a process that is killed
    found = [neighbor.is_gone(patience=5.0) for _ in range(2)]
    assert found == [not in_good_order] * 2
    neighbor.line.close()
