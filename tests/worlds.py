"""Transports between ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from hybrid3d.reshard.move.transport import Pending

T = TypeVar("T")


class Mailbox(dict):
    """Messages between threads, by (sender, receiver, tag); `pop` waits until a message is there."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._posted: set[tuple[int, int, int]] = set()

    def post(self, key: tuple[int, int, int]) -> None:
        """Record that the receiver has posted its receive."""
        with self._changed:
            self._posted.add(key)
            self._changed.notify_all()

    def wait_until_posted(self, key: tuple[int, int, int]) -> None:
        self._wait(lambda: key in self._posted, f"never posted: {key}")
        self._posted.discard(key)

    def __setitem__(self, key: tuple[int, int, int], tensor: torch.Tensor) -> None:
        with self._changed:
            assert key not in self, f"two messages of one tag in flight: {key}"
            super().__setitem__(key, tensor)
            self._changed.notify_all()

    def peek(self, key: tuple[int, int, int]) -> torch.Tensor:
        """Wait for a message, and return it without removing it."""
        self._wait(lambda: key in self, f"never sent: {key}")
        return self[key]

    def pop(self, key: tuple[int, int, int]) -> torch.Tensor:
        self.peek(key)
        with self._changed:
            self._changed.notify_all()
            return super().pop(key)

    def wait_until_taken(self, key: tuple[int, int, int]) -> None:
        self._wait(lambda: key not in self, f"never received: {key}")

    def _wait(self, there: Callable[[], bool], failure: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: there() or self._failure, timeout=60)
            if self._failure:
                raise RuntimeError("another rank failed") from self._failure
            assert found, failure

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Make the other ranks fail, which would wait for this one, if the block raises."""
        try:
            yield
        except BaseException as failure:
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()
            raise


class LocalTransport:
    """The transport of one rank; the ranks of one process share a `mailbox`."""

    blocks_host = True
    shared_memory = None

    def __init__(self, rank: int, mailbox: dict[tuple[int, int, int], torch.Tensor]):
        self.received_bytes = self.network_bytes = 0
        self._rank = rank
        self._mailbox = mailbox
        self._expected: list[tuple[tuple[int, int, int], torch.Tensor]] = []

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._mailbox[self._rank, dst, tag] = tensor.clone()

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self.received_bytes += tensor.nbytes
        self._expected.append(((src, self._rank, tag), tensor))

    def run(self) -> Pending:
        started, self._expected = _Deliveries(self._mailbox, self._expected), []
        return started


class _Deliveries:
    def __init__(
        self,
        mailbox: dict[tuple[int, int, int], torch.Tensor],
        expected: list[tuple[tuple[int, int, int], torch.Tensor]],
    ):
        self._mailbox = mailbox
        self._expected = expected

    def wait(self) -> None:
        for key, tensor in self._expected:
            tensor.copy_(self._mailbox.pop(key))


class Strict(LocalTransport):
    """A transport that overwrites received tensors when they are posted, and reads sent ones until they arrive.

    Attributes:
        sent, received: (other rank, tag, bytes) of all messages, in the order in which they were submitted.
    """

    def __init__(self, rank: int, mailbox: Mailbox):
        super().__init__(rank, mailbox)
        self.sent: list[tuple[int, int, int]] = []
        self.received: list[tuple[int, int, int]] = []
        self._leaving: list[tuple[int, int, int]] = []
        self._in_flight = 0

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        assert_bytes(tensor)
        self.sent.append((dst, tag, tensor.nbytes))
        self._leaving.append((self._rank, dst, tag))
        self._mailbox[self._rank, dst, tag] = tensor

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        assert_bytes(tensor)
        self.received.append((src, tag, tensor.nbytes))
        tensor.fill_(0x5A)
        super().submit_recv(tensor, src, tag)

    def run(self) -> Any:
        self._in_flight += 1
        assert self._in_flight <= 2, "more than two buckets in flight"
        expected, leaving = self._expected, self._leaving
        self._expected, self._leaving = [], []
        transport = self

        class Deliveries:
            def wait(self) -> None:
                for key, tensor in expected:
                    tensor.copy_(transport._mailbox.peek(key))
                    transport._mailbox.pop(key)
                for key in leaving:
                    transport._mailbox.wait_until_taken(key)
                transport._in_flight -= 1

        return Deliveries()


def assert_bytes(tensor: torch.Tensor) -> None:
    """Check that a tensor is 1-D and contiguous, of bytes, like the result of `as_bytes`."""
    assert (tensor.dtype, tensor.dim(), tensor.stride()) == (torch.uint8, 1, (1,))
    assert tensor.numel() > 0


def run_in_threads(run: Callable[[int], T], ranks: Sequence[int]) -> list[T]:
    """Call `run(rank)` for every rank at once, and return the results."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))
