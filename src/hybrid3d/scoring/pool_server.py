"""Runs the process pool in a process of its own, and checks that a function can be loaded.

Workers that the trainer forked would inherit its threads and CUDA context, and workers that it spawned would import its
main module. So the pool has a separate process, which imports neither torch nor an engine, and which ends when the
trainer ends, for whatever reason.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar, cast

from pebble import ProcessExpired, ProcessPool

from hybrid3d.errors import set_stream_errors
from hybrid3d.process import (
    adopt_orphans,
    child_pids,
    kill,
    kill_descendants,
    resource_tracker_pids,
    set_shared_memory_prefix,
)
from hybrid3d.scoring import pool_worker
from hybrid3d.scoring.environments import stops_of
from hybrid3d.scoring.functions import load_function
from hybrid3d.scoring.pool_worker import CallResult, Item, ReturnKind, with_limit

MAX_ATTEMPTS = 3  # pools for the calls of a batch: a pool breaks if a worker is killed while idle
POLL_SECONDS = 0.5
CLEAN_EXIT = 256  # replaces exit code 0; no process can end with this code

T = TypeVar("T")


class Worker(SpawnProcess):
    """A process of the pool, whose exit code 0 is reported as a failure.

    A worker never ends by itself. `ProcessPool` takes exit code 0 for a normal end and would wait for the call's limit.
    """

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return CLEAN_EXIT if code == 0 else code


class WorkerContext(SpawnContext):
    """Spawns workers: forking is unsafe because the pool has threads, and workers would keep a fork server alive."""

    Process = Worker


class Pool:
    """Calls one function in worker processes; replaces a worker that hangs or dies."""

    def __init__(
        self,
        target: str,
        return_kind: ReturnKind,
        workers: int,
        seconds: float,
        progressed: Callable[[], object] = lambda: None,
    ):
        """A call may take `seconds`; `progressed` is called during a batch, after calls of it have ended."""
        self._context = WorkerContext()
        self._workers, self._start = workers, (target, return_kind, seconds)
        self._return_kind, self._seconds, self._progressed = return_kind, seconds, progressed
        self._batched: bool | None = None
        self._pool = self._new_pool()

    def call(self, items: Sequence[Item]) -> list[CallResult]:
        """Call the function for each item, or once for all of them if it is batched; returns the results in order.

        The time limit applies to each call, from when a worker begins it.
        """
        calls = [list(items)] if self._is_batched() else [[item] for item in items]
        answers: dict[int, list[CallResult]] = {}
        for _ in range(MAX_ATTEMPTS):
            if not self._pool.active:
                self.close()
                self._pool = self._new_pool()
            futures = {
                number: self._schedule(pool_worker.call_function, call)
                for number, call in enumerate(calls)
                if number not in answers
            }
            self._wait(futures.values())
            for number, future in futures.items():
                if future.done() and not isinstance(future.exception(), BrokenProcessPool):
                    answers[number] = self._results(future, len(calls[number]))
            if len(answers) == len(calls):
                break
        lost: CallResult = (None, "died", f"the pool's workers ended {MAX_ATTEMPTS} times before they began the call")
        return [result for number, call in enumerate(calls) for result in answers.get(number) or [lost] * len(call)]

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            self._workers, initializer=pool_worker.initialize, initargs=self._start, context=self._context
        )

    def _is_batched(self) -> bool:
        if self._batched is None:
            future = self._schedule(pool_worker.is_batched)
            self._wait([future])
            if not future.done() or future.exception() is not None:
                return False  # the calls will report the problem
            self._batched = future.result()
        return self._batched

    def _schedule(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        try:
            return self._pool.schedule(function, arguments, timeout=self._seconds)
        except RuntimeError:  # the pool has just broken; this future is never done
            return Future()

    def _wait(self, futures: Iterable[Future[Any]]) -> None:
        """Wait until all are done, or the pool is broken, which does not complete its queued calls."""
        waiting = set(futures)
        while waiting and self._pool.active:
            done, waiting = wait(waiting, timeout=POLL_SECONDS)
            if done:
                self._progressed()

    def _results(self, future: Future[list[CallResult]], samples: int) -> list[CallResult]:
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            failure: CallResult = (None, "hung", f"no {self._return_kind} within {self._seconds:g} s")
        elif isinstance(error, ProcessExpired):
            code = 0 if error.exitcode == CLEAN_EXIT else error.exitcode
            failure = (None, "died", f"the worker ended with exit code {code}")
        else:
            failure = (None, "died", pool_worker.describe(error))
        return [failure] * samples


def serve(connection: Connection, target: str, return_kind: ReturnKind, workers: int, seconds: float) -> None:
    """Serve batches until the trainer closes its end. Processes that the function has started end with their worker."""
    adopt_orphans()
    set_shared_memory_prefix()
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    pool = Pool(target, return_kind, workers, seconds, lambda: connection.send([]))
    threading.Thread(target=_kill_orphans, daemon=True).start()
    while True:
        try:
            items = connection.recv()
        except (EOFError, ConnectionError):
            break
        connection.send(pool.call(items))
    pool.close()
    kill_descendants()


def _exit_with_parent(parent: int) -> None:
    """End this process when the trainer ends, even during a call; the kernel then ends the workers."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    kill_descendants()
    os._exit(1)


def _kill_orphans() -> None:
    """Kill processes that ended workers have left behind; they are children of this one (`adopt_orphans`).

    A process is killed only if it is seen twice, because a worker that is just being started is not registered yet.
    """
    previous: set[int] = set()
    while True:
        time.sleep(POLL_SECONDS)
        workers = {worker.pid for worker in multiprocessing.active_children()}
        strays = child_pids(os.getpid()) - workers - resource_tracker_pids()
        for pid in strays & previous:
            kill(pid)
        previous = strays


def check(target: str, return_kind: str, answer: str) -> None:
    """Load a function as a worker would, and write its stops as JSON to the file descriptor `answer`.

    Errors propagate; the process that started this one reports them.
    """
    function = load_function(target)
    stops = json.dumps(stops_of(function)).encode()
    first_parameter = "answer" if return_kind == "reward" else "turns"
    try:
        inspect.signature(with_limit(function, 1.0)).bind(first_parameter, "reference", "prompt")
    except ValueError:  # a function in C without a signature
        pass
    except TypeError as error:
        raise TypeError(
            f"{target}{inspect.signature(function)} does not take ({first_parameter}, reference, prompt): {error}"
        ) from None
    os.write(int(answer), stops)


def main(command: str, *arguments: str) -> None:
    """Run `check TARGET RETURN_KIND DESCRIPTOR`, or `serve DESCRIPTOR TARGET RETURN_KIND WORKERS SECONDS`."""
    set_stream_errors()
    if command == "check":
        try:
            check(*arguments)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # not sys.exit, which waits for threads that the module has started
        os._exit(0)
    descriptor, target, return_kind, workers, seconds = arguments
    serve(Connection(int(descriptor)), target, cast(ReturnKind, return_kind), int(workers), float(seconds))
