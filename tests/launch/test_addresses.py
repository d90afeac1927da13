"""Ranks of several nodes reach each other, whatever a host's own name leads to, and listen nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT
from hybrid3d import distributed, launch_environment
from hybrid3d.errors import UserMistake
from hybrid3d.launch import rendezvous
from run_ranks import environment
from servers import free_port


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Nodes:
    """Two machines with a cable between them, as network namespaces; each gives its own name a loopback address."""

    def __init__(self, mark: str):
        self.names = [f"h3d-{mark}-{n}" for n in range(2)]
        self.addresses = ["10.211.7.1", "10.211.7.2"]

    def make(self) -> None:
        cable = [f"h3d{self.names[0][4:8]}{n}" for n in range(2)]
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for n, name in enumerate(self.names):
            ip("link", "set", cable[n], "netns", name)
            ip("-n", name, "addr", "add", f"{self.addresses[n]}/24", "dev", cable[n])
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", cable[n], "up")
            ip("-n", name, "route", "add", "default", "via", self.addresses[1 - n])
            other = f"{self.addresses[1 - n]} node-{1 - n}\n"
            hosts = Path("/etc/netns") / name / "hosts"  # what `ip netns exec` shows as /etc/hosts
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node-{n}\n{other}")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            folder = Path("/etc/netns") / name
            (folder / "hosts").unlink(missing_ok=True)
            if folder.exists():
                folder.rmdir()

    def run(self, ranks_per_node: int = 1, **variables: str) -> list[dict[str, Any]]:
        """Run `joined.py` as ranks on both, and return what each prints."""
        mark, world, processes = uuid.uuid4().hex, 2 * ranks_per_node, []
        for rank in range(world):
            node, local = divmod(rank, ranks_per_node)
            where = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29700", **variables, "HYBRID3D_RENDEZVOUS_SECONDS": "60"}
            who = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks_per_node}
            given = environment(mark, **where, **{name: str(number) for name, number in who.items()})
            # As the host's own name, which gloo asks for by itself
            command = ["unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"', "-", f"node-{node}"]
            command = ["ip", "netns", "exec", self.names[node], *command, sys.executable]
            command += [str(ROOT / "tests/jobs/joined.py")]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, env=given, stdout=pipe, stderr=pipe, text=True))
        try:
            done = [process.communicate(timeout=200) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * world, [said[1][-1500:] for said in done]
        return [json.loads(said[0]) for said in done]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(uuid.uuid4().hex[:4])
    try:
        if os.geteuid():
            pytest.skip("only root makes network namespaces")
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield made
    finally:
        made.remove()


@pytest.mark.engines
def test_host_whose_name_leads_to_its_loopback_joins(nodes: Nodes) -> None:
    """As on Debian: rank 0's host calls itself 127.0.1.1, where nobody else reaches it."""
    found = nodes.run(ranks_per_node=2)
    assert [rank["total"] for rank in found] == [10] * 4
    for rank, one in enumerate(found):
        address = nodes.addresses[rank // 2]
        assert (one["reached"], one["listens"]) == (address, [address])


@pytest.mark.slow
@pytest.mark.engines
def test_host_that_is_named_by_its_address_joins(nodes: Nodes) -> None:
    found = nodes.run(MASTER_ADDR=nodes.addresses[0])
    assert [(one["total"], one["listens"]) for one in found] == [(3, [address]) for address in nodes.addresses]


def test_ranks_of_one_machine_meet_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where MASTER_ADDR is an address that others reach."""
    where = {"MASTER_ADDR": "192.0.2.55", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**where, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", launch_environment.ADDRESS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert rendezvous.meet({}).check(["answer"])
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert launch_environment.own_address() == "127.0.0.1"


def test_user_s_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    distributed.listen_at("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0")


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "lo"), ("::1", "lo"), ("203.0.113.9", None)])
def test_interface_of_an_address(address: str, name: str | None) -> None:
    assert distributed.interface_of(address) == name


def test_name_of_which_only_loopback_is_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(launch_environment, "is_loopback", lambda host: True)

    def no_route(host: str) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(launch_environment, "source_address", no_route)
    with pytest.raises(UserMistake, match=r"MASTER_ADDR=node-a leads to loopback on its own host.*set MASTER_ADDR to"):
        launch_environment.master_host()
