"""What an actor does: it runs one engine process, and passes messages between that and any number of drivers.

Requests and calls carry the name of the driver that they came from, so a message from the engine finds its way back.
Their content is not decoded here: the actor imports neither an engine nor torch, and needs little memory. A driver
whose socket ends has its requests aborted, and so has one that does not read what it is sent: its outbox hangs up. The
engine runs for as long as the actor does.

A driver sends its name and its secrets, then what :func:`wrap` makes of its messages. It receives the messages of the
engine process, see ``process/engine_program.py``; before the last one ``("tail", text)``, the end of the log; and
``("ended",)`` if another driver shut the replica down.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from torchrl_moe.modules.backends.engine_kind import EngineKind
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.process.child import Child, configuration
from torchrl_moe.modules.backends.process.wire import MOST_FRAME_BYTES, packed_ids

__all__ = [
    "Address",
    "LateConnection",
    "Listener",
    "ReplicaHost",
    "SealedConnection",
    "TamperedError",
    "dial",
    "driver_of",
    "named_after",
    "wrap",
]


# A connection that authenticates every frame: its sender, its content and its place in the order.
#
# Both sides draw a nonce. From both nonces and the key they share, each derives a key per direction, so no frame of
# another connection, or of the other direction, passes here. A frame is its length, its bytes, and the HMAC-SHA256 of
# its number, its length and its bytes. Frames are authenticated, not encrypted.


LOG = logging.getLogger(__name__)
NONCE_BYTES = 32
NUMBER_BYTES = 8
CHUNK_BYTES = 1 << 18  # that are sent before they go into the MAC, so that the other side can start on them
TAG_BYTES = hashlib.sha256().digest_size
ACTOR, DRIVER = b"actor", b"driver"


class TamperedError(OSError):
    """A frame failed authentication, or is too large; the connection is closed."""


class SealedConnection:
    """One end of such a connection; one thread may write while another reads."""

    def __init__(self, end: socket.socket, key: bytes, is_actor: bool) -> None:
        self._end = end
        mine, theirs = (ACTOR, DRIVER) if is_actor else (DRIVER, ACTOR)
        nonce = secrets.token_bytes(NONCE_BYTES)
        end.sendall(nonce)
        other = self._read(NONCE_BYTES).tobytes()
        nonces = nonce + other if is_actor else other + nonce
        session = hmac.digest(key, b"torchrl_moe" + nonces, "sha256")
        self._sealing = hmac.new(hmac.digest(session, mine, "sha256"), digestmod="sha256")
        self._proving = hmac.new(hmac.digest(session, theirs, "sha256"), digestmod="sha256")
        self._sent = self._received = 0
        self.send_bytes(mine)
        try:
            self.recv_bytes(len(theirs))
        except TamperedError as error:
            raise AuthenticationError("the other side has another key") from error
        end.settimeout(None)

    def send_bytes(self, buf: bytes | memoryview) -> None:
        """Write one frame."""
        length = len(buf).to_bytes(NUMBER_BYTES, "big")
        mac = _begun(self._sealing, self._sent, length)
        self._sent += 1
        if len(buf) <= CHUNK_BYTES:
            mac.update(buf)
            self._end.sendall(b"".join((length, buf, mac.digest())))
            return
        self._end.sendall(length)
        whole = memoryview(buf)
        for start in range(0, len(buf), CHUNK_BYTES):
            chunk = whole[start : start + CHUNK_BYTES]
            self._end.sendall(chunk)
            mac.update(chunk)
        self._end.sendall(mac.digest())

    def recv_bytes(self, maxlength: int | None = None) -> memoryview:
        """Read one frame."""
        most = MOST_FRAME_BYTES if maxlength is None else maxlength
        header = self._read(NUMBER_BYTES).tobytes()
        length = int.from_bytes(header, "big")
        if length > most:
            raise self._given_up(f"a frame of {length} bytes was announced; at most {most} are allowed")
        mac = _begun(self._proving, self._received, header)
        body = self._read(length, mac)
        if not hmac.compare_digest(mac.digest(), self._read(TAG_BYTES)):
            raise self._given_up("a frame failed authentication")
        self._received += 1
        return body

    def _given_up(self, reason: str) -> TamperedError:
        LOG.warning("the connection with %s is given up: %s", self._end.getpeername(), reason)
        return TamperedError(reason)

    def _read(self, size: int, mac: hmac.HMAC | None = None) -> memoryview:
        """Read ``size`` bytes, and update a MAC with them on the way."""
        view = np.empty(size, np.uint8).data
        done = 0
        while done < size:
            count = self._end.recv_into(view[done : done + CHUNK_BYTES])
            if not count:
                raise EOFError
            if mac is not None:
                mac.update(view[done : done + count])
            done += count
        return view

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._end.fileno()

    def close(self) -> None:
        """Close it."""
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _begun(keyed: hmac.HMAC, number: int, length: bytes) -> hmac.HMAC:
    """Return the MAC of a frame, begun with its number and its length."""
    mac = keyed.copy()
    mac.update(number.to_bytes(NUMBER_BYTES, "big") + length)
    return mac


# The socket between a driver and an actor: the actor listens, drivers connect, and both authenticate before they
# talk.
#
# Ray carries the address and a key. Both sides prove that they have the key before anything else is read, and again
# with each frame. This is a socket, and not actor calls: an actor call costs a millisecond each way, calls have no
# order, and the end of a socket shows at once that the other side is gone.


DIAL_SECONDS = 20
MOST_PENDING = 32
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
    """Accepts drivers, each in its own thread."""

    def __init__(self, host: str, welcome: Callable[[SealedConnection], None]) -> None:
        self._welcome = welcome
        self._closed = threading.Event()
        self._pending: deque[socket.socket] = deque()
        self._socket = socket.create_server((host, 0))
        self.address = Address(host=host, port=self._socket.getsockname()[1], key=secrets.token_bytes(32))
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                caller, _ = self._socket.accept()
            except OSError:  # closed; or the caller has left, or there are too many open files just now
                self._closed.wait(RETRY_SECONDS)
            else:
                # a caller without a key holds a thread: of too many the first goes, so that a driver always comes in
                self._pending.append(caller)
                if len(self._pending) > MOST_PENDING:
                    with contextlib.suppress(OSError, IndexError):  # it has just left, or come in
                        self._pending.popleft().shutdown(socket.SHUT_RDWR)
                threading.Thread(target=self._authenticate, args=(caller,), name="driver", daemon=True).start()

    def _authenticate(self, caller: socket.socket) -> None:
        with contextlib.suppress(AuthenticationError, EOFError, OSError), contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(_prove(caller, self.address.key, is_actor=True))
            finally:
                with contextlib.suppress(ValueError):  # it was sent away
                    self._pending.remove(caller)
            self._welcome(connection)

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would continue waiting
        self._socket.close()


def dial(address: Address) -> SealedConnection:
    """Return a connection to an actor's listener."""
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
        """Read one frame."""
        return self._wait().recv_bytes(maxlength)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        if self._real is None:
            raise OSError("the connection was never made")
        return self._real.fileno()

    def close(self) -> None:
        """Close it, or give it up. No thread may still be reading it."""
        self.give_up()
        if self._real is not None:
            self._real.close()


