"""``AsyncVLLM``: the generation service over vLLM replicas, under the names that TorchRL gives it; other engines too.

The replicas are child processes of the driver, or actors of a Ray cluster. They die with the driver, except those of a
service in Ray that has a name. Route capture is on if and only if the model has experts; log-probs are those of the
distribution that was sampled from; prefix caching is on.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch
from tqdm.auto import tqdm

from torchrl_moe._errors import EngineError, NoReplicaError, ReplicaDiedError
from torchrl_moe.modules.serving.devices import Devices
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.fleet import CALL_SECONDS
from torchrl_moe.modules.serving.launch import (
    TIMEOUT_VARIABLE,
    Engine,
    check_backend,
    check_model,
    default_timeout,
    engine_kind,
    engine_of,
    local_factory,
    ray_factory,
    with_fp32_head,
)
from torchrl_moe.modules.serving.replica_table import TableEntry
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["AsyncVLLM", "make_async_vllm_engine"]


class AsyncVLLM(GenerationService):
    """vLLM replicas behind one ``generate``.

    Args:
        engine_args: ``vllm.AsyncEngineArgs`` or a mapping of its fields; it names the model.
        num_replicas: how many engines, each with weights of its own.
        engine: which: ``"vllm"``, or ``"transformers"``: slow, on one device, for where vLLM is not (docs/engines.md).
        backend: ``"local"``: child processes of this one, without Ray; each has a set of GPUs of its own. ``"ray"``:
            actors on any node of the Ray cluster that this process is in, or that it finds; else one is started.
        sampling_params: the default of :meth:`generate`.
        enable_prefix_caching: overrides the engine argument of that name.
        verbose: whether vLLM logs its start-up and throughput, into the replica's log.
        max_concurrent_requests: how many may be in the engines at a time; the others wait in the service, by priority
            and in order of arrival. ``"auto"``: 1024 for each replica. ``None``: no limit.
        faults: when replicas are restarted, and how often; see :class:`FaultPolicy`.
        metrics: whether :attr:`metrics` counts requests.
        log_folder: where the logs stay, as ``replica-<index>.log``, for this service alone; by default each log goes
            with its replica.
        name: in Ray: of a service that outlives this process, for :meth:`connect`. Without one it ends with it.
        namespace: in Ray: where the name holds; default ``"torchrl_moe"``.
        resources: in Ray: what a replica asks of one node; default per device a CPU, and a GPU if the cluster has any.
        devices: of local replicas: one entry for each, its GPU or a list of them, by this process's own numbers
            (``[[1], [2]]``, ``["cuda:1", "cuda:2"]``) or their names; by default those that this process does not
            compute on. To share the trainer's on purpose, name it.

    Attributes:
        name: that other drivers :meth:`connect` to; ``None`` if the service ends with this process.

    Example::

        with AsyncVLLM.from_pretrained("path/to/model", num_replicas=2) as engine:
            completion = engine.generate("Hello", {"max_tokens": 16, "logprobs": 0})
            completion.outputs[0].routed_experts.shape  # [P + G - 1, L, K]
    """

    def __init__(
        self,
        engine_args: Any,
        num_replicas: int = 1,
        *,
        engine: Engine = "vllm",
        backend: Literal["local", "ray"] = "local",
        sampling_params: Any = None,
        enable_prefix_caching: bool | None = None,
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
        kind = engine_kind(engine)
        of_ray: dict[str, Any] = {"name": name, "namespace": namespace, "resources": resources}
        check_backend(backend, num_replicas, devices, **of_ray)
        arguments = kind.arguments_of(engine_args)
        if enable_prefix_caching is not None:
            arguments = kind.arguments_of({**arguments, "enable_prefix_caching": enable_prefix_caching})
        self.engine_args = arguments
        self.name = name
        self._namespace = namespace
        self._is_guest = False  # in a service that another driver made
        if backend == "ray":
            make_replica = ray_factory(kind, arguments, num_replicas, verbose=verbose, log_folder=log_folder, **of_ray)
        else:
            make_replica = local_factory(kind, arguments, num_replicas, verbose, log_folder, self._indices, devices)
        super().__init__(
            [make_replica(index) for index in range(num_replicas)],
            sampling_params,
            metrics=metrics,
            max_concurrent_requests=max_concurrent_requests,
            faults=faults,
            make_replica=make_replica,
        )

    def _indices(self) -> list[int]:
        return [entry.index for entry in self.replica_table]

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self, timeout_seconds: float | None = None) -> Self:
        """Start all replicas and wait until they serve. A failure, or Ctrl-C, leaves no process behind.

        Args:
            timeout_seconds: for all of them; default: the environment's ``TORCHRL_VLLM_TIMEOUT_SECONDS``, or 600.

        Raises:
            ReplicaDiedError: an engine did not come up; the message ends with its own last words.
            EngineError: not in time, or its name is taken.
        """
        if self._running:
            warnings.warn("the service is already running; start() does nothing", stacklevel=2)
            return self
        if any(entry.state is not ReplicaState.STARTING for entry in self.replica_table):
            raise RuntimeError("start: the service was shut down. Make a new one.")
        seconds = default_timeout() if timeout_seconds is None else timeout_seconds
        if self.name is not None:
            from torchrl_moe.modules.backends.ray.cluster import check_free

            check_free(self.name, self._namespace)
        try:
            self._start_all(seconds)
        except BaseException:
            self.shutdown()
            raise
        self._running = True
        self._fleet.supervise()
        return self

    def _start_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for entry in self.replica_table:
            entry.replica.start()
        # disable=None: a bar on a terminal, silence in a log file
        for entry in tqdm(self.replica_table, desc="starting vLLM", total=self.num_replicas, leave=False, disable=None):
            self._wait(entry, deadline, seconds)
            self._fleet.serve(entry)

    def _wait(self, entry: TableEntry, deadline: float, seconds: float) -> None:
        try:
            self._fleet.wait_ready(entry, max(deadline - time.monotonic(), 0.0))
        except ReplicaDiedError:
            raise
        except EngineError as error:
            hint = f"raise timeout_seconds, or the environment's {TIMEOUT_VARIABLE}."
            raise EngineError(f"{error}\nAll replicas together had {seconds:g} s: {hint}") from error

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        namespace: str | None = None,
        sampling_params: Any = None,
        timeout_seconds: float | None = None,
    ) -> Self:
        """Join a service that runs in the Ray cluster under that name, from any driver; several may be in it at once.

        A replica that holds older weights than another (Ray has restarted it, say) serves here once it has the newest.
        Updates that another driver makes are heard of within a second; each completion says what it was made with.
        :meth:`disconnect`, a ``with`` block's end and the end of the process leave the service as it is;
        :meth:`shutdown` ends it for all, with replicas that were restarted since. The driver that made the replicas
        probes and restarts them, and Ray restarts those whose process ends; here one that died stays so: connect again.

        Args:
            name: as its maker named it.
            namespace: as its maker gave it.
            sampling_params: the default of :meth:`generate`, of this driver.
            timeout_seconds: for all replicas, some of which may be starting; default as in :meth:`start`.

        Raises:
            EngineError: there is no Ray cluster, no such service in it (the message lists those that run), or no
                replica that answers; :class:`NoReplicaError`: all have died.
        """
        from torchrl_moe.modules.backends.ray.cluster import find_service

        service = find_service(name, namespace)
        engine = cls(
            service.arguments,
            service.num_replicas,
            engine=engine_of(service.kind),
            backend="ray",
            sampling_params=sampling_params,
            verbose=service.verbose,
            name=service.name,
            namespace=service.namespace,
            resources=service.resources,
            log_folder=service.log_folder,
            faults=FaultPolicy(restart=False, probe=math.inf),
        )
        engine._is_guest = True
        try:
            engine._join(default_timeout() if timeout_seconds is None else timeout_seconds)
        except BaseException:
            engine.disconnect()
            raise
        return engine

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
            raise NoReplicaError(f"service {self.name!r}: no replica is alive. {self.replica_table[0].last_error}")
        self._fleet.supervise()
        for entry in self.replica_table:
            if entry.state is not ReplicaState.DEAD:
                self._fleet.serve(entry)
        self._running = True

    def add_replicas(self, count: int = 1, *, timeout_seconds: float | None = None) -> list[int]:
        """Start more replicas; see :meth:`GenerationService.add_replicas`. A service with a name cannot have more.

        Raises:
            ValueError: not at least one, there are no GPUs left for them, or the service has a name.
            EngineError: one did not come up, or not in time; then none is added.
        """
        if self.name is not None:
            raise ValueError("add_replicas: other drivers of a service with a name would not learn of new replicas")
        return super().add_replicas(
            count, timeout_seconds=default_timeout() if timeout_seconds is None else timeout_seconds
        )

    @staticmethod
    def shutdown_service(name: str, *, namespace: str | None = None) -> None:
        """End a service in Ray for all its drivers, or what a killed one left; ``EngineError`` if there is nothing."""
        from torchrl_moe.modules.backends.ray.cluster import end_service

        end_service(name, namespace)

    def disconnect(self) -> None:
        """Leave a service that has a name; it goes on, and what this driver asked of it is aborted. Idempotent.

        Raises:
            RuntimeError: the service has no name, and ends with this process.
        """
        if self.name is None:
            raise RuntimeError("disconnect: this service ends with its driver: use shutdown(), or launch it by name")
        self._running = False
        self._fleet.end(lambda replica: replica.disconnect())
        self._dispatcher.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.disconnect if self._is_guest else self.shutdown)()

    @classmethod
    def launch(cls, engine_args: Any, num_replicas: int = 1, **kwargs: Any) -> Self:
        """Make a service and start it; arguments as in the constructor."""
        return cls(engine_args, num_replicas, **kwargs).start()

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        num_replicas: int = 1,
        *,
        num_devices: int | None = None,
        engine: Engine = "vllm",
        backend: Literal["local", "ray"] = "local",
        sampling_params: Any = None,
        verbose: bool = False,
        compile: bool = True,
        enable_fp32_output: bool = False,
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
        """Start replicas of a model.

        Args:
            path: a folder, or a hub name.
            num_replicas: how many engines.
            num_devices: GPUs per replica, another name of ``tensor_parallel_size``.
            compile: whether vLLM may compile the model; false sets ``enforce_eager``.
            enable_fp32_output: whether the last layer computes in float32, whatever the others do. Log-probs then carry
                no rounding of logits: in bfloat16 they are rounded to 3 significant digits.
            engine: see the constructor, as for all that follow.
            backend: where.
            sampling_params: see the constructor.
            verbose: see the constructor.
            metrics: see the constructor.
            log_folder: see the constructor.
            name: see the constructor.
            namespace: see the constructor.
            resources: see the constructor.
            max_concurrent_requests: see the constructor.
            faults: see the constructor.
            devices: see the constructor.
            **vllm_engine_args: fields of ``vllm.AsyncEngineArgs``; of another engine, its own.

        Raises:
            ValueError: ``num_devices`` and ``tensor_parallel_size`` differ, or a folder holds no model.
            ReplicaDiedError: an engine did not come up; the message ends with its own last words.
        """
        model = check_model(os.fspath(path))
        tensor_parallel = vllm_engine_args.pop("tensor_parallel_size", None)
        if num_devices is not None and tensor_parallel not in (None, num_devices):
            raise ValueError(f"num_devices={num_devices} and tensor_parallel_size={tensor_parallel} differ: pass one")
        size = tensor_parallel or num_devices or 1
        if not compile:
            vllm_engine_args.setdefault("enforce_eager", True)
        if enable_fp32_output:
            vllm_engine_args["hf_overrides"] = with_fp32_head(vllm_engine_args.get("hf_overrides"))
        return cls.launch(
            {"model": model, "tensor_parallel_size": size, **vllm_engine_args},
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

    # -- what the weight sync asks ----------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Return over how many devices one replica spans its tensors."""
        self._check_running("get_tp_size")
        return self.infos[0].tensor_parallel_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return checkpoint name -> (dtype, shape) of every tensor, experts one by one, as the checkpoint has them."""
        self._check_running("get_model_metadata")
        return self._fleet.alive()[0].replica.metadata(CALL_SECONDS)

    # -- tests of what the workers hold -----------------------------------------------------------------------------

    def save_model_params(self) -> None:
        """Have every worker keep a copy of its parameters in host memory, for :meth:`validate_model_params`."""
        self.collective_rpc("torchrl_moe_save_params")

    def validate_model_params(self, function: Callable[[Mapping[str, torch.Tensor], torch.nn.Module], Any]) -> Any:
        """Run a check of yours inside every worker: ``function(saved_params, model)``.

        The function is pickled by value where it cannot be imported, and unpickled in the engine's own processes, which
        trust this one as it is. Names and layouts are vLLM's: fused projections, packed experts.

        Returns:
            What the function returned, which must be plain data: one list per replica, with one value per worker.

        Raises:
            EngineError: the function raised; the message ends with its words.
        """
        import cloudpickle

        from torchrl_moe.modules.backends.process import wire

        answers = self.collective_rpc("torchrl_moe_validate", args=(cloudpickle.dumps(function),))
        return [[wire.decode(answer[0], answer[1:]) for answer in workers] for workers in answers]


def make_async_vllm_engine(*, model_name: str | os.PathLike[str], num_replicas: int = 1, **kwargs: Any) -> AsyncVLLM:
    """Start replicas of a model, under TorchRL's name; arguments as in :meth:`AsyncVLLM.from_pretrained`."""
    return AsyncVLLM.from_pretrained(model_name, num_replicas, **kwargs)
