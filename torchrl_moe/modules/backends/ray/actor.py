"""An actor runs one engine process, and passes messages between that and any number of drivers.

A message's head names the driver that it comes from or goes to; its body is not decoded here: the actor imports neither
an engine nor torch, and needs little memory. A driver whose socket ends is gone for the engine, which aborts its
requests; so is one that does not read what it is sent: its outbox hangs up. The engine runs for as long as the actor.

A driver first sends ``hello`` with its secrets, then the messages of ``process/engine_program.py``. Besides the
engine's, it receives ``tail``, the end of the log, before the last one; and ``ended`` if another driver shut the
replica down.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from torchrl_moe.modules.backends.engine_kind import EngineKind, find_kind
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.link import MOST_BYTES, SocketStream
from torchrl_moe.modules.backends.process.process_replica import Child, configuration
from torchrl_moe.modules.backends.ray.cluster import RayService

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# -- a connection that authenticates every message: its sender, its content and its place in the order -----------------
# Both sides draw a nonce. From both nonces and the key they share, each derives a key per direction, so no message of
# another connection, or of the other direction, passes here. A message ends with the HMAC-SHA256 of its number and of
# all its bytes, their lengths included. Messages are authenticated, not encrypted.


LOG = logging.getLogger(__name__)
NONCE_BYTES = 32
NUMBER_BYTES = 8
TAG_BYTES = hashlib.sha256().digest_size
ACTOR, DRIVER = b"actor", b"driver"


class TamperedError(OSError):
    """A message failed authentication, or is too large; the connection is closed."""


class SealedStream(SocketStream):
    """One end of such a connection."""

    def __init__(self, end: socket.socket, key: bytes, is_actor: bool) -> None:
        super().__init__(end)
        mine, theirs = (ACTOR, DRIVER) if is_actor else (DRIVER, ACTOR)
        nonce = secrets.token_bytes(NONCE_BYTES)
        end.sendall(nonce)
        other = self._take(NONCE_BYTES).tobytes()
        nonces = nonce + other if is_actor else other + nonce
        session = hmac.digest(key, b"torchrl_moe" + nonces, "sha256")
        self._sealing = hmac.new(hmac.digest(session, mine, "sha256"), digestmod="sha256")
        self._proving = hmac.new(hmac.digest(session, theirs, "sha256"), digestmod="sha256")
        self._sent = self._received = 0
        self._most = len(theirs)
        self.send([mine])
        try:
            self.receive()
        except TamperedError as error:
            raise AuthenticationError("the other side has another key") from error
        self._most = MOST_BYTES
        end.settimeout(None)

    def send(self, frames: Sequence[link.Buffer]) -> None:
        views = link.framed(frames)
        self._write([*views, memoryview(_tag(self._sealing, self._sent, views))])
        self._sent += 1

    def receive(self) -> list[memoryview]:
        frames = super().receive()
        tag = _tag(self._proving, self._received, link.framed(frames))
        if not hmac.compare_digest(tag, self._take(TAG_BYTES)):
            raise self._given_up("a message failed authentication")
        self._received += 1
        return frames

    def _check(self, announced: int, most: int, what: str) -> None:
        if announced > min(most, self._most):
            raise self._given_up(f"a message of {announced} {what} was announced; at most {most} are allowed")

    def _given_up(self, reason: str) -> TamperedError:
        LOG.warning("the connection with %s is given up: %s", self._end.getpeername(), reason)
        return TamperedError(reason)


def _tag(keyed: hmac.HMAC, number: int, views: Sequence[memoryview]) -> bytes:
    """Return the MAC of a message."""
    mac = keyed.copy()
    mac.update(number.to_bytes(NUMBER_BYTES, "big"))
    for view in views:
        mac.update(view)
    return mac.digest()


# -- the socket between a driver and an actor --------------------------------------------------------------------------
# The actor listens, drivers connect, and both authenticate before they talk: Ray carries the address and a key. Both
# sides prove that they have the key before anything else is read, and again with each frame. This is a socket, and not
# actor calls: an actor call costs a millisecond each way, calls have no order, and the end of a socket shows at once
# that the other side is gone.


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

    def __init__(self, host: str, welcome: Callable[[SealedStream], None]) -> None:
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
                connection = _prove(caller, self.address.key, is_actor=True)
                stack.callback(connection.close)
            finally:
                with contextlib.suppress(ValueError):  # it was sent away
                    self._pending.remove(caller)
            self._welcome(connection)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would continue waiting
        self._socket.close()


def dial(address: Address) -> SealedStream:
    """Return a connection to an actor's listener."""
    caller = socket.create_connection((address.host, address.port), DIAL_SECONDS)
    return _prove(caller, address.key, is_actor=False)


