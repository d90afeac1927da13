"""The process inside the sandbox: `python -I -S sandbox_child.py ORDERS`.

It gives up every right that a computation does not need, and then follows the orders in the file at the descriptor
ORDERS: it runs a program, or one side of a judgement (`program.py`, `judge.py`). A program can still compute,
read its input and Python's library, and write to descriptors that are already open.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import importlib
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable, Sequence

TYPE_CHECKING = False  # as typing's, which takes 7 ms to import: a fifth of what this process needs to start
if TYPE_CHECKING:
    from typing import Any

# Numbers of the allowed system calls, on x86_64 and on aarch64. All others fail with EPERM. Python needs these to
# compute, to import and to exit; none of them creates a process, a socket or a file, or affects another process.
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "nanosleep": (35, 101),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17), "gettimeofday": (96, 169),
    "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132),
    "gettid": (186, 178), "futex": (202, 98), "getdents64": (217, 61), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "dup3": (292, 24),
    "getrandom": (318, 278), "statx": (332, 291), "faccessat2": (439, 439),
}  # fmt: skip
OLD_CALLS = {"stat": 4, "lstat": 6, "access": 21, "getdents": 78, "readlink": 89, "time": 201}  # on x86_64 only
# Allowed with some arguments only.
OPENAT, IOCTL, FCNTL = (257, 56), (16, 29), (72, 25)
NO_WRITING = (
    ~(os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_NONBLOCK | os.O_NOCTTY | os.O_LARGEFILE) & 0xFFFFFFFF
)
TERMINAL = (0x5401, 0x5450, 0x5451)  # TCGETS, FIONCLEX, FIOCLEX
DESCRIPTOR = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC: no F_SETOWN, which sends signals

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 4, 38, 22, 2
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
LOAD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
ALL_FILE_RIGHTS = (1 << 13) - 1  # of Landlock's first version
READ_FILE, READ_DIR = 1 << 2, 1 << 3
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")


def filter_program(machine: str) -> bytes:
    """Return the filter as classic BPF: 8 bytes per instruction, with a code, two jump distances and an operand."""
    column, arch = MACHINES[machine]
    allowed = [numbers[column] for numbers in CALLS.values()]
    if machine == "x86_64":
        allowed += OLD_CALLS.values()
    rows = [(LOAD, 0, 0, ARCH), (JUMP_IF_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for number in allowed:
        rows += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    flags = [(LOAD, 0, 0, ARGUMENTS + 16), (JUMP_IF_ANY_BIT, 0, 1, NO_WRITING), (RETURN, 0, 0, REFUSE)]
    rows += [(JUMP_IF_EQUAL, 0, len(flags) + 1, OPENAT[column]), *flags, (RETURN, 0, 0, ALLOW)]
    for call, commands in ((IOCTL, TERMINAL), (FCNTL, DESCRIPTOR)):
        known = [row for c in commands for row in ((JUMP_IF_EQUAL, 0, 1, c), (RETURN, 0, 0, ALLOW))]
        rows += [(JUMP_IF_EQUAL, 0, len(known) + 2, call[column]), (LOAD, 0, 0, ARGUMENTS + 8), *known]
        rows += [(RETURN, 0, 0, REFUSE)]
    rows += [(RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *row) for row in rows)


def install_filter(libc: ctypes.CDLL) -> bool:
    """Install the filter, which cannot be undone; returns whether the kernel accepted it."""
    if platform.machine() not in MACHINES:
        return False
    program = filter_program(platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    return int(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0)) == 0


def restrict_files(libc: ctypes.CDLL, readable: Sequence[str]) -> bool:
    """Hide all files but those under `readable` with Landlock; returns whether the kernel supports it."""
    rights = ctypes.c_uint64(ALL_FILE_RIGHTS)
    ruleset = libc.syscall(LANDLOCK_CREATE, ctypes.byref(rights), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    for path in filter(os.path.isdir, readable):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", READ_FILE | READ_DIR, folder)
        libc.syscall(LANDLOCK_ADD, ruleset, 1, ctypes.c_char_p(rule), 0)
        os.close(folder)
    done = int(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0)) == 0
    os.close(ruleset)
    return done


def confine(orders: dict[str, Any]) -> list[str]:
    """Give up rights, as far as this kernel supports it; returns what confines the process besides the limits."""
    for name, limit in orders["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if sys.platform != "linux":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != orders["parent"]:
        os._exit(1)  # the parent ended before PR_SET_PDEATHSIG was set
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # other processes of this user cannot access its memory and descriptors
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    landlock = restrict_files(libc, [*sys.path, *SYSTEM_LIBRARIES])
    seccomp = install_filter(libc)
    return [name for name, active in (("seccomp", seccomp), ("landlock", landlock)) if active]


def run(orders: dict[str, Any]) -> None:
    """Run a program as a script."""
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(compile(orders["program"], "<program>", "exec"), module.__dict__)


def load(role: str, package: str) -> Callable[[dict[str, Any]], None]:
    """Return the function of a role, imported before the right to read its module is given up."""
    if role == "program":
        return run
    sys.path.insert(0, package)
    main: Callable[[dict[str, Any]], None] = importlib.import_module(role).main
    sys.path.remove(package)
    return main


def main() -> None:
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        orders = json.load(file)
    sys.argv[:] = ["program.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `site` would define them, and -S skips it
    act = load(orders["role"], orders["package"])
    os.write(orders["report"], (" ".join(confine(orders)) + "\n").encode())
    act(orders)


if __name__ == "__main__":
    main()
