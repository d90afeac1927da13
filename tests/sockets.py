"""The sockets at which processes listen, as the kernel lists them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Of /proc/net (proc(5)): files, and the state in which a socket takes what anybody sends
TABLES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}


class Listening(NamedTuple):
    """A socket that takes connections, or packets, from others.

    Attributes:
        command: of a process that has it.
    """

    protocol: str
    address: str
    port: int
    command: str


def listening(pids: Iterable[int]) -> set[Listening]:
    """Return the sockets at which any of these processes listens."""
    commands: dict[str, str] = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:200]
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    commands[os.readlink(descriptor)] = command
    found = set()
    for protocol, state in TABLES.items():
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            command = commands.get(f"socket:[{fields[9]}]", "")
            if fields[3] == state and command:
                host, port = fields[1].split(":")
                found.add(Listening(protocol, _address(host), int(port, 16), command))
    return found


def is_open(socket: Listening) -> bool:
    """Return whether other machines may reach a socket."""
    address = ipaddress.ip_address(socket.address)
    mapped = getattr(address, "ipv4_mapped", None)
    return not (mapped or address).is_loopback


def _address(text: str) -> str:
    """Return an address of the kernel's tables: words of four bytes in the machine's order (little endian here)."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