def _prove(end: socket.socket, key: bytes, is_actor: bool) -> SealedStream:
    """Return the connection of a socket, once each side has shown that it has the key."""
    with contextlib.ExitStack() as on_failure:
        on_failure.enter_context(end)
        _tune(end)
        end.settimeout(DIAL_SECONDS)
        try:
            connection = SealedStream(end, key, is_actor)
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


class LateStream:
    """A connection that may be used before it exists: readers and writers wait until it does, or never will."""

    def __init__(self) -> None:
        self._real: Future[SealedStream | None] = Future()  # None: there will be none
        self._moved_at = time.monotonic()

    def become(self, real: SealedStream) -> None:
        """Take the connection, or close it if this one was given up."""
        try:
            self._real.set_result(real)
        except InvalidStateError:
            real.close()

    def give_up(self) -> None:
        """Declare that there will be none; does nothing if there is one."""
        with contextlib.suppress(InvalidStateError):
            self._real.set_result(None)

    def _wait(self) -> SealedStream:
        if (real := self._real.result()) is None:
            # one for each reader: kept in the future, it would keep their frames, and so the replica
            raise EOFError("the connection was never made")
        return real

    def _made(self) -> SealedStream | None:
        return self._real.result() if self._real.done() else None

    def send(self, frames: Sequence[link.Buffer]) -> None:
        try:
            self._wait().send(frames)
        except EOFError as error:
            raise OSError(str(error)) from error

    def receive(self) -> list[memoryview]:
        return self._wait().receive()

    @property
    def moved_at(self) -> float:
        real = self._made()
        return self._moved_at if real is None else max(self._moved_at, real.moved_at)

    @moved_at.setter
    def moved_at(self, value: float) -> None:
        self._moved_at = value

    def hang_up(self) -> None:
        """End the traffic both ways, or give it up."""
        self.give_up()
        if (real := self._made()) is not None:
            real.hang_up()

    def close(self) -> None:
        """Close it, or give it up. No thread may still be reading it."""
        self.give_up()
        if (real := self._made()) is not None:
            real.close()


# -- one engine and its drivers ----------------------------------------------------------------------------------------

