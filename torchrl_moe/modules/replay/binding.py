"""The routes of one forward pass: bound per call, captured by checkpointed layers, never consumed.

Letters: B sequences, T tokens, N = B * T rows, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from torchrl_moe.errors import ReplayError
from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.modules.replay.interception import OwnChoice

UNSET = -1


class Recording:
    """Fills up while the model runs inside :meth:`RouterReplay.record`."""

    def __init__(self, num_layers: int, top_k: int) -> None:
        self._num_layers = num_layers
        self._top_k = top_k
        self.by_layer: dict[int, Tensor] = {}
        self.shape: tuple[int, ...] = ()

    @property
    def routed_experts(self) -> Tensor:
        """int16 ``[B, T, L, K]`` on the model's device; -1 where a layer has no router, or a smaller K."""
        if not self.by_layer or not self.shape:
            raise ReplayError("nothing was recorded: run the model inside `with replay.record() as rec`")
        first = next(iter(self.by_layer.values()))
        routes = torch.full((len(first), self._num_layers, self._top_k), UNSET, dtype=torch.int16, device=first.device)
        for layer, chosen in self.by_layer.items():
            routes[:, layer, : chosen.shape[1]] = chosen
        return routes.view(*self.shape, self._num_layers, self._top_k)


LayerReport: TypeAlias = tuple[int, int, int, Tensor | None]
"""What one layer did: rows replayed; rows on the live router; live rows of refused samples; replayed rows in which the
live router agrees, if measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Routes for one forward, or a place to record them."""

    layers: tuple[int, ...]
    recording: Recording | None = None
    routes: Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    known: Tensor | None = None
    replayed: tuple[int, ...] = ()
    complete: tuple[bool, ...] = ()
    live: Mapping[int, Tensor] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    refused_rows: int = 0
    measure: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    agreeing: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, site: RouterSite, scores: Tensor, own: OwnChoice, recompute: bool) -> Tensor:
        """Return the experts ``[N, K]`` that a router uses for these rows."""
        layer = site.layer
        if self.recording is not None and recompute:  # kernels may break ties differently in the second run
            chosen = self.recording.by_layer[layer].long()
        elif self.routes is None:
            chosen = own(None).indices.reshape(len(scores), site.top_k)
        else:
            chosen = self._with_live(layer, self._experts(site, scores), own)
        if self.recording is not None and not recompute:
            self.recording.by_layer[layer] = chosen.to(torch.int16)
        if not recompute:
            self.calls[layer] = self.calls.get(layer, 0) + 1
        return chosen

    def groups(self, site: RouterSite, scores: Tensor, own: OwnChoice, top_k: int) -> Tensor:
        """Return the groups ``[N, *]`` that hold the experts to use, the router's own for live rows, some repeated."""
        groups = self._experts(site, scores).clamp(min=0) // (site.num_experts // scores.shape[-1])
        return self._with_live(site.layer, _widened(groups, max(site.top_k, top_k)), own)

    def compare(self, site: RouterSite, own: Tensor) -> None:
        """Count the replayed rows in which the router's own choice ``[N, K]`` is the same set of experts."""
        experts = self._experts(site, own)
        same = (own.sort(-1).values == experts.sort(-1).values).all(-1)  # never in a live row, which holds -1
        self.agreeing[site.layer] = same.sum()

    def see_batch(self, shape: tuple[int, ...]) -> None:
        """Store ``(B, T)`` of the hidden states, or compare it with that of the routes."""
        if self.recording is not None:
            self.recording.shape = shape
        if self.routes is not None and shape != self.shape:
            raise ReplayError(
                f"the forward pass has tokens {list(shape)}, the routes are for {list(self.shape)}: give routes laid "
                "out as the batch, [B, T, L, K], pads included. A forward pass that sees a part of each sequence "
                "(context or sequence parallelism) cannot be replayed"
            )

    def check_used(self) -> None:
        """Raise unless every router ran exactly once."""
        if not self.calls:
            raise ReplayError("the context closed and no forward pass of this model ran in it")
        wrong = [(layer, self.calls.get(layer, 0)) for layer in self.layers if self.calls.get(layer, 0) != 1]
        if wrong:
            detail = ", ".join(f"layer {layer} ran {count} times" for layer, count in wrong[:4])
            raise ReplayError(f"one forward pass per context: {detail}. Open a context for each micro-batch.")

    def report(self) -> dict[int, LayerReport]:
        """Return what each layer did; call :meth:`check_used` first."""
        if self.routes is None:
            assert self.recording is not None
            return {layer: (0, len(self.recording.by_layer[layer]), 0, None) for layer in self.layers}
        rows, refused = len(self.routes), self.refused_rows
        return {
            i: (done, rows - done, refused, self.agreeing.get(i))
            for i, done in enumerate(self.replayed)
            if i in self.layers
        }

    def _with_live(self, layer: int, given: Tensor, own: OwnChoice) -> Tensor:
        """Put the router's own choice into the rows of ``given`` ``[N, *]`` that are not replayed."""
        if self.complete[layer]:
            return given
        if torch.compiler.is_compiling():  # where the number of rows would become part of the graph
            assert self.known is not None
            ours = own(None).indices
            return torch.where(
                self.known[:, layer, None].to(given.device), given, _widened(ours.flatten(0, -2), given.shape[1])
            )
        rows = self.live[layer].to(given.device)
        return given.index_copy(0, rows, _widened(own(rows).indices, given.shape[1]))

    def _experts(self, site: RouterSite, like: Tensor) -> Tensor:
        assert self.routes is not None
        if len(like) != len(self.routes):
            raise ReplayError(
                f"layer {site.layer}: its router has {len(like)} rows, the routes have {len(self.routes)}: this router "
                "does not see every token of the batch"
            )
        return self.routes[:, site.layer, : site.top_k].to(like.device, torch.long)