SEPARATOR = "/"
ENDS = ("failed", "died")


def named_after(driver: str, request_id: str) -> str:
    """Return a request id that no other driver uses.

    >>> named_after("d1", "a/b"), driver_of("d1/a/b")
    ('d1/a/b', ('d1', 'a/b'))
    """
    return f"{driver}{SEPARATOR}{request_id}"


def driver_of(request_id: str) -> tuple[str, str]:
    """Undo :func:`named_after`."""
    driver, _, own = request_id.partition(SEPARATOR)
    return driver, own


def wrap(message: tuple[object, ...], opened: Sequence[str] = ()) -> wire.Frames:
    """Return the frames in which a driver sends a message for the engine process, unread by the actor."""
    return wire.encode((list(opened), wire.payload(message)))


class _Driver:
    """One driver that is connected; ``open`` holds the ids of its requests in flight."""

    def __init__(self, name: str, connection: SealedConnection) -> None:
        self.outbox = wire.Outbox(connection, reader=f"driver {name}")
        self.open: set[str] = set()

    def send(self, *message: object) -> None:
        self.outbox.put(wire.encode(message))


class ReplicaHost:
    """One engine process and its drivers."""

    def __init__(
        self,
        index: int,
        kind: EngineKind,
        arguments: Mapping[str, object],
        environment: Mapping[str, str],
        host: str,
        log_folder: Path | None = None,
        awaits_secrets: bool = False,
    ) -> None:
        self._lock = threading.Lock()
        self._drivers: dict[str, _Driver] = {}
        self._announced: list[tuple[object, ...]] = []  # what drivers that connect later must get, too
        self._configure = configuration(arguments)
        self._make_child = partial(Child, index, kind, log_folder=log_folder, fork=False)
        self._environment = dict(environment)
        self._child: Child | None = None
        self._starting = threading.RLock()  # held while the engine is started, or the host ended
        self._ended = False
        self._listener = Listener(host, self._serve)
        if not awaits_secrets:
            self._start({})

    def _start(self, secrets: Mapping[str, str]) -> Child:
        """Start the engine, unless that was done, and return its process."""
        with self._starting:
            if self._child is None:
                if self._ended:
                    raise EOFError("the host has ended")
                self._child = self._make_child({**self._environment, **secrets})
                self._child.outbox.put(self._configure)
                threading.Thread(target=self._read_engine, args=(self._child,), name="engine", daemon=True).start()
            return self._child

    def address(self) -> Address:
        """Return where drivers find the host."""
        return self._listener.address

    def log_tail(self) -> str:
        """Return the last errors of the engine process, or its last lines."""
        return "(its engine waits for a driver)" if self._child is None else self._child.log_tail()

    def end(self) -> None:
        """End the engine process and everything it started. Idempotent."""
        with self._starting:
            self._ended = True
        if self._child is not None:
            self._child.end_and_forget()
        self._listener.close()

    def shut_down(self) -> None:
        """:meth:`end` on purpose: connected drivers are notified, so that none restarts the replica."""
        with self._lock:
            self._announce("ended")
        self.end()

    def _engine_died(self) -> None:
        """Called when an engine that had served has ended by itself, after all drivers were notified."""

    # -- drivers ----------------------------------------------------------------------------------------------------

    def _serve(self, connection: SealedConnection) -> None:
        """Pass on a driver's messages until it is gone."""
        name, secrets = wire.receive(connection)
        child = self._start(secrets)
        driver = _Driver(name, connection)
        with self._lock:
            # a driver that comes late gets what was announced to all: ready, or how it ended
            self._drivers[name] = driver
            for message in self._announced:
                driver.send(*message)
            if self._is_over():
                driver.outbox.finish()
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    ids, frames = wire.receive(connection)
                    with self._lock:
                        driver.open.update(ids)
                    child.outbox.put([memoryview(frame) for frame in frames])
        finally:
            self._part_with(child, name)

    def _part_with(self, child: Child, name: str) -> None:
        with self._lock:
            driver = self._drivers.pop(name)
        # nobody would take these answers any more
        if driver.open:
            child.outbox.put(wire.encode(("abort", sorted(driver.open))))
        child.outbox.put(wire.encode(("left", name)))  # it may have owned the engine's weights
        driver.outbox.close()

    # -- the engine -------------------------------------------------------------------------------------------------

    def _read_engine(self, child: Child) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._pass_on(*wire.receive(child.connection))
        finally:
            child.end()
            self._report_end(child)

    def _pass_on(self, kind: str, *rest: Any) -> None:
        """Pass a message of the engine process to the drivers that it concerns."""
        with self._lock:
            if kind in ENDS:
                self._announce("tail", self.log_tail())
            if kind in ("ready", *ENDS):
                self._announce(kind, *rest)
                return
            for name in self._recipients(kind, rest[0]) & self._drivers.keys():
                self._drivers[name].send(kind, *rest)

    def _recipients(self, kind: str, what: Any) -> set[str]:
        if kind == "completions":
            return self._over(packed_ids(what))
        if kind == "refused":
            return self._over([what])
        if kind in ("result", "error"):
            return {what[0]}  # the number of a call is a pair, of which this is the driver
        return set(self._drivers)

    def _over(self, ids: list[str]) -> set[str]:
        """Note that requests are over, and return whose they were."""
        names = {driver_of(request_id)[0] for request_id in ids}
        for name in names & self._drivers.keys():
            self._drivers[name].open.difference_update(ids)
        return names

    def _announce(self, *message: object) -> None:
        """Send a message to all drivers, later ones included."""
        self._announced.append(message)
        for driver in self._drivers.values():
            driver.send(*message)

    def _is_over(self) -> bool:
        return any(message[0] in ENDS for message in self._announced)

    def _report_end(self, child: Child) -> None:
        """Report the end to the drivers, unless the engine process did; then hang up."""
        with self._lock:
            if not self._is_over():
                self._announce("tail", self.log_tail())
                self._announce("died", f"its engine process ended with exit code {child.process.poll()}")
            drivers = list(self._drivers.values())
            died = self._announced[0][0] == "ready" and ("ended",) not in self._announced
        for driver in drivers:
            driver.outbox.close()
        if died:
            self._engine_died()
