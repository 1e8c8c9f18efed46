"""How a service is launched: arguments checked, and the function that makes its replicas.

A replica that died is made again by the same function. A backend is imported only when it is used.
"""

from __future__ import annotations

import itertools
import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch

from torchrl_moe._checks import check_bool, check_number, shown
from torchrl_moe.modules.backends.checkpoint import is_written_as_path
from torchrl_moe.modules.backends.engine_kind import EngineKind
from torchrl_moe.modules.backends.replica import Replica

# Which GPUs the local replicas of a service compute on: those that the user names, else free ones.


Device: TypeAlias = int | str | torch.device
Devices: TypeAlias = Sequence[Device | Sequence[Device]]
"""One entry per replica: its GPU, or a list of them."""


def visible_devices() -> list[str]:
    """Return the names of the CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` spells them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if named is None else [name.strip() for name in named.split(",")]
    return names[:count]


def ranks_here() -> int:
    """Return how many of several ranks, each on its number's device, a launcher has started here; 0 without one."""
    is_one_of_several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if is_one_of_several else 0


def devices_of_trainer() -> list[int]:
    """Return the indices of the devices that this process uses, and those of a launcher's ranks, begun or not."""
    count = torch.cuda.device_count()
    found = set(range(min(ranks_here(), count)))
    # this process's own: the current one, and those that it fills
    if torch.cuda.is_initialized():
        found |= {torch.cuda.current_device(), *(index for index in range(count) if torch.cuda.memory_reserved(index))}
    return sorted(found)