def live_rows(known: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Return by layer the rows, int64 ``[M]``, that are not in ``known`` ``[N, L]``."""
    live = ~known[:, list(layers)].T
    places = live.nonzero()[:, 1].split(live.sum(1).tolist())
    return dict(zip(layers, places, strict=True))


def _widened(choice: Tensor, width: int) -> Tensor:
    """Return ``[N, width]``: the columns of ``choice``, repeated from the first if there are too few."""
    if choice.shape[1] == width:
        return choice
    return choice[:, torch.arange(width, device=choice.device) % choice.shape[1]]


# Which binding is active on a model, and in which thread: contexts, and the runs of checkpointed layers.
#
# A router asks here which routes to follow. Two places may hold them, and a checkpointed layer goes before the
# context, because its second run comes when the context is closed, or belongs to another micro-batch:
#
# .. code-block:: text
#
#                                         open context     checkpointed layer     a router follows
#     with replay.replay(A):
#         a layer without checkpointing   A                -                      A
#         a checkpointed layer            A                A, captured            A
#     with replay.replay(B):              B                -                      B
#     loss_of_A.backward(), second run    -, or B          A, restored            A


_TWO_THREADS = "another thread has a context of this model open: one thread at a time"


@dataclass(frozen=True, slots=True)
class _Held:
    """An active binding; ``recompute``: in a checkpointed layer's second run."""

    binding: Binding | None = None
    recompute: bool = False


class _Layer(threading.local):
    """The binding of the checkpointed layer that runs in this thread; ``None`` outside of one.

    Per thread: autograd runs the backward of each device in its own thread.
    """

    def __init__(self) -> None:
        self.held: _Held | None = None  # set in every thread, so that a compiled graph can look at it


class ReplayState:
    """The state that the handles of one model look up while they run: the active binding, and its thread.

    Plain attributes rather than a context variable, so that a compiled graph can read them. A copy, or an unpickled
    state, starts without a binding and without an owner: the original's contexts do not reach a copied model.
    """

    def __init__(self, owner: object | None = None) -> None:
        self.owner = owner
        self.used = False
        """Whether a context was opened, whose forward pass may have a backward still to come."""
        self._open = _Held()
        self._thread: int | None = None
        self._layer = _Layer()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return ReplayState, ()

    @property
    def owned(self) -> bool:
        """Whether a ``RouterReplay`` owns the handles."""
        return self.owner is not None

    @property
    def is_open(self) -> bool:
        """Whether a context is open."""
        return self._open.binding is not None

    @property
    def recompute(self) -> bool:
        """Whether this thread is in a checkpointed layer's second run."""
        return self._layer.held is not None and self._layer.held.recompute

    @property
    def binding(self) -> Binding | None:
        """The active binding."""
        held = self._open if self._layer.held is None else self._layer.held
        if torch.compiler.is_compiling():
            return held.binding
        if self.used and not held.recompute and torch._C._current_graph_task_id() != -1:
            raise ReplayError(
                "a router runs inside backward(), in a recompute whose routes are not known: checkpoint the layers "
                "with model.gradient_checkpointing_enable(), which is activation_checkpointing_enable() from "
                "transformers 5.23 on, or torch's checkpoint_wrapper, and not with a torch.utils.checkpoint call of "
                "your own"
            )
        if held is self._open and held.binding is not None and self._thread != threading.get_ident():
            raise ReplayError(_TWO_THREADS)
        return held.binding

    @contextmanager
    def opened(self, binding: Binding) -> Iterator[None]:
        """Make ``binding`` the active one."""
        with self._lock:
            if not self.owned:
                raise ReplayError("this RouterReplay was removed from its model: make a new one")
            if self.is_open and self._thread != threading.get_ident():
                raise ReplayError(_TWO_THREADS)
            if self.is_open or self._layer.held is not None:
                raise ReplayError("a context of this model is open already: close it first, they do not nest")
            # without gradients, too: they may be enabled inside
            self.used = True
            self._open, self._thread = _Held(binding), threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._open, self._thread = _Held(), None

    @contextmanager
    def recomputing(self, binding: Binding | None, again: bool) -> Iterator[None]:
        """Run a checkpointed layer in this thread with the binding of its forward pass, then restore the previous
        one.
        """
        before, self._layer.held = self._layer.held, _Held(binding, again)
        try:
            yield
        finally:
            self._layer.held = before


# Keeping a binding for a checkpointed layer's second run, which happens in ``backward``: it is captured in the layer's
# forward, and restored only for its recompute.
#
# transformers runs a checkpointed layer through one of the attributes ``NAMES``, torch's ``checkpoint_wrapper``
# through the other. Enabling checkpointing overwrites it, so it is wrapped again whenever a context opens, and before
# each forward pass outside of one, whose second run must be known as one that routes live.


NAMES = ("_gradient_checkpointing_func", "checkpoint_fn")


class _Captured:
    """A checkpointed layer's function; its first call is the forward, every later one a recompute."""

    def __init__(self, state: ReplayState, function: Callable[..., object]) -> None:
        self._state = state
        self._binding = state.binding
        self._function = function
        self._calls = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self._calls += 1
        recompute = self._calls > 1
        if recompute and self._binding is not None and not self._state.owned:
            raise ReplayError("remove() came before the backward of a checkpointed forward pass: call it after")
        with self._state.recomputing(self._binding, recompute):
            return self._function(*args, **kwargs)


class _Checkpoint:
    """Stands in for a layer's checkpoint function."""

    def __init__(self, state: ReplayState, checkpoint: Callable[..., object]) -> None:
        self.state = state
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        return self.checkpoint(_Captured(self.state, function), *args, **kwargs)


def _checkpoints(model: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., object]]]:
    for module in model.modules():
        for name in NAMES:
            checkpoint = module.__dict__.get(name)
            if checkpoint is not None:
                yield module, name, checkpoint


def wrap_checkpoints(model: nn.Module, state: ReplayState) -> None:
    """Wrap the checkpoint function of every layer that has one and is not wrapped yet."""
    for module, name, checkpoint in _checkpoints(model):
        if not isinstance(checkpoint, _Checkpoint):
            setattr(module, name, _Checkpoint(state, checkpoint))


def release_checkpoints(model: nn.Module) -> None:
    """Put the layers' own functions back."""
    for module, name, checkpoint in _checkpoints(model):
        if isinstance(checkpoint, _Checkpoint):
            setattr(module, name, checkpoint.checkpoint)
