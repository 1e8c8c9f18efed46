"""``AsyncVLLM``: the generation service over vLLM replicas, under the names that TorchRL gives it; other engines too.

The replicas are child processes of the driver, or actors of a Ray cluster. They end with the driver, except those of a
named service in Ray. Route capture is on if and only if the model has experts; log-probs are those of the distribution
that was sampled from; prefix caching is on.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from tqdm.auto import tqdm

from torchrl_moe._checks import check_bool, check_number, shown
from torchrl_moe.errors import EngineError, NoReplicaError, ReplicaDiedError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.engine_kind import engine_kind
from torchrl_moe.modules.serving.fleet import CALL_SECONDS
from torchrl_moe.modules.serving.launch import (
    TIMEOUT_VARIABLE,
    Devices,
    EngineArguments,
    EngineName,
    ReplicaFactory,
    check_backend,
    default_timeout,
    local_factory,
    pretrained_arguments,
    ray_factory,
    ray_service,
)
from torchrl_moe.modules.serving.replica_table import FaultPolicy, ReplicaState, TableEntry
from torchrl_moe.modules.serving.requests import SamplingParams, check_service
from torchrl_moe.modules.serving.service import GenerationService

if TYPE_CHECKING:
    import vllm


_ENTERING = threading.RLock()
"""Held while a pickled engine connects to its service, on first use."""


class AsyncVLLM(GenerationService):
    """vLLM replicas behind one ``generate``.

    Args:
        engine_args: ``vllm.AsyncEngineArgs`` or a mapping of its fields; it names the model.
        num_replicas: how many engines, each with its own weights.
        actor_class: must be ``None``; ``backend`` says where replicas run.
        enable_prefix_caching: overrides the engine argument of that name; default: on.
        engine: ``"vllm"``, or ``"transformers"``: slow, on one device, for use where vLLM is not available; or the name
            of a module that is an engine of yours (docs/engines.md).
        backend: ``"local"``: child processes of this one, without Ray; each has its own set of GPUs. ``"ray"``: actors
            on any node of the Ray cluster that this process is connected to or finds; else one is started.
        sampling_params: of calls of :meth:`generate` that pass none, which replace it and are not merged with it; by
            default vLLM's own defaults, with log-probs.
        verbose: whether vLLM logs its start-up and throughput, into the replica's log.
        max_concurrent_requests: how many requests the engines run at a time; the others wait in the service, by
            priority and order of arrival. ``"auto"``: 1024 for each replica. ``None``: no limit.
        faults: when replicas are restarted, and how often; see :class:`FaultPolicy`.
        metrics: whether :attr:`metrics` counts requests.
        log_folder: where logs are kept, as ``replica-<index>.log``; use one folder per service. By default each log is
            deleted with its replica.
        name: in Ray: makes the service outlive this process, for :meth:`connect`. Without a name it ends with this
            process.
        namespace: in Ray: of the name; default ``"torchrl_moe"``.
        resources: in Ray: what a replica needs on one node; default: per device one CPU, and one GPU if the cluster has
            any.
        devices: of local replicas: one entry for each, its GPU or a list of them, by this process's own numbers
            (``[[1], [2]]``, ``["cuda:1", "cuda:2"]``) or their names; by default the GPUs that neither this process
            nor another rank of its launcher computes on. To share the trainer's GPU, name it.

    Attributes:
        engine_args: of the engines, by keyword.
        name: the name for :meth:`connect`; ``None`` if the service ends with this process.

    Example::

        with AsyncVLLM.from_pretrained("path/to/model", num_replicas=2) as engine:
            completion = engine.generate("Hello", {"max_tokens": 16, "logprobs": 0})
            completion.outputs[0].routed_experts.shape  # [P + G - 1, L, K]
    """

    _is_guest = False  # whether another driver made the service

    def __init__(
        self,
        engine_args: Mapping[str, object] | vllm.AsyncEngineArgs,
        num_replicas: int = 1,
        actor_class: None = None,
        enable_prefix_caching: bool | None = None,
        *,
        engine: EngineName = "vllm",
        backend: Literal["local", "ray"] = "local",
        sampling_params: SamplingParams | None = None,
        verbose: bool = False,
        max_concurrent_requests: int | Literal["auto"] | None = "auto",
        faults: FaultPolicy | None = None,
        metrics: bool = True,
        log_folder: str | os.PathLike[str] | None = None,
        name: str | None = None,
        namespace: str | None = None,
        resources: Mapping[str, float] | None = None,
        devices: Devices | None = None,
    ) -> None:
        check_service(sampling_params, metrics, max_concurrent_requests, faults)
        check_bool("verbose", verbose)
        if not isinstance(log_folder, str | os.PathLike | None):
            raise ValueError(f"log_folder must be a path, or None, got {shown(log_folder)}.")
        kind = engine_kind(engine)
        of_ray: dict[str, Any] = {"name": name, "namespace": namespace, "resources": resources}
        check_backend(backend, num_replicas, devices, actor_class, **of_ray)
        arguments = kind.arguments_of(engine_args)
        if enable_prefix_caching is not None:
            check_bool("enable_prefix_caching", enable_prefix_caching)
            arguments = kind.arguments_of({**arguments, "enable_prefix_caching": enable_prefix_caching})

        service = None
        if backend == "ray":
            service = ray_service(kind, arguments, num_replicas, verbose=verbose, log_folder=log_folder, **of_ray)
            make_replica = ray_factory(service)
        else:
            make_replica = local_factory(
                kind,
                arguments,
                num_replicas,
                verbose,
                log_folder,
                lambda: [entry.index for entry in self.replica_table],
                devices,
            )
        self._set_up(
            arguments,
            num_replicas,
            make_replica,
            service,
            sampling_params=sampling_params,
            metrics=metrics,
            max_concurrent_requests=max_concurrent_requests,
            faults=faults,
        )

    def _set_up(
        self,
        engine_args: Mapping[str, object],
        num_replicas: int,
        make_replica: ReplicaFactory,
        service: Any,  # in Ray
        **how: Any,
    ) -> None:
        """Become an engine over replicas that were not started, or that run already."""
        self.engine_args = EngineArguments(engine_args)
        self.name: str | None = service.name if service is not None and service.detached else None
        self._service = service
        super().__init__([make_replica(index) for index in range(num_replicas)], make_replica=make_replica, **how)

    @classmethod
    def launch(
        cls, engine_args: Mapping[str, object] | vllm.AsyncEngineArgs, num_replicas: int = 1, **kwargs: Any
    ) -> Self:
        """Make a service and start it; arguments as in the constructor."""
        return cls(engine_args, num_replicas, **kwargs).start()

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str],
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = False,
        compile: bool = True,
        enable_fp32_output: bool = False,
        *,
        engine: EngineName = "vllm",
        backend: Literal["local", "ray"] = "local",
        sampling_params: SamplingParams | None = None,
        metrics: bool = True,
        log_folder: str | os.PathLike[str] | None = None,
        name: str | None = None,
        namespace: str | None = None,
        resources: Mapping[str, float] | None = None,
        max_concurrent_requests: int | Literal["auto"] | None = "auto",
        faults: FaultPolicy | None = None,
        devices: Devices | None = None,
        **vllm_engine_args: Any,
    ) -> Self:
        """Start replicas of a model. Six parameters are TorchRL's, in its order; the constructor has the others.

        ``model_name`` is a folder or a hub name, and ``num_devices`` another name of ``tensor_parallel_size`` (default:
        1). ``compile=False`` sets mode 0 in ``compilation_config``, unless it has a mode; ``enforce_eager=True`` turns
        CUDA graphs off, too. With ``enable_fp32_output`` the last layer computes in float32, whatever the dtype of the
        others. Then logits are not rounded: in bfloat16 they have 3 significant digits. ``vllm_engine_args`` are fields
        of ``vllm.AsyncEngineArgs``, of which a parallel size may be ``None`` for 1; for another engine, that engine's
        own arguments.

        Raises:
            ValueError: ``num_devices`` and ``tensor_parallel_size`` differ, one is not positive, or a folder holds no
                model.
            ReplicaDiedError: an engine did not start; the message ends with the end of its log.
        """
        return cls.launch(
            pretrained_arguments(os.fspath(model_name), num_devices, compile, enable_fp32_output, vllm_engine_args),
            num_replicas,
            engine=engine,
            backend=backend,
            sampling_params=sampling_params,
            verbose=verbose,
            metrics=metrics,
            log_folder=log_folder,
            name=name,
            namespace=namespace,
            resources=resources,
            max_concurrent_requests=max_concurrent_requests,
            faults=faults,
            devices=devices,
        )

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self, timeout_seconds: float | None = None) -> Self:
        """Start all replicas and wait until they serve. A failure, or Ctrl-C, leaves no process behind.

        Args:
            timeout_seconds: for all of them, finite; default: the environment's ``TORCHRL_VLLM_TIMEOUT_SECONDS``, or
                600.

        Raises:
            ReplicaDiedError: an engine did not start; the message ends with the end of its log.
            EngineError: it did not start in time, or the service's name is taken.
        """
        if self._running:
            warnings.warn("the service is already running; start() does nothing", stacklevel=2)
            return self
        if any(entry.state is not ReplicaState.STARTING for entry in self.replica_table):
            raise RuntimeError("start: the service was shut down. Make a new one.")
        check_number("timeout_seconds", timeout_seconds, above=0, none=True)
        seconds = default_timeout() if timeout_seconds is None else timeout_seconds
        if self.name is not None:
            from torchrl_moe.modules.backends.ray.cluster import check_free

            check_free(self.name, self._service.namespace)
        deadline, total = time.monotonic() + seconds, self.num_replicas
        try:
            for entry in self.replica_table:
                entry.replica.start()
            # disable=None: a bar on a terminal and in a notebook, silence in a log file
            for entry in tqdm(self.replica_table, desc="start", unit="replica", total=total, leave=False, disable=None):
                self._wait(entry, deadline, seconds)
                self._fleet.serve(entry)
        except BaseException:
            self.shutdown()
            raise
        self._running = True
        self._fleet.supervise()
        return self

    def _wait(self, entry: TableEntry, deadline: float, seconds: float) -> None:
        try:
            self.infos.append(entry.replica.wait_ready(max(deadline - time.monotonic(), 0.0)))
        except ReplicaDiedError:
            raise
        except EngineError as error:
            raise EngineError(
                f"not all replicas started within {seconds:g} s: raise timeout_seconds, or the environment's "
                f"{TIMEOUT_VARIABLE}; {error}"
            ) from error

    # -- a service that other drivers can connect to, in a Ray cluster: by its name, or by a pickled engine -----------

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        namespace: str | None = None,
        sampling_params: SamplingParams | None = None,
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

    def _enter(
        self, service: Any, sampling_params: SamplingParams | None, timeout_seconds: float | None = None
    ) -> None:
        """Become an engine over the replicas of a running service; nothing is launched."""
        self._is_guest = True
        self._set_up(
            service.arguments,
            service.num_replicas,
            ray_factory(service),
            service,
            sampling_params=sampling_params,
            faults=FaultPolicy(restart=False, probe=math.inf),
        )
        try:
            seconds = default_timeout() if timeout_seconds is None else timeout_seconds
            deadline = time.monotonic() + seconds
            for entry in self.replica_table:
                cast(Any, entry.replica).join()  # a replica in Ray
            for entry in self.replica_table:
                try:
                    self._wait(entry, deadline, seconds)
                    version = entry.replica.call(Engine.weights_version, CALL_SECONDS)
                    self.replica_table.set_version(entry.index, version)
                except ReplicaDiedError as error:
                    self.replica_table.mark_dead(entry.index, str(error))
            if all(entry.state is ReplicaState.DEAD for entry in self.replica_table):
                raise NoReplicaError(
                    f"service {service.name!r}: no replica is alive. {self.replica_table[0].last_error}"
                )
            self._fleet.supervise()
            for entry in self.replica_table:
                if entry.state is not ReplicaState.DEAD:
                    self._fleet.serve(entry)
            self._running = True
        except BaseException:
            self.disconnect()
            raise

    def add_replicas(self, count: int = 1, *, timeout_seconds: float | None = None) -> list[int]:
        """Start more replicas; see :meth:`GenerationService.add_replicas`; the default deadline is that of
        :meth:`start`. ``ValueError`` if the service has a name.
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
        """Leave a named or connected service running, and abort this driver's requests. Idempotent.

        Raises:
            RuntimeError: the service has no name, and ends with this process.
        """
        if "_later" in vars(self):  # not connected yet
            return
        if self.name is None and not self._is_guest:
            raise RuntimeError("disconnect: this service ends with its driver: use shutdown(), or launch it by name")
        self._running = False
        self._dispatcher.close("this driver disconnected from the service")
        try:
            self._fleet.end(lambda replica: cast(Any, replica).disconnect())
        finally:
            self._dispatcher.stop()

    def get_master_address(self) -> str:
        """Return the address for your own process group: this node's address in Ray."""
        if self._service is None:
            return super().get_master_address()
        from torchrl_moe.modules.backends.ray.cluster import own_address

        return own_address()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as a handle: in another process of the same Ray cluster, it connects to the service on first use.

        It keeps the default sampling parameters, and has its own balancer and limits.
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

    def __exit__(self, *_: object) -> None:
        (self.disconnect if self._is_guest else self.shutdown)()


def _handle(kind: type[AsyncVLLM], *later: object) -> AsyncVLLM:
    engine = kind.__new__(kind)
    vars(engine).update(_later=later, _is_guest=True)
    return engine


def make_async_vllm_engine(
    *,
    model_name: str | os.PathLike[str],
    num_devices: int | None = None,
    num_replicas: int = 1,
    verbose: bool = False,
    compile: bool = True,
    enable_fp32_output: bool = False,
    tensor_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    **kwargs: Any,
) -> AsyncVLLM:
    """Start replicas of a model, under TorchRL's name; arguments as in :meth:`AsyncVLLM.from_pretrained`."""
    return AsyncVLLM.from_pretrained(
        model_name,
        num_devices,
        num_replicas,
        verbose,
        compile,
        enable_fp32_output,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        **kwargs,
    )
