"""Ranks in threads of one process: a mailbox for `LocalTransport` that waits for what has not been sent yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class Mailbox(dict):
    """Taking out what is not there yet waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def __setitem__(self, key: tuple[int, int, int], tensor: torch.Tensor) -> None:
        with self._changed:
            assert key not in self, f"two messages of one tag under way: {key}"
            super().__setitem__(key, tensor)
            self._changed.notify_all()

    def pop(self, key: tuple[int, int, int]) -> torch.Tensor:
        with self._changed:
            there = self._changed.wait_for(lambda: key in self or self._failure, timeout=60)
            if self._failure:
                raise RuntimeError("another rank failed") from self._failure
            assert there, f"never sent: {key}"
            return super().pop(key)

    @contextmanager
    def one_for_all(self) -> Iterator[None]:
        """A rank that fails ends the others, which would wait for it."""
        try:
            yield
        except BaseException as failure:
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()
            raise


def run_in_threads(run: Callable[[int], T], ranks: Sequence[int]) -> list[T]:
    """`run(rank)` of every rank at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))
