"""Connections between the first rank that trains and the ranks that do not train.

Both ends prove that they know the run's secret before either of them reads a message. The secret is handed over in a
file (`launch/run_secret.py`); the store has only the address, which anybody may read.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import launch_environment, ledger
from hybrid3d.distributed import LostPeer
from hybrid3d.launch_environment import CLOSE_SECONDS, CONNECT_SECONDS
from hybrid3d.workers.messages import Message, decode, encode

logger = logging.getLogger(__name__)

T = TypeVar("T")

ADDRESS_POLL_SECONDS = 0.5
ACCEPT_PAUSE_SECONDS = 1.0  # after an error, such as too many open files
NONCE_BYTES = PROOF_BYTES = 32
# A node that is lost and does not close its connections is noticed within a minute
TCP_OPTIONS = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 20),
    (socket.TCP_KEEPCNT, 4),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_USER_TIMEOUT, 60_000),
)


class Disconnected(LostPeer):
    """The process at the other end has closed the connection, has exited, or has sent what is no message."""


class NotOfThisRun(ConnectionError):
    """The process at the other end does not know the run's secret."""


def authenticate(of_socket: socket.socket, host: str, port: int, as_server: bool) -> None:
    """Have both ends prove that they know the run's secret, before either reads anything else.

    Each sends a random number, and proves with the run's secret that it has got that of the other one. The proofs name
    the server's address, so that nobody can pass them on between two ends that were led to another address.

    Args:
        host, port: the server's, as it has published them.

    Raises:
        NotOfThisRun: the other end does not know the secret.
        OSError: it has gone, or is silent.
    """
    end = time.monotonic() + CONNECT_SECONDS  # of the whole proof, however slowly its bytes come
    of_socket.settimeout(CONNECT_SECONDS)
    own = secrets.token_bytes(NONCE_BYTES)
    of_socket.sendall(own)
    other = _receive_bytes(of_socket, NONCE_BYTES, end)
    nonces = own + other if as_server else other + own

    def prove(role: bytes) -> bytes:
        told = b"\0".join([b"hybrid3d", role, f"{host}:{port}".encode(), nonces])
        return hmac.new(launch_environment.secret(), told, hashlib.sha256).digest()

    def check(role: bytes) -> None:
        if not hmac.compare_digest(_receive_bytes(of_socket, PROOF_BYTES, end), prove(role)):
            raise NotOfThisRun("the process there does not know the run's secret")

    if as_server:
        check(b"client")
        of_socket.sendall(prove(b"server"))
    else:
        of_socket.sendall(prove(b"client"))
        check(b"server")
    of_socket.settimeout(None)


def _receive_bytes(of_socket: socket.socket, count: int, end: float) -> bytes:
    found = b""
    while len(found) < count:
        of_socket.settimeout(max(0.001, end - time.monotonic()))
        part = of_socket.recv(count - len(found))
        if not part:
            raise NotOfThisRun("the process there has closed the connection: it has another secret, or has ended")
        found += part
    return found


