"""The socket between a driver and an actor: opened by the actor, dialled by drivers, and never before both are known.

Ray carries the address and a key; both sides prove that they have the key before anything is unpickled. A socket and
not actor calls: an actor call costs a millisecond each way and has no order, and the end of a socket tells at once
that the other side is gone.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

__all__ = ["Address", "Door", "LateConnection", "dial"]

DIAL_SECONDS = 20.0
# a machine that is switched off says nothing: asked after 10 s of silence, then every 5 s, it is gone after the third
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an actor listens, and the key that lets a driver in."""

    host: str
    port: int
    key: bytes


class Door:
    """Lets drivers in, each in a thread of its own.

    Args:
        host: the address to listen on.
        welcome: takes the connection of a driver that has the key, and stays for as long as it does.
    """

    def __init__(self, host: str, welcome: Callable[[Connection], None]) -> None:
        self._welcome = welcome
        self._socket = socket.create_server((host, 0))
        self.address = Address(host=host, port=self._socket.getsockname()[1], key=secrets.token_bytes(32))
        threading.Thread(target=self._listen, name="door", daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                visitor, _ = self._socket.accept()
                threading.Thread(target=self._let_in, args=(visitor,), name="driver", daemon=True).start()

    def _let_in(self, visitor: socket.socket) -> None:
        _tune(visitor)
        with contextlib.suppress(AuthenticationError, EOFError, OSError):
            visitor.settimeout(None)
            connection = Connection(visitor.detach())
            with connection:
                deliver_challenge(connection, self.address.key)
                answer_challenge(connection, self.address.key)
                self._welcome(connection)

    def close(self) -> None:
        """Let nobody in any more; who is in stays."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would go on waiting
        self._socket.close()


def dial(address: Address) -> Connection:
    """Return a connection to an actor's door.

    Raises:
        OSError: nobody is there.
        EOFError: it was closed at once.
        AuthenticationError: whoever is there has another key.
    """
    caller = socket.create_connection((address.host, address.port), DIAL_SECONDS)
    caller.settimeout(None)
    _tune(caller)
    connection = Connection(caller.detach())
    try:
        answer_challenge(connection, address.key)
        deliver_challenge(connection, address.key)
    except BaseException:
        connection.close()
        raise
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
        self._real: Connection | None = None

    def become(self, real: Connection) -> None:
        """Take the connection, or close it if this one was given up."""
        with self._lock:
            if self._known.is_set():
                real.close()
            self._real = real
            self._known.set()

    def give_up(self) -> None:
        """Say that there will be none; nothing if there is one."""
        with self._lock:
            self._known.set()

    def _wait(self) -> Connection:
        self._known.wait()
        if self._real is None:
            raise EOFError("the connection never came about")
        return self._real

    def send_bytes(self, buf: bytes | memoryview) -> None:
        """Write one frame."""
        try:
            self._wait().send_bytes(buf)
        except EOFError as error:
            raise OSError(str(error)) from error

    def recv_bytes(self) -> bytes:
        """Read one frame.

        Raises:
            EOFError: the other side is gone, or never came.
        """
        return self._wait().recv_bytes()

    def fileno(self) -> int:
        """Return the descriptor of the socket.

        Raises:
            OSError: there is none.
        """
        if self._real is None:
            raise OSError("the connection never came about")
        return self._real.fileno()

    def close(self) -> None:
        """Close it, or give it up. Nobody may be reading it any more."""
        self.give_up()
        if self._real is not None:
            self._real.close()
