"""A service that other drivers can connect to, if it is in a Ray cluster: by its name, or by a pickled engine."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from torchrl_moe._errors import EngineError, NoReplicaError, ReplicaDiedError
from torchrl_moe.modules.serving.engine_interface import EngineInterface
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.fleet import CALL_SECONDS
from torchrl_moe.modules.serving.launch import (
    TIMEOUT_VARIABLE,
    EngineArguments,
    ReplicaFactory,
    default_timeout,
    ray_factory,
)
from torchrl_moe.modules.serving.replica_table import TableEntry
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["SharedService"]


_ENTERING = threading.RLock()
"""Held while a pickled engine connects to its service, on first use."""


class SharedService(EngineInterface):
    """A service of engines of one kind, local or in a Ray cluster.

    Args:
        engine_args: of the engines, by keyword.
        num_replicas: how many at the start.
        make_replica: makes a replica, or connects to a running one.
        service: its :class:`RayService`; ``None``: its replicas are children of this process.
        **how: see :class:`GenerationService`.

    Attributes:
        engine_args: of the engines, by keyword.
        name: the name for :meth:`connect`; ``None`` if the service ends with the process that made it.
    """

    _is_guest = False  # whether another driver made the service

    def __init__(
        self,
        engine_args: Mapping[str, Any],
        num_replicas: int,
        make_replica: ReplicaFactory,
        service: Any = None,
        **how: Any,
    ) -> None:
        self.engine_args = EngineArguments(engine_args)
        self.name: str | None = service.name if service is not None and service.detached else None
        self._service = service
        super().__init__([make_replica(index) for index in range(num_replicas)], make_replica=make_replica, **how)

    def _wait(self, entry: TableEntry, deadline: float, seconds: float) -> None:
        """Wait for a replica."""
        try:
            self._fleet.wait_ready(entry, max(deadline - time.monotonic(), 0.0))
        except ReplicaDiedError:
            raise
        except EngineError as error:
            raise EngineError(
                f"{error}\nAll replicas together had {seconds:g} s: raise timeout_seconds, or the environment's "
                f"{TIMEOUT_VARIABLE}."
            ) from error

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        namespace: str | None = None,
        sampling_params: Any = None,
        timeout_seconds: float | None = None,
    ) -> Self:
        """Connect to a named service in the Ray cluster, from any driver; several drivers may use it at once.

        A replica with older weights than another (after a restart by Ray, say) serves here once it has the newest.
        Updates by another driver are seen within a second; each completion has the version it was made with.
        :meth:`disconnect`, the end of a ``with`` block and the end of the process leave the service running;
        :meth:`shutdown` ends it for all drivers, including replicas restarted since. The driver that made the replicas
        probes and restarts them, and Ray restarts those whose process ends. In this driver a dead replica stays dead:
        connect again.

        Args:
            name: of the service.
            namespace: of the service.
            sampling_params: the default of :meth:`generate`, of this driver.
            timeout_seconds: for all replicas, some of which may be starting; default as in :meth:`start`.

        Raises:
            EngineError: there is no Ray cluster, no such service in it (the message lists the running ones), or no
                replica answers; :class:`NoReplicaError`: all have died.
        """
        from torchrl_moe.modules.backends.ray.cluster import find_service

        engine = cls.__new__(cls)
        engine._enter(find_service(name, namespace), sampling_params, timeout_seconds)
        return engine

    def _enter(self, service: Any, sampling_params: Any, timeout_seconds: float | None = None) -> None:
        """Become an engine over the replicas of a running service; nothing is launched."""
        self._is_guest = True
        SharedService.__init__(
            self,
            service.arguments,
            service.num_replicas,
            ray_factory(service),
            service,
            sampling_params=sampling_params,
            faults=FaultPolicy(restart=False, probe=math.inf),
        )
        try:
            self._join(default_timeout() if timeout_seconds is None else timeout_seconds)
        except BaseException:
            self.disconnect()
            raise

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for entry in self.replica_table:
            entry.replica.join()
        for entry in self.replica_table:
            try:
                self._wait(entry, deadline, seconds)
                self.replica_table.set_version(entry.index, entry.replica.weights_version(CALL_SECONDS))
            except ReplicaDiedError as error:
                self.replica_table.mark_dead(entry.index, str(error))
        if all(entry.state is ReplicaState.DEAD for entry in self.replica_table):
            raise NoReplicaError(
                f"service {self._service.name!r}: no replica is alive. {self.replica_table[0].last_error}"
            )
        self._fleet.supervise()
        for entry in self.replica_table:
            if entry.state is not ReplicaState.DEAD:
                self._fleet.serve(entry)
        self._running = True

    def add_replicas(self, count: int = 1, *, timeout_seconds: float | None = None) -> list[int]:
        """Start more replicas; see :meth:`GenerationService.add_replicas`. A named service cannot have more.

        Raises:
            ValueError: less than one, there are no GPUs left for them, or the service has a name.
            EngineError: one did not start, or not in time; then none is added.
        """
        if self.name is not None or self._is_guest:
            raise ValueError("add_replicas: other drivers of a service with a name would not learn of new replicas")
        return super().add_replicas(
            count, timeout_seconds=default_timeout() if timeout_seconds is None else timeout_seconds
        )

    @staticmethod
    def shutdown_service(name: str, *, namespace: str | None = None) -> None:
        """End a service in Ray for all its drivers, or clean up after a killed one; ``EngineError`` without one."""
        from torchrl_moe.modules.backends.ray.cluster import end_service

        end_service(name, namespace)

    def disconnect(self) -> None:
        """Disconnect from a named or connected service; it keeps running. Idempotent.

        This driver's requests are aborted.

        Raises:
            RuntimeError: the service has no name, and ends with this process.
        """
        if "_later" in vars(self):  # not connected yet
            return
        if self.name is None and not self._is_guest:
            raise RuntimeError("disconnect: this service ends with its driver: use shutdown(), or launch it by name")
        self._running = False
        self._dispatcher.close("this driver disconnected from the service")
        self._fleet.end(lambda replica: replica.disconnect())
        self._dispatcher.stop()

    def get_master_address(self) -> str:
        """Return the address for your own process group: this node's address in Ray."""
        if self._service is None:
            return super().get_master_address()
        from torchrl_moe.modules.backends.ray.cluster import own_address

        return own_address()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a handle: in another process of the same Ray cluster, it connects to the service on first use.

        It keeps the default sampling parameters, and has its own balancer and limits.

        Raises:
            TypeError: the replicas are children of this process, which no other process can reach.
            RuntimeError: the service is not running.
        """
        if self._service is None:
            return super().__reduce__()
        self._check_running("pickle")
        return _handle, (type(self), self._service, self.sampling_params)

    def __getattr__(self, name: str) -> Any:
        """Connect, if this was unpickled and is used for the first time: then it has no attributes yet.

        Not while unpickling: Ray then holds a lock that its other threads need to answer.
        """
        with _ENTERING:
            later = vars(self).pop("_later", None)
            if later is not None:
                self._enter(*later)
        return object.__getattribute__(self, name)

    def _check_running(self, what: str) -> None:
        if self._is_guest and not self._running:
            with _ENTERING:  # another thread may be connecting
                pass
        super()._check_running(what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.disconnect if self._is_guest else self.shutdown)()


def _handle(kind: type[SharedService], *later: Any) -> SharedService:
    engine = kind.__new__(kind)
    vars(engine).update(_later=later, _is_guest=True)
    return engine
