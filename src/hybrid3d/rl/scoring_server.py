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
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

from pebble import ProcessExpired, ProcessPool

from hybrid3d.rl import scoring_worker
from hybrid3d.rl.rewards import find_reward, load_reward
from hybrid3d.rl.scoring_worker import START_SECONDS, Item, Verdict

TRIES = 3  # pools, for the calls of one batch: one breaks when a worker is killed while it has nothing to do
LOOK_SECONDS = 0.5


class Pool:
    """Workers that compute one reward; one that hangs or dies is replaced."""

    def __init__(self, spec: str, workers: int, seconds: float):
        reward = find_reward(spec)
        self._context = multiprocessing.get_context("forkserver")
        if reward.target != spec:  # our own: its imports, such as sympy, are shared by all workers
            self._context.set_forkserver_preload([reward.target.partition(":")[0]])
        self._workers, self._start = workers, (reward.target, seconds)
        self._seconds = seconds
        self._batched: bool | None = None
        self._pool = self._new()

    def score(self, items: Sequence[Item]) -> list[Verdict]:
        """A verdict on each item, in order. A batched reward gets all at once, and its time limit holds for all."""
        calls = [list(items)] if self._is_batched() else [[item] for item in items]
        answers: dict[int, list[Verdict]] = {}
        for _ in range(TRIES):
            futures = {
                number: self._pool.schedule(scoring_worker.judge, (call,), timeout=self._seconds)
                for number, call in enumerate(calls)
                if number not in answers
            }
            self._wait(futures.values())
            for number, future in futures.items():
                if future.done() and not isinstance(future.exception(), BrokenProcessPool):
                    answers[number] = _verdicts(future, len(calls[number]), self._seconds)
            if len(answers) == len(calls):
                break
            self._renew()
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
            future = self._pool.schedule(scoring_worker.is_batched, timeout=START_SECONDS)
            self._wait([future])
            if not future.done() or future.exception() is not None:
                self._renew()
                return False  # the calls will say what is the matter
            self._batched = future.result()
        return self._batched

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
    """Its fork server sees this process end, and the workers see the fork server."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def check(target: str) -> None:
    """Load a reward as a worker would. What it raises is for whoever started this process."""
    function = load_reward(target)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C that does not say
        return
    try:
        signature.bind("answer", "reference", "prompt")
    except TypeError as error:
        raise TypeError(f"{target}{signature} does not take (answer, reference, prompt): {error}") from None


def main(command: str, *arguments: str) -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
