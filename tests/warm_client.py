"""Stands in for `python` where tests start hybrid3d: runs it in a process that a warm server forks, or by itself.

Needs only the standard library, and runs without `site`, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time

WARM_MODULES = (
    "hybrid3d",
    "hybrid3d.bench.start",
    "hybrid3d.doctor.answers",
    "hybrid3d.planning.fitting",
    "hybrid3d.planning.agreed_placement",
    "torch.distributed.run",
)


def main(executable: str, folder: str, *arguments: str) -> int:
    """Run `python ARGUMENTS` and return its exit code.

    Args:
        executable: the path under which tests and the processes that they start call this program.
        folder: that of the servers' sockets.
    """
    job = [argument for n, argument in enumerate(arguments) if argument != "-u" or n > 0]
    if not (job[:1] == ["-m"] and job[1] in WARM_MODULES) and not (job and job[0].endswith(".py")):
        os.execv(sys.executable, [sys.executable, *arguments])
    servers = sorted(name for name in os.listdir(folder) if name.endswith(".server"))
    number = int(os.environ.get("RANK", "0")) % len(servers)  # neighbouring ranks have different hash seeds
    request = {
        "arguments": job,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "executable": executable,
    }
    with socket.socket(socket.AF_UNIX) as server:
        _connect(server, os.path.join(folder, servers[number].removesuffix(".server")))
        message = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(server, [message], [0, 1, 2])
        server.sendall(message[sent:])
        replies = server.makefile("rb")
        pid = int(replies.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: _send(number, pid))
        code = int(replies.readline() or b"1")  # nothing if the server has ended
    if code < 0:  # ended by a signal: so does this process
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _send(number: int, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just exited
        os.kill(pid, number)


def _connect(server: socket.socket, path: str) -> None:
    for _ in range(1200):
        try:
            return server.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.1)
    raise SystemExit(f"{path}: the server of warm processes has not started within 120 s")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