ENDS = ("failed", "died")
OF_DRIVERS = ("generate", "abort", "call")  # what a driver may send to the engine


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
        self._drivers: dict[str, link.Outbox] = {}
        self._announced: list[tuple[str, link.Frames]] = []  # what drivers that connect later must get, too
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
        return self._listener.address

    def log_tail(self) -> str:
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
            self._announce("ended", link.message("ended"))
        self.end()

    def _engine_died(self) -> None:
        """Called when an engine that had served has ended by itself, after all drivers were notified."""

    # -- drivers ----------------------------------------------------------------------------------------------------

    def _serve(self, stream: SealedStream) -> None:
        """Pass on a driver's messages until it is gone."""
        _, name, secrets = link.read(stream)
        child = self._start(secrets)
        outbox = link.Outbox(stream, reader=f"driver {name}")
        with self._lock:
            # a driver that comes late gets what was announced to all: ready, or how it ended
            self._drivers[name] = outbox
            for _, frames in self._announced:
                outbox.put(frames)
            if self._is_over():
                outbox.finish()
        try:
            with contextlib.suppress(EOFError, OSError, ValueError):
                while True:
                    head, *body = stream.receive()
                    kind, _ = link.head_of([head])
                    if kind in OF_DRIVERS:  # and whatever name it gives, the message is its own
                        child.outbox.put([*link.message(kind, driver=name)[:1], *body])
        finally:
            with self._lock:
                del self._drivers[name]
            child.outbox.put(link.message("left", driver=name))
            outbox.close()

    # -- the engine -------------------------------------------------------------------------------------------------

    def _read_engine(self, child: Child) -> None:
        try:
            with contextlib.suppress(EOFError, OSError, ValueError):
                while True:
                    self._pass_on(child.stream.receive())
        finally:
            child.end()
            child.stream.close()
            self._report_end(child)

    def _pass_on(self, frames: list[memoryview]) -> None:
        """Pass a message of the engine process to the driver that it names, or to all."""
        kind, name = link.head_of(frames)
        with self._lock:
            if kind in ENDS and not name:
                self._announce("tail", link.message("tail", self.log_tail()))
            if kind in ("ready", *ENDS) and not name:
                self._announce(kind, list(frames))
                return
            for driver in self._drivers.values() if not name else filter(None, [self._drivers.get(name)]):
                driver.put(list(frames))

    def _announce(self, kind: str, frames: link.Frames) -> None:
        """Send a message to all drivers, later ones included."""
        self._announced.append((kind, frames))
        for driver in self._drivers.values():
            driver.put(frames)

    def _is_over(self) -> bool:
        return any(kind in ENDS for kind, _ in self._announced)

    def _report_end(self, child: Child) -> None:
        """Report the end to the drivers, unless the engine process did; then hang up."""
        with self._lock:
            if not self._is_over():
                self._announce("tail", link.message("tail", self.log_tail()))
                ending = f"its engine process ended with exit code {child.process.poll()}"
                self._announce("died", link.message("died", ending))
            drivers = list(self._drivers.values())
            kinds = [kind for kind, _ in self._announced]
            died = kinds[0] == "ready" and "ended" not in kinds
        for driver in drivers:
            driver.close()
        if died:
            self._engine_died()


# -- in Ray ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """An actor's description of itself: where it listens, its placement group, the service that it belongs to."""

    address: Address
    group: PlacementGroup
    service: RayService


def actor_environment(service: RayService, forwarded: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine process in an actor: the node's, then the driver's settings.

    Without GPUs, it has one thread for each CPU that Ray reserved.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "") if service.resources.get("GPU") else None
    kind = find_kind(service.kind)
    environment = {**kind.engine_environment(devices, verbose=service.verbose), **forwarded}
    if devices is None:
        environment["OMP_NUM_THREADS"] = str(max(int(service.resources.get("CPU", 1)), 1))
    return environment


class ReplicaActor(ReplicaHost):
    """A host on a node that Ray chose, with the devices that Ray gave it."""

    def __init__(
        self,
        index: int,
        service: RayService,
        forwarded: Mapping[str, str],
        group: PlacementGroup,
        number: int,
        awaits_secrets: bool = False,
    ) -> None:
        self._group = group
        self._service = service
        environment = actor_environment(service, forwarded)
        folder = None if service.log_folder is None else Path(service.log_folder)
        # a restarted engine must not draw the random numbers of the first one again
        if ray.get_runtime_context().was_current_actor_reconstructed:
            number += secrets.randbelow(1 << 20)
        kind = find_kind(service.kind)
        arguments = kind.seeded(service.arguments, number)
        super().__init__(index, kind, arguments, environment, ray.util.get_node_ip_address(), folder, awaits_secrets)

    def describe(self) -> Description:
        """Return what a driver must know."""
        return Description(address=self.address(), group=self._group, service=self._service)

    def _engine_died(self) -> None:
        """End this actor if its service outlives its drivers; Ray then restarts it."""
        if self._service.detached:
            self.end()
            os._exit(1)
