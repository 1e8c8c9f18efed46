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
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_moe.modules.backends.engine_kind import EngineKind
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.process.child import Child, configuration
from torchrl_moe.modules.backends.process.packing import packed_ids
from torchrl_moe.modules.backends.ray.listener import Address, Listener
from torchrl_moe.modules.backends.ray.sealed import SealedConnection

__all__ = ["ReplicaHost", "driver_of", "named_after", "wrap"]

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


def wrap(message: tuple[Any, ...], opened: Sequence[str] = ()) -> wire.Frames:
    """Return the frames in which a driver sends a message for the engine process, unread by the actor.

    Args:
        message: for the engine process.
        opened: the ids of the requests in it.
    """
    return wire.encode((list(opened), wire.parcel(message)))


class _Driver:
    """One driver that is connected; ``open`` holds the ids of its requests in flight."""

    def __init__(self, name: str, connection: SealedConnection) -> None:
        self.outbox = wire.Outbox(connection, reader=f"driver {name}")
        self.open: set[str] = set()

    def tell(self, *message: Any) -> None:
        self.outbox.put(wire.encode(message))


class ReplicaHost:
    """One engine process and its drivers.

    Args:
        index: of the replica; names the log.
        kind: of the engine.
        arguments: of the engine, by keyword.
        environment: of the engine process.
        host: the address to listen on.
        log_folder: where the engine's log is kept; by default it is removed with the engine.
        awaits_secrets: whether the engine starts only when the first driver connects, with the secrets that it brings.
    """

    def __init__(
        self,
        index: int,
        kind: EngineKind,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        host: str,
        log_folder: Path | None = None,
        awaits_secrets: bool = False,
    ) -> None:
        self._lock = threading.Lock()
        self._drivers: dict[str, _Driver] = {}
        self._said: list[tuple[Any, ...]] = []  # what drivers that connect later must get, too
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
        """Start the engine, unless that was done, and return its process.

        Raises:
            EOFError: the host has ended.
        """
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
            self._drivers[name] = driver
            for message in self._said:
                driver.tell(*message)
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
            self._hear_of_end(child)

    def _pass_on(self, kind: str, *rest: Any) -> None:
        """Pass a message of the engine process to the drivers that it concerns."""
        with self._lock:
            if kind in ENDS:
                self._announce("tail", self.log_tail())
            if kind in ("ready", *ENDS):
                self._announce(kind, *rest)
                return
            for name in self._concerned(kind, rest[0]) & self._drivers.keys():
                self._drivers[name].tell(kind, *rest)

    def _concerned(self, kind: str, what: Any) -> set[str]:
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

    def _announce(self, *message: Any) -> None:
        """Send a message to all drivers, later ones included."""
        self._said.append(message)
        for driver in self._drivers.values():
            driver.tell(*message)

    def _is_over(self) -> bool:
        return any(message[0] in ENDS for message in self._said)

    def _hear_of_end(self, child: Child) -> None:
        """Tell the drivers, unless the engine process did; then hang up."""
        with self._lock:
            if not self._is_over():
                self._announce("tail", self.log_tail())
                self._announce("died", f"its engine process ended with exit code {child.process.poll()}")
            drivers = list(self._drivers.values())
            died = self._said[0][0] == "ready" and ("ended",) not in self._said
        for driver in drivers:
            driver.outbox.close()
        if died:
            self._engine_died()
