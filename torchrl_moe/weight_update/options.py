"""The options of a weight sync in groups, each of which checks itself."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch
from torch import nn

from torchrl_moe._checks import check_bool, check_number
from torchrl_moe.weight_update.transports.base import StageOptions

WITH_ADAPTERS: Mapping[str, object] = {
    "dtype": "engine",
    "transport": "memmap",
    "mode": "hot_swap",
    "kv": "salt",
    "verify": "digest",
    "fsync": False,
    "delta": "auto",
}
"""The only choices where no weights are swapped."""
ROUNDING = 1e-9  # for shares that are not binary fractions
ROLLING_SHARE, HOLDING_SHARE = 0.1, 0.9


def _check_count(name: str, value: float, least: int) -> None:
    """Refuse a value that is neither a number of replicas nor a share of them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of replicas or a share of them, got {value!r}")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"{name} must be a share above 0 and at most 1.0, or a whole number, got {value}")
    if value < least and isinstance(value, int):
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _count_of(value: float, num_replicas: int) -> int:
    """Return how many replicas a number or a share is; a share is rounded down."""
    return math.floor(value * num_replicas + ROUNDING) if isinstance(value, float) else value


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    folder: Path
    seen_as: Path
    keep_versions: int = 2
    fsync: bool = False
    delta: bool = False

    def __post_init__(self) -> None:
        check_number("keep_versions", self.keep_versions, 2, whole=True, hint="One serves, one is written.")
        for name in ("fsync", "delta"):
            check_bool(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    dtype: Literal["engine", "trainer"] | torch.dtype = "engine"
    lora: Literal["merged", "adapter"] = "merged"

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            one_of("dtype", self.dtype, ("engine", "trainer"))
        elif not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating one, got {self.dtype}")
        one_of("lora", self.lora, ("merged", "adapter"))

    def check(self, **choices: object) -> None:
        """Raise ``ValueError`` for an option, name -> value, that has no meaning where only an adapter is sent."""
        if self.lora == "adapter":
            for name, value in {"dtype": self.dtype, **choices}.items():
                if value != WITH_ADAPTERS[name]:
                    raise ValueError(
                        f"{name}={value!r} has no meaning with lora='adapter', which loads a file beside the weights "
                        f"while requests run: leave it at {WITH_ADAPTERS[name]!r}"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOptions:
    mode: Literal["hot_swap", "drain", "abort_resume"] = "hot_swap"
    kv: Literal["salt", "recompute"] = "salt"
    rolling: int | float = ROLLING_SHARE
    min_serving: int | float | None = None
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("hot_swap", "drain", "abort_resume"))
        one_of("kv", self.kv, ("salt", "recompute"))
        _check_count("rolling", self.rolling, 1)
        if self.min_serving is not None:
            _check_count("min_serving", self.min_serving, 0)
        check_number("timeout_seconds", self.timeout_seconds, above=0, infinite=True)

    def at_a_time(self, num_replicas: int) -> int:
        return max(_count_of(self.rolling, num_replicas), 1)

    def must_hold(self, num_replicas: int) -> int:
        """Return how many replicas must hold a version in the end; by default nine of ten, and at least one."""
        if self.min_serving is None:
            return max(_count_of(HOLDING_SHARE, num_replicas), 1)
        return _count_of(self.min_serving, num_replicas)

    def must_serve(self, num_replicas: int) -> int:
        """Return how many replicas must serve meanwhile; one at a time may always be swapped."""
        if self.min_serving is None:
            floor = num_replicas - self.at_a_time(num_replicas)
        else:
            floor = _count_of(self.min_serving, num_replicas)
        return max(min(floor, num_replicas - 1), 0)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOptions:
    """Options of a transport with process groups, one per replica."""

    master_address: str | None = None
    master_port: int | None = None
    gpus_per_replica: int | None = None
    device: torch.device | str | int | None = None
    buffer_bytes: int | None = None
    num_buffers: int | None = None

    @property
    def torch_device(self) -> torch.device | None:
        """:attr:`device`; a number means a GPU, even where torch has none and would read it as the CPU."""
        if self.device is None:
            return None
        return torch.device("cuda", self.device) if isinstance(self.device, int) else torch.device(self.device)

    def check(self, transport: str) -> None:
        """Raise ``ValueError`` for an option that has no meaning for a transport."""
        if transport == "memmap" and self.buffer_bytes is not None:
            raise ValueError("buffer_bytes belongs to transport='gloo' and 'nccl'; 'memmap' has no process group")
        if transport != "nccl" and self.num_buffers is not None:
            raise ValueError(f"num_buffers={self.num_buffers!r} belongs to transport='nccl'")
        if transport == "gloo" and self.master_address is not None and not _is_loopback(self.master_address):
            raise ValueError(
                f"master_address={self.master_address!r}: transport='gloo' reaches the replicas of one host, where no "
                "address is needed. For several hosts use transport='memmap' and folder= on a file system "
                "that they share"
            )
        check_number("master_port", self.master_port, 0, 65535, whole=True, none=True, hint="0: a free one.")
        for name in ("gpus_per_replica", "buffer_bytes", "num_buffers"):
            check_number(name, getattr(self, name), 1, whole=True, none=True)
        for name, kind, place in (("gloo", "cpu", "the CPU"), ("nccl", "cuda", "a GPU")):
            if transport == name and self.torch_device is not None and self.torch_device.type != kind:
                raise ValueError(f"device={self.device!r}: transport={name!r} sends from {place}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    transport: str
    store: StoreOptions
    source: SourceOptions
    staging: StageOptions
    swapping: SwapOptions
    collective: CollectiveOptions
    num_replicas: int | None = None


# The canary: the trainer's log-probs of a fixed prompt, which an engine with its weights must reproduce.
#
# It proves what digests cannot: that the bytes were loaded into the right places. In half precision a router may
# choose another expert where two are close, so there only gross errors can be distinguished from rounding.


PROMPT_TOKENS = 16
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
HALF_TOLERANCE = 1.0


class Canary(TypedDict):
    """The trainer's log-probs of a prompt, from its second token on, and how far an engine's may be off."""

    token_ids: list[int]
    log_probs: list[float]
    tolerance: float


@torch.no_grad()
def canary_of(model: nn.Module, engine_dtype: torch.dtype | None = None) -> Canary:
    """Return the canary of a model, for an engine that computes in ``engine_dtype``."""
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
    ids = [(7 * position + 3) % vocabulary for position in range(PROMPT_TOKENS)]
    parameter = next(model.parameters())
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = model(torch.tensor([ids], device=parameter.device)).logits[0, :-1].float()
    finally:
        for module, training in modes:
            module.training = training
    wanted = torch.tensor(ids[1:], device=logits.device)
    log_probs = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    tolerance = max(
        TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in (parameter.dtype, engine_dtype or parameter.dtype)
    )
    return {"token_ids": ids, "log_probs": log_probs.tolist(), "tolerance": tolerance}
