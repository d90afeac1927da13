"""Network: interfaces and which of them are used, this host's name, loopback, and the port of the rendezvous."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path

from hybrid3d.doctor import CANNOT_START, SLOW, Context, Finding

SIOCGIFADDR = 0x8915  # see netdevice(7)
SECONDS = 10.0  # of a name's resolution
INTERFACES = Path("/sys/class/net")
IPV6 = Path("/proc/net/if_inet6")


def check_interfaces(context: Context) -> Iterator[Finding]:
    """Report the interfaces, and those that gloo's and NCCL's variables select."""
    addresses = interfaces()
    listed = ", ".join(f"{name} ({address or 'no IPv4'})" for name, address in addresses.items())
    yield Finding(f"interfaces: {listed or 'none'}; IPv6 is {'there' if _has_ipv6() else 'not there'}")
    there = ", ".join(addresses)
    for variable, select in (("GLOO_SOCKET_IFNAME", _gloo), ("NCCL_SOCKET_IFNAME", _nccl)):
        text = context.environment.get(variable)
        if text is None:
            continue
        selected = select(text, list(addresses))
        fix = f"unset {variable}, or set it to one of {there}"
        if not selected:
            yield Finding(f"{variable}={text!r} selects no interface; there are {there}", CANNOT_START, fix)
        elif not any(addresses[name] for name in selected) and not _has_ipv6(selected):
            yield Finding(f"{variable}={text!r} selects {', '.join(selected)}, without an address", CANNOT_START, fix)
        else:
            yield Finding(f"{variable}={text!r} selects {', '.join(selected)}")


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that is up; "" for one without."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                if not int((INTERFACES / name / "flags").read_text(encoding="utf-8"), 16) & 1:  # IFF_UP
                    continue
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                found[name] = ""
    return found


def _has_ipv6(names: Sequence[str] | None = None) -> bool:
    if not IPV6.exists():
        return False
    having = {line.split()[-1] for line in IPV6.read_text(encoding="utf-8").splitlines()}
    return bool(having if names is None else having & set(names))


def _gloo(text: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces that torch opens for gloo: all that are named must be there."""
    asked = text.split(",")
    return asked if set(asked) <= set(names) else []


def _nccl(text: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL may use: prefixes, after `=` whole names, after `^` those that are left out."""
    match = re.fullmatch(r"(\^?)(=?)(.*)", text)
    assert match is not None
    out, whole, rest = match[1], match[2], [part for part in match[3].split(",") if part]

    def is_named(name: str) -> bool:
        return name in rest if whole else name.startswith(tuple(rest))

    return [name for name in names if is_named(name) != bool(out)]


def check_host(context: Context) -> Iterator[Finding]:
    """Check that this host's name leads to an address of this host, and that loopback works."""
    name, several = socket.gethostname(), _several_nodes(context)
    found = resolve(name)
    local = {*interfaces().values(), "127.0.0.1"}
    fix = f'echo "ADDRESS {name}" >> /etc/hosts (as root), or GLOO_SOCKET_IFNAME=INTERFACE'
    if isinstance(found, str):
        then = "other nodes cannot reach it" if several else "gloo falls back to loopback, after waiting for the name"
        severity = CANNOT_START if several else SLOW
        yield Finding(f"the host's name {name!r} does not resolve ({found}): {then}", severity, fix)
    elif not any(address in local or address.startswith("127.") or ":" in address for address in found):
        text = f"the host's name {name!r} leads to {', '.join(found)}, which no interface of this machine has"
        yield Finding(text, CANNOT_START if several else SLOW, fix)
    elif several and all(address.startswith("127.") or address == "::1" for address in found):
        text = f"the host's name {name!r} leads to loopback ({', '.join(found)}), where other nodes do not reach it"
        yield Finding(text, CANNOT_START, fix)
    else:
        yield Finding(f"the host's name {name!r} leads to {', '.join(found)}")
    yield from _check_loopback()


def _several_nodes(context: Context) -> bool:
    """Return whether the recipe has more ranks than a node of its machine."""
    recipe = context.recipe
    return recipe is not None and recipe.world_size > recipe.machine.gpus_per_node


def resolve(name: str) -> list[str] | str:
    """Return the addresses of a host, or why there are none."""
    pool = ThreadPoolExecutor(1)
    try:
        found = pool.submit(socket.getaddrinfo, name, None, 0, socket.SOCK_STREAM).result(SECONDS)
    except FutureTimeout:
        return f"no answer within {SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError as error:  # a part of the name is empty or too long
        return str(error)
    finally:
        pool.shutdown(wait=False)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _check_loopback() -> Iterator[Finding]:
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            with socket.create_connection(server.getsockname(), timeout=SECONDS):
                return
    except OSError as error:
        found = f"no connection over 127.0.0.1 ({error.strerror or error}), where the ranks of one machine meet"
        yield Finding(found, CANNOT_START, "ip link set lo up (as root)")


def check_rendezvous(context: Context) -> Iterator[Finding]:
    """Check MASTER_ADDR and, if it is this machine, that MASTER_PORT is free."""
    host, port = (context.environment.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host:
        return
    found = resolve(host)
    if isinstance(found, str):
        fix = "set MASTER_ADDR to the address of rank 0's host"
        yield Finding(f"MASTER_ADDR={host!r} does not resolve ({found})", CANNOT_START, fix)
        return
    is_here = any(address in interfaces().values() or address.startswith("127.") for address in found)
    if not is_here or port is None or not port.isdecimal():
        yield Finding(f"MASTER_ADDR={host!r} leads to {', '.join(found)}")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((found[0] if ":" not in found[0] else "", int(port)))
        except (OSError, OverflowError) as error:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            fix = f"set another MASTER_PORT, the same on all nodes; ss -ltnp 'sport = :{port}' shows who listens"
            yield Finding(f"port {port} of MASTER_PORT cannot be used here ({why})", CANNOT_START, fix)
            return
    yield Finding(f"MASTER_ADDR={host!r} is this machine, and port {port} is free")
