"""Ranks that do not train, as threads without engines, for tests of the first rank that trains."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from hybrid3d.workers.channel import Connection, Disconnected, connect
from hybrid3d.workers.messages import Call, End, Join, Joined, Leave, Leaving, Register, Reply


def make_store(monkeypatch: pytest.MonkeyPatch, ranks: int) -> dist.Store:
    """Return a store, in an environment in which so many ranks have been started."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")  # of the store; unused here
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    return dist.HashStore()


class FakeRank:
    """A rank that does what it is asked, as `reply` says, until it is asked to exit or `dies_at` a call."""

    def __init__(self, store: dist.Store, register: Register, start: int = 0):
        self.rank, self.calls = register.rank, list[Call]()
        self.group_start: int | None = None
        self.last: Any = None  # what it was asked for at last
        connection = connect(store, start, lambda: False)
        assert connection is not None
        self.connection: Connection = connection
        self.connection.send(register)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def reply(self, call: Call) -> Reply:
        raise NotImplementedError

    def dies_at(self, call: Call) -> bool:
        raise NotImplementedError

    def _serve(self) -> None:
        try:
            while not isinstance(self.last, Leave | End):
                self.last = message = self.connection.receive()
                if isinstance(message, Join):
                    self.group_start = message.start
                    self.connection.send(Joined())
                elif isinstance(message, Call):
                    self.calls.append(message)
                    if self.dies_at(message):
                        break
                    self.connection.send(self.reply(message))
            else:
                self.connection.send(Leaving())
        except Disconnected:
            pass
        self.connection.close()
