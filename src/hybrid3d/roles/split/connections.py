"""Connections between the first rank that trains and the ranks that generate: messages are pickled objects."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

import torch.distributed as dist

from hybrid3d import launch_environment
from hybrid3d.distributed import LostPeer

_KEY = "engines"  # of the store: the port that the first rank listens at, and the secret of the run
CONNECT_TIMEOUT = timedelta(minutes=10)
# A node that is lost without a word is noticed after this many seconds of silence, probes and seconds between them
KEEPALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPCNT, 4), (socket.TCP_KEEPINTVL, 10))


class Disconnected(LostPeer):
    """The process at the other end has closed the connection, or has exited."""


class Line:
    """One end of a connection. One thread at a time may receive, and one may send."""

    def __init__(self, of_socket: socket.socket):
        of_socket.setblocking(True)
        of_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        of_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in KEEPALIVE:
            of_socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = of_socket  # kept, as another thread may hang up while one receives
        self._connection = Connection(os.dup(of_socket.fileno()))

    def fileno(self) -> int:
        return self._connection.fileno()

    def authenticate(self, secret: bytes, as_server: bool) -> None:
        """Have both ends prove that they know the run's secret, before either unpickles anything."""
        steps: Sequence[Callable[[Connection, bytes], None]] = (deliver_challenge, answer_challenge)
        for step in steps if as_server else reversed(steps):
            step(self._connection, secret)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            Disconnected: the other end does not receive.
        """
        try:
            self._connection.send(message)
        except OSError as error:
            raise Disconnected(str(error)) from error

    def receive(self) -> Any:
        """Wait for a message and return it.

        Raises:
            Disconnected: there is none, and none can come.
        """
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise Disconnected(str(error)) from error

    def has_message(self) -> bool:
        """Return whether `receive` returns, or raises, at once."""
        return bool(select_readable([self], 0.0))

    def hang_up(self) -> None:
        """Disconnect both ends. Any thread may call it; the file stays open for the thread that receives."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and free the files."""
        self.hang_up()
        self._connection.close()
        self._socket.close()

    def when_hung_up(self, then: Callable[[], None]) -> None:
        """Call a function in a thread once the other end has disconnected, also if messages have not been received."""

        def watch() -> None:
            poll = select.poll()
            poll.register(self._socket, select.POLLRDHUP)
            poll.poll()
            then()

        threading.Thread(target=watch, name="connection", daemon=True).start()


def select_readable(lines: Sequence[Line], seconds: float | None) -> list[Line]:
    """Return the lines that have a message or are disconnected, after waiting for one at most so many seconds."""
    by_connection = {line._connection: line for line in lines}
    return [by_connection[ready] for ready in wait(list(by_connection), seconds)]  # type: ignore[index]


def listen(store: dist.Store, on_line: Callable[[Line], None]) -> socket.socket:
    """Listen for the ranks that generate, in a thread; each connection calls `on_line` in a thread of its own.

    Returns:
        The socket; closing it ends this.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
    secret = secrets.token_bytes(32)
    store.set(_KEY, json.dumps([server.getsockname()[1], secret.hex()]))

    def greet(accepted: socket.socket) -> None:
        line = Line(accepted)
        try:
            line.authenticate(secret, as_server=True)
        except Exception:  # whoever it is, it is not of this run
            line.close()
            return
        on_line(line)

    def accept() -> None:
        while True:
            try:
                accepted, _ = server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=greet, args=(accepted,), name="engine", daemon=True).start()

    threading.Thread(target=accept, name="engines", daemon=True).start()
    return server


def connect(store: dist.Store) -> Line:
    """Connect to the first rank that trains, when it listens.

    Raises:
        Disconnected: it does not, or does not know the secret.
    """
    host, _ = launch_environment.master_address()
    try:
        store.wait([_KEY], CONNECT_TIMEOUT)
        port, secret = json.loads(store.get(_KEY))
        line = Line(socket.create_connection((host, port), CONNECT_TIMEOUT.total_seconds()))
        line.authenticate(bytes.fromhex(secret), as_server=False)
    except (OSError, EOFError, AuthenticationError, dist.DistError) as error:
        raise Disconnected(f"rank 0 does not answer at {host}: {error}") from error
    return line
