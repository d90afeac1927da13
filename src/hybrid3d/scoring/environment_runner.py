"""Runs an environment on batches of conversations, with a time limit per reply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar, cast

from hybrid3d.scoring.environments import ENVIRONMENTS, Environment, find_environment, stops_of
from hybrid3d.scoring.functions import load_function
from hybrid3d.scoring.pool_client import ProcessPoolClient, load_in_subprocess
from hybrid3d.scoring.pool_worker import CallResult

POLL_SECONDS = 0.05

T = TypeVar("T")

ConversationItem = tuple[tuple[str, ...], str, str]
"""The turns, the reference and the prompt of one conversation."""


@dataclass(frozen=True)
class Reply:
    """Holds an environment's reply to one conversation.

    Attributes:
        text: continues the context; None if the conversation is over, also if the call failed.
        failure: the kind of failure, as in `Scores` (`not_a_text` instead of `not_a_number`), or "".
        message: describes the failure, or "".
    """

    text: str | None
    failure: str = ""
    message: str = ""


class EnvironmentRunner:
    """Calls one environment in `workers` processes, which start with the first turn; a builtin one needs none.

    Raises:
        ValueError: `spec` is neither the name of an environment nor `module:function`.
    """

    def __init__(self, spec: str, workers: int, timeout_seconds: float):
        target = find_environment(spec)
        self._function = cast(Environment, load_function(target)) if spec in ENVIRONMENTS else None
        self._pool = ProcessPoolClient(target, "reply", workers, timeout_seconds)
        # Each thread has a pool with one worker, so that no reply waits for another
        self._threads: ThreadPoolExecutor | None = None
        self._idle: SimpleQueue[ProcessPoolClient] = SimpleQueue()
        self._singles = (
            [] if self._function else [ProcessPoolClient(target, "reply", 1, timeout_seconds) for _ in range(workers)]
        )
        for pool in self._singles:
            self._idle.put(pool)

    def reply(self, items: Sequence[ConversationItem]) -> list[Reply]:
        """Return the reply to each conversation, in order."""
        if self._function is not None:
            return [Reply(self._function(*item)) for item in items]
        return [_reply(result) for result in self._pool.call(items)]

    def reply_soon(self, item: ConversationItem) -> Future[Reply]:
        """Ask for the reply to a conversation, and return at once; at most `workers` replies are made at a time."""
        if self._function is not None:
            return completed(Reply(self._function(*item)))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._singles), "environment")
        return self._threads.submit(self._reply_alone, item)

    def _reply_alone(self, item: ConversationItem) -> Reply:
        pool = self._idle.get()
        try:
            return _reply(pool.call([item])[0])
        finally:
            self._idle.put(pool)

    def close(self) -> None:
        """End all processes; the next call starts them again."""
        if self._threads is not None:
            threads, self._threads = self._threads, None
            threads.shutdown(wait=False, cancel_futures=True)
            while self._idle.qsize() < len(self._singles):  # end the calls that are being waited for
                for pool in self._singles:
                    pool.kill()
                time.sleep(POLL_SECONDS)
            threads.shutdown()
            for pool in self._singles:
                pool.close()
        self._pool.close()


def completed(value: T) -> Future[T]:
    """Return a future that has this result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _reply(result: CallResult) -> Reply:
    text, kind, message = result
    return Reply(None if text is None else str(text), kind, message)


def check_environment(spec: str) -> tuple[str, ...]:
    """Load an environment and return its stops.

    Raises:
        ValueError: it does not exist, or cannot be loaded or called; says why.
    """
    target = find_environment(spec)
    if spec in ENVIRONMENTS:
        return stops_of(load_function(target))
    return load_in_subprocess(spec, target, "reply", "environment")