class Connection:
    """One end of a connection. One thread at a time may receive, and one may send."""

    def __init__(self, of_socket: socket.socket, peer: int | None = None):
        """`peer` is the rank at the other end, if it is known."""
        self._peer = peer
        of_socket.setblocking(True)
        of_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in TCP_OPTIONS:
            of_socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = of_socket  # kept, as another thread may disconnect while one receives
        self._messages = connection.Connection(os.dup(of_socket.fileno()))

    def send(self, message: Message | bytes) -> None:
        """Send a message, which may be encoded already; raise `Disconnected` if the other end does not receive."""
        data = message if isinstance(message, bytes) else encode(message)
        try:
            self._messages.send_bytes(data)
        except OSError as error:
            raise Disconnected(str(error)) from error

    def receive(self) -> Message:
        """Wait for a message and return it.

        Raises:
            Disconnected: there is none, and none can come, or the other end sends what is no message.
        """
        try:
            data = self._messages.recv_bytes()
        except (EOFError, OSError) as error:
            raise Disconnected(str(error)) from error
        try:
            return decode(data)
        except ValueError as error:
            raise self._refuse(f"what came is no message: {error}") from error

    def receive_a(self, kind: type[T]) -> T:
        """Wait for a message of this kind and return it; raise `Disconnected` as `receive`, or if it is another one."""
        message = self.receive()
        if not isinstance(message, kind):
            raise self._refuse(f"{type(message).__name__} came instead of {kind.__name__}")
        return message

    def _refuse(self, why: str) -> Disconnected:
        """End the connection, as the other end does not keep to what was agreed; return the error to raise."""
        logger.error("a connection%s is ended: %s", "" if self._peer is None else f" to rank {self._peer}", why)
        self.disconnect()
        return Disconnected(why)

    def awaited(self) -> tuple[str, Sequence[int]] | None:
        """Return what `receive` waits for, and the rank at the other end; any thread may call it."""
        return None if self._peer is None else (f"its connection to rank {self._peer}", (self._peer,))

    def has_message(self) -> bool:
        """Return whether `receive` returns, or raises, at once."""
        return bool(wait([self], 0.0))

    def disconnect(self) -> None:
        """End the connection. Any thread may call it; the file stays open for the thread that receives."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close its files."""
        self.disconnect()
        self._messages.close()
        self._socket.close()

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call a function, in a thread, once the connection has ended; messages may still be received."""
        poll = select.poll()
        closed = self._socket.fileno() < 0
        if not closed:
            poll.register(self._socket, select.POLLRDHUP)

        def watch() -> None:
            if not closed:
                poll.poll()
            callback()

        threading.Thread(target=watch, name="connection", daemon=True).start()


def wait(connections: Sequence[Connection], seconds: float | None) -> list[Connection]:
    """Return the connections that have a message or have ended, after waiting for one at most so many seconds."""
    by_messages = {one._messages: one for one in connections}
    return [by_messages[ready] for ready in connection.wait(list(by_messages), seconds)]  # type: ignore[index]


class Server:
    """Accepts connections of the ranks that do not train, each in a thread of its own."""

    def __init__(self, store: Store, start: int, on_connection: Callable[[Connection], None]):
        """Publish the address of this start of the ranks that train; call `on_connection` in a thread for each."""
        host = launch_environment.own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=1024)
        self._host, self._on_connection, self._closed = host, on_connection, False
        self.port: int = self._socket.getsockname()[1]
        ledger.publish_address(store, start, host, self.port)
        threading.Thread(target=self._accept, name="connections", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    logger.warning("a connection of a rank was not accepted: %s", error)
                    time.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            threading.Thread(target=self._authenticate, args=(accepted,), name="authentication", daemon=True).start()

    def _authenticate(self, accepted: socket.socket) -> None:
        try:
            authenticate(accepted, self._host, self.port, as_server=True)
            made = Connection(accepted)
        except OSError as error:
            logger.warning("a connection to the server of this run's ranks was refused: %s", error)
            accepted.close()
            return
        self._on_connection(made)


def connect(store: Store, start: int, has_failed: Callable[[], bool]) -> Connection | None:
    """Connect to the first rank that trains, when it accepts connections; return None if the run has ended.

    Args:
        start: number of the start of the ranks that train.
        has_failed: whether that start has failed, before it accepts connections.

    Raises:
        Disconnected: it does not answer, or does not know the secret, or has failed.
    """
    if ledger.has_ended(store):
        return None
    host, port = "its address", 0
    try:
        # It imports its engine first; a heartbeat watches it
        while (address := ledger.read_address(store, start)) is None:
            if has_failed():
                raise Disconnected("a rank that trains was lost")
            time.sleep(ADDRESS_POLL_SECONDS)
        host, port = address
        made = socket.create_connection((host, port), CLOSE_SECONDS)
        try:
            authenticate(made, host, port, as_server=False)
        except OSError:
            made.close()
            raise
    except (OSError, ValueError, dist.DistError) as error:
        raise Disconnected(
            f"no connection to rank 0 at {host}:{port}: {error}: is it alive, and is the port open between the nodes?"
        ) from error
    return Connection(made, peer=0)
