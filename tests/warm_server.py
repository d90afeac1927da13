"""Forks test processes that have torch and both engines imported, which takes most of the CPU time of a short run.

`warm_python.executable()` starts the servers; each process asks one of them through `warm_client.py`. A forked process
gets the arguments, environment, working directory and standard streams of its client, which passes signals on and exits
with its exit code. A `sitecustomize` in its PYTHONPATH runs first, but cannot replace what modules imported by name.
"""

from __future__ import annotations

import array
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PRELOADED = (
    "hybrid3d.cli",
    "hybrid3d.bench.task",
    "hybrid3d.launch.launcher",
    "hybrid3d.launch.preflight",
    "hybrid3d.launch.rank",
    "hybrid3d.trainer.start",
    "hybrid3d.planning.fitting",
    "hybrid3d.planning.page",
    "hybrid3d.planning.report",
    "hybrid3d.trainer.local_generator",
    "hybrid3d.trainer.rl",
    "hybrid3d.trainer.data_loops",
    "matplotlib.pyplot",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
)
MAX_MESSAGE = 1 << 20


def main(path: str) -> None:
    """Serve until standard input is closed; in a forked process, run what its client asked for."""
    job = None
    try:
        prepare()
        job = serve(path)
    finally:
        if job is None:
            _remove(os.path.dirname(path))
    if job is not None:
        run(job)


def prepare() -> None:
    """Import what processes need, and do what each of them would do alike."""
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    _register_kernels()
    _name_no_callers()
    inspect_models_here()
    with suppress(ValueError):  # a mistake of the user, which each command is to tell
        check_engines_once()()
    gc.enable()
    # In the forked processes no collection visits these objects, also not when an engine has ended, which unfreezes all
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _register_kernels() -> None:
    """Do once what vLLM does at the start of each engine: a search of all modules, which takes a second."""
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def _name_no_callers() -> None:
    """Let torchrun's records of its rendezvous name no function: for each of them `inspect` visits all modules."""
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda depth=2: "no_method_name"


def inspect_models_here() -> None:
    """Let vLLM read what a class of models can do in the process that asks, if it has been imported there.

    It does so in a process that imports it anew, lest CUDA is initialized: 10 s of CPU for each class on a new machine.
    """
    registry: Any = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None and not sys.modules["torch"].cuda.is_available():
        registry._run_in_subprocess = lambda function: function()


def check_engines_once() -> Callable[[], list[str]]:
    """Let commands in this process compare the engines' sources once, which takes two seconds; return what does it."""
    from hybrid3d.cli import starting

    starting.check_installed = functools.cache(starting.check_installed)
    return starting.check_installed


def _remove(folder: str) -> None:
    """Remove the servers' folder, unless it is by now that of others."""
    with suppress(OSError), open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(os.stat(os.path.join(folder, "alive")), os.fstat(sys.stdin.fileno())):
            shutil.rmtree(folder, ignore_errors=True)


def serve(path: str) -> dict[str, Any] | None:
    """Fork a process for each connection and return its job there; return None in the server itself at its end."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # clients wait for it
    clients: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for source in (sys.stdin.fileno(), woken, listener):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                job, streams = _receive(client)
                pid = os.fork()
                if pid == 0:
                    for other in (listener, client, *clients.values()):
                        other.close()
                    selector.close()
                    return job | {"streams": streams, "pipe": (woken, wake)}
                for stream in streams:
                    os.close(stream)
                client.sendall(b"%d\n" % pid)
                clients[pid] = client
                selector.register(client, selectors.EVENT_READ, pid)
            elif key.fileobj == woken:
                os.read(woken, 4096)
                _report_exits(clients, selector)
            elif key.data is None:  # standard input: the tests have ended
                for pid in clients:
                    _kill(pid)
                return None
            else:  # a client that was killed
                _kill(key.data)
                selector.unregister(key.fileobj)


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = array.array("i")
    data, fds, _, _ = socket.recv_fds(client, MAX_MESSAGE, 3)
    size.extend(fds)
    while not data.endswith(b"\n"):
        data += client.recv(MAX_MESSAGE)
    return json.loads(data), list(size)


def _report_exits(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        client = clients.pop(pid)
        with suppress(KeyError):
            selector.unregister(client)
        with suppress(OSError):
            client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        client.close()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run(job: dict[str, Any]) -> None:
    """Become the process that the client would have been: `python ARGUMENTS`."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in job["pipe"]:
        os.close(fd)
    for target, fd in enumerate(job["streams"]):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.environ.pop("HYBRID3D_PARENT", None)  # the client's, in whose place this process is forked
    tempfile.tempdir = None  # which an import has chosen by the server's environment
    sys.executable = job["executable"]
    sys.orig_argv = [sys.executable, *job["arguments"]]
    # New streams: the server's know of their file that they may seek in it, which fails in a pipe
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True)  # type: ignore[arg-type]
        for fd in (1, 2)
    )
    first, *arguments = job["arguments"]
    searched = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = [path for path in sys.path[1:] if path not in searched]
    if importlib.machinery.PathFinder.find_spec("sitecustomize", searched):
        sys.path[:] = [*searched, *known]
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if first == "-m":
        sys.argv = arguments
        sys.path[:] = [job["folder"], *searched, *known]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        sys.path[:] = [os.path.dirname(os.path.abspath(first)), *searched, *known]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
