"""The process beside a trainer in which the pool lives, and the one in which a reward is tried.

The trainer has threads, a CUDA context and a main module of its own. A pool in it would fork the first two or import
the last again in every worker; so the pool has a process that is started anew, imports neither torch nor an engine,
and ends when the trainer does, however that ends.
"""

from __future__ import annotations

import inspect
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
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from hybrid3d.rl import scoring_worker
from hybrid3d.rl.rewards import find_reward, load_reward
from hybrid3d.rl.scoring_worker import Item, Verdict, with_limit

TRIES = 3  # pools, for the calls of one batch: one breaks when a worker is killed while it has nothing to do
LOOK_SECONDS = 0.5

T = TypeVar("T")


class Pool:
    """Workers that compute one reward; one that hangs or dies is replaced."""

    def __init__(self, spec: str, workers: int, seconds: float):
        # No fork, because the pool has threads; no fork server, because its workers keep it alive, and it them.
        self._context = multiprocessing.get_context("spawn")
        self._workers, self._start = workers, (find_reward(spec).target, seconds)
        self._seconds = seconds
        self._batched: bool | None = None
        self._pool = self._new()

    def score(self, items: Sequence[Item]) -> list[Verdict]:
        """A verdict on each item, in order. A batched reward gets all at once, and its time limit holds for all."""
        calls = [list(items)] if self._is_batched() else [[item] for item in items]
        answers: dict[int, list[Verdict]] = {}
        for _ in range(TRIES):
            if not self._pool.active:
                self._renew()
            futures = {
                number: self._schedule(scoring_worker.judge, call)
                for number, call in enumerate(calls)
                if number not in answers
            }
            self._wait(futures.values())
            for number, future in futures.items():
                if future.done() and not isinstance(future.exception(), BrokenProcessPool):
                    answers[number] = _verdicts(future, len(calls[number]), self._seconds)
            if len(answers) == len(calls):
                break
        lost: Verdict = (None, "died", f"the pool's workers ended {TRIES} times before they had begun")
        return [verdict for number, call in enumerate(calls) for verdict in answers.get(number) or [lost] * len(call)]

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _new(self) -> ProcessPool:
        return ProcessPool(self._workers, initializer=scoring_worker.start, initargs=self._start, context=self._context)

    def _renew(self) -> None:
        self.close()
        self._pool = self._new()

    def _is_batched(self) -> bool:
        if self._batched is None:
            future = self._schedule(scoring_worker.is_batched)
            self._wait([future])
            if not future.done() or future.exception() is not None:
                return False  # the calls will say what is the matter
            self._batched = future.result()
        return self._batched

    def _schedule(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        try:
            return self._pool.schedule(function, arguments, timeout=self._seconds)
        except RuntimeError:  # it broke just now; this future will not be done either
            return Future()

    def _wait(self, futures: Iterable[Future[Any]]) -> None:
        """Until all are done or the pool is broken, when those that it had not looked at never will be."""
        waiting = list(futures)
        while wait(waiting, timeout=LOOK_SECONDS).not_done and self._pool.active:
            pass


def _verdicts(future: Future[list[Verdict]], samples: int, seconds: float) -> list[Verdict]:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, TimeoutError):
        failure: Verdict = (None, "hung", f"no reward within {seconds:g} s")
    elif isinstance(error, ProcessExpired):
        failure = (None, "died", f"the worker ended with exit code {error.exitcode}")
    else:
        failure = (None, "died", scoring_worker.describe(error))
    return [failure] * samples


def serve(connection: Connection, spec: str, workers: int, seconds: float) -> None:
    """Score what comes until the trainer closes its end."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pool = Pool(spec, workers, seconds)
    while True:
        try:
            items = connection.recv()
        except (EOFError, ConnectionError):
            break
        connection.send(pool.score(items))
    pool.close()


def _end_with(parent: int) -> None:
    """End with the trainer, however busy; the workers have asked the kernel to end with this process."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def check(target: str) -> None:
    """Load a reward as a worker would. What it raises is for whoever started this process."""
    function = load_reward(target)
    try:
        signature = inspect.signature(with_limit(function, 1.0))
    except ValueError:  # a function in C that does not say
        return
    try:
        signature.bind("answer", "reference", "prompt")
    except TypeError as error:
        raise TypeError(
            f"{target}{inspect.signature(function)} does not take (answer, reference, prompt): {error}"
        ) from None


def main(command: str, *arguments: str) -> None:
    """`check TARGET`, or `serve DESCRIPTOR SPEC WORKERS SECONDS`."""
    if command == "check":
        try:
            check(*arguments)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # whatever threads the module has started
        os._exit(0)
    descriptor, spec, workers, seconds = arguments
    serve(Connection(int(descriptor)), spec, int(workers), float(seconds))