class DeviceSets:
    """The sets of devices for replicas, and which replica has which."""

    def __init__(
        self,
        devices: Devices | None,
        num_replicas: int,
        per_replica: int,
        listed: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._visible, self._per_replica, self._listed = visible_devices(), per_replica, listed
        self._of_trainer = [self._visible[index] for index in devices_of_trainer()] if self._visible else []
        named = [] if devices is None else _named(devices, self._visible, num_replicas, per_replica)
        taken = {*self._of_trainer, *itertools.chain(*named)}
        free = [name for name in self._visible if name not in taken]
        left = [free[at : at + per_replica] for at in range(0, len(free) - per_replica + 1, per_replica)]
        self._sets = [",".join(names) for names in [*named, *left]]
        self._check(num_replicas)
        self._places = {index: index for index in range(num_replicas)}  # which set a replica has

    def of(self, index: int) -> str | None:
        """Return a replica's devices, as a value of ``CUDA_VISIBLE_DEVICES``; ``None`` on a machine without GPUs.

        A restarted replica keeps its own; an added one gets a free set.
        """
        if not self._visible:
            return None
        if index not in self._places:
            taken = {self._places[other] for other in self._listed() if other in self._places}
            place = next(place for place in itertools.count() if place not in taken)
            self._check(place + 1)
            self._places[index] = place
        return self._sets[self._places[index]]

    def _check(self, num_replicas: int) -> None:
        if not self._visible or num_replicas <= len(self._sets):
            return
        own = f", and the trainer computes on {', '.join(self._of_trainer)}" if self._of_trainer else ""
        raise ValueError(
            f"{num_replicas} replicas of {self._per_replica} GPU(s) need {num_replicas * self._per_replica}, but "
            f"{len(self._visible)} are visible ({', '.join(self._visible)}){own}. Use fewer replicas, a smaller "
            "tensor_parallel_size, or name the devices to share: devices=[[0], ...]"
        )


def _named(devices: Devices, visible: list[str], num_replicas: int, per_replica: int) -> list[list[str]]:
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ValueError(f"devices={devices!r}: give a list with one entry per replica, such as [[0], [1]]")
    if not visible:
        raise ValueError(
            f"devices={list(devices)!r}, but torch sees no CUDA device: leave devices out on a CPU, or install torch "
            "with CUDA"
        )
    if len(devices) != num_replicas:
        raise ValueError(f"devices={list(devices)!r} has {len(devices)} entries, for {num_replicas} replicas")
    sets = []
    for replica, entry in enumerate(devices):
        one = isinstance(entry, str) or not isinstance(entry, Sequence)
        names = [_name(device, visible) for device in cast(Sequence[Device], [entry] if one else entry)]
        if len(names) != per_replica or len(set(names)) != per_replica:
            raise ValueError(
                f"devices: replica {replica} needs {per_replica} different GPU(s) (tensor, pipeline and data parallel "
                f"ranks), got {entry!r}"
            )
        sets.append(names)
    return sets


def _name(device: Device, visible: list[str]) -> str:
    """Return how the environment spells a device that is torch's, by its index, or spelled like that already."""
    if isinstance(device, str) and device in visible and not device.isdecimal():
        return device
    try:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        where = torch.device("cpu")
    if where.type != "cuda" or where.index is None or not 0 <= where.index < len(visible):
        raise ValueError(
            f"devices: there is no {device!r}; there are 'cuda:0' to 'cuda:{len(visible) - 1}', in this process's own "
            f"numbers ({', '.join(visible)} by name)"
        )
    return visible[where.index]


EngineName: TypeAlias = Literal["vllm", "transformers"] | str
ReplicaFactory: TypeAlias = Callable[[int], Replica]

TIMEOUT_VARIABLE = "TORCHRL_VLLM_TIMEOUT_SECONDS"  # TorchRL's name
DEFAULT_TIMEOUT_SECONDS = 600.0
MOST_REPLICAS = 1 << 16
PARALLEL_SIZES = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")


class EngineArguments(dict[str, Any]):
    """EngineName arguments by keyword, which TorchRL's code reads as attributes.

    >>> EngineArguments(model="org/model").model
    'org/model'
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"engine_args.{name}: it was not given, so the engine's own default holds") from None


# -- arguments ---------------------------------------------------------------------------------------------------------


def pretrained_arguments(
    model: str, num_devices: int | None, compiles: bool, fp32_output: bool, given: Mapping[str, Any]
) -> dict[str, object]:
    for name, value in {"num_devices": num_devices, **{name: given.get(name) for name in PARALLEL_SIZES}}.items():
        check_number(name, value, 1, MOST_REPLICAS, whole=True, none=True)
    check_bool("compile", compiles)
    check_bool("enable_fp32_output", fp32_output)
    arguments = {name: value for name, value in given.items() if name not in PARALLEL_SIZES or value is not None}
    size = arguments.pop("tensor_parallel_size", None)
    if num_devices is not None and size not in (None, num_devices):
        raise ValueError(f"num_devices={num_devices} and tensor_parallel_size={size} differ: pass one")
    size = num_devices if size is None else size
    if "model" in arguments:
        raise ValueError(f"model={arguments['model']!r}: the model is the first argument, here {model!r}")
    config = arguments.get("compilation_config")
    if not compiles and isinstance(config, Mapping | None):  # a vLLM object has its own mode
        arguments["compilation_config"] = {"mode": 0, **(config or {})}
    if fp32_output:
        overrides = arguments.get("hf_overrides") or {}
        if not isinstance(overrides, Mapping):
            raise ValueError(
                "enable_fp32_output needs hf_overrides to be a mapping: have yours set head_dtype='float32'"
            )
        arguments["hf_overrides"] = {**overrides, "head_dtype": "float32"}
    # a folder without a model is refused before any process is started; vLLM checks hub names
    if (is_written_as_path(model) or os.path.isdir(model)) and not os.path.isfile(os.path.join(model, "config.json")):
        state = "has no config.json" if os.path.isdir(model) else "does not exist"
        raise ValueError(f"no model at {model!r}: the folder {state}. Save one with model.save_pretrained(path).")
    return {"model": model, "tensor_parallel_size": size or 1, **arguments}


def check_backend(
    backend: str, num_replicas: int, devices: Devices | None = None, actor_class: Any = None, **of_ray: Any
) -> None:
    """Refuse an unknown backend, fewer than one replica, and arguments that the backend does not have."""
    if actor_class is not None:
        raise ValueError(
            "actor_class must be None: a replica is a process with an engine, behind an actor of ours with "
            "backend='ray'. Configure it by engine arguments, resources= in Ray, or devices= of local replicas."
        )
    if backend not in ("local", "ray"):
        raise ValueError(f"backend must be 'local' (child processes of this one) or 'ray' (actors), got {backend!r}")
    check_number("num_replicas", num_replicas, 1, MOST_REPLICAS, whole=True)
    for name in ("name", "namespace"):
        if not isinstance(of_ray.get(name), str | None):
            raise ValueError(f"{name} must be text, or None, got {shown(of_ray[name])}.")
    if not isinstance(of_ray.get("resources"), Mapping | None):
        raise ValueError(f"resources must be a mapping of names to amounts, or None, got {shown(of_ray['resources'])}.")
    for key, amount in (of_ray.get("resources") or {}).items():
        check_number(f"resources[{key!r}]", amount, 0)
    if backend == "local" and (given := [name for name, value in of_ray.items() if value is not None]):
        raise ValueError(f"{', '.join(given)} given with backend='local': only backend='ray' takes them")
    if backend == "ray" and devices is not None:
        raise ValueError(
            f"devices={devices!r} given with backend='ray': Ray chooses devices, on any node. Pass what a replica "
            "needs there as resources=, such as {'GPU': 1, 'a-custom-resource': 1}"
        )


def default_timeout() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"the environment's {TIMEOUT_VARIABLE} must be a positive number of seconds, got {text!r}")
    return seconds


# -- replicas ----------------------------------------------------------------------------------------------------------


def local_factory(
    kind: EngineKind,
    arguments: Mapping[str, object],
    num_replicas: int,
    verbose: bool,
    log_folder: str | os.PathLike[str] | None = None,
    listed: Callable[[], Iterable[int]] = tuple,
    devices: Devices | None = None,
) -> ReplicaFactory:
    """Return a function that starts replicas as child processes, each with its own GPUs."""
    from torchrl_moe.modules.backends.process.process_replica import LocalReplica

    sets = DeviceSets(devices, num_replicas, kind.devices_per_replica(arguments), listed)
    numbers = itertools.count()

    def make(index: int) -> Replica:
        environment = kind.engine_environment(sets.of(index), num_replicas, verbose)
        return LocalReplica(index, kind, kind.seeded(arguments, next(numbers)), environment, log_folder)

    return make


def ray_service(
    kind: EngineKind,
    arguments: Mapping[str, object],
    num_replicas: int,
    *,
    name: str | None,
    namespace: str | None,
    resources: Mapping[str, float] | None,
    verbose: bool,
    log_folder: str | os.PathLike[str] | None = None,
) -> Any:
    """Connect to the Ray cluster, or start one, and return the :class:`RayService` to create in it."""
    if isinstance(arguments.get("hf_token"), str):
        raise ValueError(
            "hf_token: Ray keeps and shows what actors are made with. Leave it out, and set HF_TOKEN in the "
            "environment of this process, which sends it to the replicas by its own connections."
        )
    from torchrl_moe.modules.backends.ray.cluster import NAMESPACE, RayService, default_resources, join_cluster

    if join_cluster() and name is not None:
        warnings.warn(
            f"no Ray cluster was found, so one was started that ends with this process, and the service {name!r} with "
            "it. Start one with `ray start --head` for a service that outlives its driver.",
            stacklevel=4,
        )
    asked = default_resources(kind.devices_per_replica(arguments)) if resources is None else resources
    return RayService(
        name=name or f"torchrl_moe-{uuid.uuid4().hex[:8]}",
        namespace=namespace or NAMESPACE,
        detached=name is not None,
        num_replicas=num_replicas,
        kind=kind.name,
        arguments=dict(arguments),
        resources={key: float(amount) for key, amount in asked.items()},
        verbose=verbose,
        log_folder=None if log_folder is None else os.fspath(log_folder),
    )


def ray_factory(service: Any) -> ReplicaFactory:
    """Return a function that makes replicas of a :class:`RayService` in this cluster, or connects to running ones."""
    from torchrl_moe.modules.backends.ray.ray_replica import RayReplica

    numbers = itertools.count()
    return lambda index: RayReplica(index, service, next(numbers))
