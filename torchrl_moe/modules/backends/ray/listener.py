"""The socket between a driver and an actor: the actor listens, drivers connect, and both authenticate before they talk.

Ray carries the address and a key. Both sides prove that they have the key before anything else is read, and again with
each frame. This is a socket, and not actor calls: an actor call costs a millisecond each way, calls have no order, and
the end of a socket shows at once that the other side is gone.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError

from torchrl_moe.modules.backends.ray.sealed import SealedConnection

__all__ = ["Address", "LateConnection", "Listener", "dial"]

DIAL_SECONDS = 20
RETRY_SECONDS = 0.2
# A machine that is switched off sends nothing: it is probed after 10 s of silence, then every 5 s, and counts as gone
# when three probes are unanswered. Linux sends no probes while data is unacknowledged: that has as long, in
# milliseconds.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an actor listens, and the key that lets a driver in."""

    host: str
    port: int
    key: bytes


class Listener:
    """Accepts drivers, each in its own thread.

    Args:
        host: the address to listen on.
        welcome: called with the connection of each driver that has the key; returns when that driver is gone.
    """

    def __init__(self, host: str, welcome: Callable[[SealedConnection], None]) -> None:
        self._welcome = welcome
        self._closed = threading.Event()
        self._socket = socket.create_server((host, 0))
        self.address = Address(host=host, port=self._socket.getsockname()[1], key=secrets.token_bytes(32))
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                visitor, _ = self._socket.accept()
            except OSError:  # closed; or the visitor has left, or there are too many open files just now
                self._closed.wait(RETRY_SECONDS)
            else:
                threading.Thread(target=self._let_in, args=(visitor,), name="driver", daemon=True).start()

    def _let_in(self, visitor: socket.socket) -> None:
        with (
            contextlib.suppress(AuthenticationError, EOFError, OSError),
            _prove(visitor, self.address.key, is_actor=True) as connection,
        ):
            self._welcome(connection)

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would continue waiting
        self._socket.close()


def dial(address: Address) -> SealedConnection:
    """Return a connection to an actor's listener.

    Raises:
        OSError: nothing listens there, or nothing answers.
        EOFError: it was closed at once.
        AuthenticationError: the other side has another key.
    """
    caller = socket.create_connection((address.host, address.port), DIAL_SECONDS)
    return _prove(caller, address.key, is_actor=False)


def _prove(end: socket.socket, key: bytes, is_actor: bool) -> SealedConnection:
    """Return the connection of a socket, once each side has shown that it has the key."""
    with contextlib.ExitStack() as on_failure:
        on_failure.enter_context(end)
        _tune(end)
        end.settimeout(DIAL_SECONDS)
        try:
            connection = SealedConnection(end, key, is_actor)
        except TimeoutError as error:
            raise TimeoutError(f"the other side said nothing for {DIAL_SECONDS} s") from error
        on_failure.pop_all()
    return connection


def _tune(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a message is written in pieces
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class LateConnection:
    """A connection that may be used before it exists: readers and writers wait until it does, or never will."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._real: SealedConnection | None = None

    def become(self, real: SealedConnection) -> None:
        """Take the connection, or close it if this one was given up."""
        with self._lock:
            if self._known.is_set():
                real.close()
            self._real = real
            self._known.set()

    def give_up(self) -> None:
        """Declare that there will be none; does nothing if there is one."""
        with self._lock:
            self._known.set()

    def _wait(self) -> SealedConnection:
        self._known.wait()
        if self._real is None:
            raise EOFError("the connection was never made")
        return self._real

    def send_bytes(self, buf: bytes | memoryview) -> None:
        """Write one frame."""
        try:
            self._wait().send_bytes(buf)
        except EOFError as error:
            raise OSError(str(error)) from error

    def recv_bytes(self, maxlength: int | None = None) -> memoryview:
        """Read one frame.

        Raises:
            EOFError: the other side is gone, or the connection was never made.
        """
        return self._wait().recv_bytes(maxlength)

    def fileno(self) -> int:
        """Return the descriptor of the socket.

        Raises:
            OSError: there is none.
        """
        if self._real is None:
            raise OSError("the connection was never made")
        return self._real.fileno()

    def close(self) -> None:
        """Close it, or give it up. No thread may still be reading it."""
        self.give_up()
        if self._real is not None:
            self._real.close()
