"""``RouterReplay``: record the experts a stock transformers MoE chooses, or make it follow recorded ones.

The public interface. The interception itself is in ``interception``, the state of one forward in ``binding``, what is
attached to the model in ``handles``, and how checkpointed layers keep their routes in ``checkpointing``.

Letters: B sequences, T tokens, N = B * T rows, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe._errors import ReplayError, RoutingError, UnsupportedRouterError
from torchrl_moe.modules.replay import handles
from torchrl_moe.modules.replay.binding import UNSET, Binding, LayerReport, Recording
from torchrl_moe.modules.replay.checkpointing import wrap_checkpoints
from torchrl_moe.modules.replay.discovery import arriving, check_replayed, discover, dry_inputs, number_of_layers
from torchrl_moe.modules.replay.incoming import OnBadRoutes, Packing, bind_routes
from torchrl_moe.modules.replay.parallelism import computing_device, refused_parallelism
from torchrl_moe.modules.replay.report import ReplayReport, routers_table
from torchrl_moe.modules.replay.state import ReplayState

__all__ = ["Recording", "RouterReplay", "evaluating"]


class RouterReplay:
    """Records and replays the routers of one transformers model.

    Construction runs a small forward pass five times: it finds the routers, and checks that each runs exactly once,
    that replaying the model's own choice, in all rows or in every other row, gives exactly the same logits, and that
    another choice does not. Construct it before or after peft, ``fully_shard`` and ``torch.compile``; after
    ``fully_shard`` all ranks must do so. Router jitter is off until :meth:`remove`.

    A deep copy or a pickle of the model alone has no ``RouterReplay``, and may get its own; if the model is copied
    together with its ``RouterReplay``, the copies belong together.

    Args:
        model: a transformers MoE for causal language modelling.

    Raises:
        ReplayError: the model has a RouterReplay already.
        UnsupportedRouterError: no router was found, one cannot be replayed exactly, or ranks share the model by
            context, pipeline or expert-tensor parallelism.

    >>> from torchrl_moe.testing import make_tiny_moe
    >>> model = make_tiny_moe("qwen3_moe")
    >>> replay = RouterReplay(model)
    >>> ids = torch.arange(6)[None]
    >>> with replay.record() as recording:
    ...     before = model(ids).logits
    >>> with replay.replay(recording.routed_experts):
    ...     after = model(ids).logits
    >>> torch.equal(before, after), recording.routed_experts.shape
    (True, torch.Size([1, 6, 4, 4]))
    """

    def __init__(self, model: nn.Module) -> None:
        owner = handles.owner(model)
        if owner is not None:
            raise ReplayError(
                f"this model has a RouterReplay already: use it, RouterReplay.of(model), or call its remove(). It is "
                f"{owner!r}"
            )
        reason = refused_parallelism(model)
        if reason:
            raise UnsupportedRouterError(f"{type(model).__name__} cannot be replayed under {reason}")
        handles.uninstall(model)  # handles of the model that this one is a copy of
        self.model = model
        self._state = ReplayState(owner=self)
        self._last: dict[int, LayerReport] = {}
        self._refused: tuple[int, ...] = ()
        try:
            with evaluating(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self.sites = discover(model)
                self.num_layers = number_of_layers(model)
                handles.install(model, self.sites, self._state)
                self._self_test()
        except BaseException:
            self.remove()
            raise

    @classmethod
    def of(cls, model: nn.Module) -> RouterReplay:
        """Return the ``RouterReplay`` that a model has; a new one if it has none."""
        owner = handles.owner(model)
        return owner if isinstance(owner, cls) else cls(model)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if handles.belong_to(self.model, self._state):  # not if it was removed
            self._state.owner = self

    # -- what was found ---------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers that have a router, as global indices."""
        return tuple(site.layer for site in self.sites)

    @property
    def top_k(self) -> int:
        """K, the maximum over all layers."""
        return max(site.top_k for site in self.sites)

    @property
    def num_experts(self) -> int:
        """E, the maximum over all layers."""
        return max(site.num_experts for site in self.sites)

    @property
    def scoring(self) -> str:
        """How the routers score, as observed in a forward pass; "own code" where that is not visible."""
        return "; ".join(dict.fromkeys(site.scoring for site in self.sites))

    def __repr__(self) -> str:
        if not hasattr(self, "num_layers"):  # its constructor has not come to its end
            return "RouterReplay(not made)"
        return (
            f"RouterReplay({type(self.model).__name__}, routers in layers {list(self.layers)} of {self.num_layers}, "
            f"num_experts={self.num_experts}, top_k={self.top_k}, scoring={self.scoring!r})"
        )

    def _repr_html_(self) -> str:
        """Return a table of the first routers, for notebooks. It runs no forward pass, and never fails."""
        if not hasattr(self, "num_layers"):
            return routers_table(repr(self), [])
        title = f"RouterReplay({type(self.model).__name__}, routers in {len(self.sites)} of {self.num_layers} layers)"
        return routers_table(title, self.sites)

    # -- contexts ---------------------------------------------------------------------------------------------------

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record one forward pass; the routers choose for themselves.

        Raises:
            ReplayError: not exactly one forward pass ran, or a context of this model is open already.
        """
        self._last, self._refused = {}, ()
        recording = Recording(self.num_layers, self.top_k)
        with self._opened(Binding(layers=self.layers, recording=recording)):
            yield recording

    @contextmanager
    def replay(
        self,
        routes: Any,
        attention_mask: Tensor | None = None,
        measure: bool = False,
        on_bad_routes: OnBadRoutes = "raise",
        packing: Packing | None = None,
        record: bool = False,
    ) -> Iterator[Recording | None]:
        """Make one forward pass follow recorded experts. ``backward()`` may come after the context has closed.

        Args:
            routes: int ``[B, T, L, K]``, in the layout of the batch (or a ``RoutedExperts`` of that shape), or nested
                jagged ``[B, j, L, K]`` with a row per real token: for a batch packed into one row ``[1, N]``, or with
                ``attention_mask`` for a padded one. A row of -1 runs on the live router; every row given is used, the
                last included.
            attention_mask: ``[B, T]``; pads run on the live router whatever their rows hold.
            measure: also run each router on its own, for :meth:`report`'s agreement.
            on_bad_routes: what to do with a wrong id: ``"raise"``, or run its whole sample on the ``"live"`` router;
                :meth:`report` counts and :attr:`refused` lists these samples. A wrong shape or dtype always raises.
            packing: the positions of the tokens in the model's input, if a row holds several sequences: routes and mask
                then belong to the batch before packing, and messages name its samples.
            record: whether to return a recording of the experts that the routers use: the routes, and their own choice
                elsewhere.

        Raises:
            RouteShapeError: routes or mask of another shape.
            RouteValueError: an id out of range, twice in a row, on a layer without a router, or a row that is partly
                -1; or routes that are not signed integers. The message names sample, token (pads not counted), layer
                and values.
            ReplayError: the routes do not have the layout of the batch, a router did not use them, not exactly one
                forward pass ran, or a context of this model is open already.
        """
        self._last, self._refused = {}, ()
        binding = bind_routes(
            routes,
            self.sites,
            self.num_layers,
            attention_mask=attention_mask,
            measure=measure,
            on_bad_routes=on_bad_routes,
            device=computing_device(self.model),
            packing=packing,
        )
        if record:
            binding = replace(binding, recording=Recording(self.num_layers, self.top_k))
        with self._opened(binding):
            yield binding.recording

    @contextmanager
    def _opened(self, binding: Binding) -> Iterator[None]:
        with self._state.opened(binding):
            wrap_checkpoints(self.model, self._state)
            yield
        binding.check_used()
        self._last, self._refused = binding.report(), binding.refused

    # -- reports ----------------------------------------------------------------------------------------------------

    def report(self) -> ReplayReport:
        """Return what the last context's forward did, by layer; nothing if it failed.

        Returns:
            ``replayed`` and ``live``: numbers of rows; ``refused``: how many of the live ones had bad routes in their
            sample; ``agreement``: the share of replayed rows for which the router by itself chooses the same set,
            ``None`` unless measured. It is printed as a table.
        """
        return ReplayReport({layer: done.to_dict() for layer, done in self._last.items()})

    @property
    def refused(self) -> tuple[int, ...]:
        """The samples that ran on the live router in the last context because their routes were bad."""
        return self._refused

    def remove(self) -> None:
        """Remove every handle from the model. Idempotent.

        Raises:
            ReplayError: a context is open.
        """
        if self._state.is_open:
            raise ReplayError("a context of this model is open: close it before remove()")
        if not self._state.owned:
            return
        self._state.owner = None
        handles.uninstall(self.model)

    # -- construction -----------------------------------------------------------------------------------------------

    def _self_test(self) -> None:
        inputs = dry_inputs(self.model)
        try:
            with self.record() as recording:
                native = _output(self.model(**inputs))
            replayed = []
            for live in (slice(0, 0), slice(0, None, 2)):
                routes = recording.routed_experts
                routes[:, live] = UNSET
                with self.replay(routes):
                    replayed.append(_output(self.model(**inputs)))
            others = self._others(recording.routed_experts)
            with self.replay(others), arriving(self.model) as arrived:
                changed = _output(self.model(**inputs))
            self._compare(native, replayed, changed)
            check_replayed(self.model, self.sites, arrived, others.flatten(0, 1))
        except RoutingError as error:
            raise UnsupportedRouterError(f"{type(self.model).__name__} failed the self-test: {error}") from error
        self._last = {}
        self._state.used = False

    def _compare(self, native: Tensor, replayed: Sequence[Tensor], changed: Tensor) -> None:
        """Check the outputs without routes, with the model's own routes in all or some rows, and with other routes."""
        for output, rows in zip(replayed, ("", " in every other row"), strict=True):
            if not torch.equal(native, output):
                worst = (native - output).abs().max().item()
                raise UnsupportedRouterError(
                    f"replaying its own routes{rows} changes its output by up to {worst:.1e}. Its routing is more than "
                    "the choice that topk makes."
                )
        if torch.equal(native, changed) and any(site.top_k < site.num_experts for site in self.sites):
            raise UnsupportedRouterError(
                "replaying other routes changes nothing. Its routers do not use the choice that topk makes."
            )
        if bool((native.isfinite() & ~changed.isfinite()).any()):
            raise UnsupportedRouterError(
                "replaying other routes makes its output infinite or nan. It masks experts that its routers would not "
                "have chosen, in a way that cannot be opened."
            )

    def _others(self, routes: Tensor) -> Tensor:
        """Return routes in which every row holds other experts."""
        others = routes.clone()
        for site in self.sites:
            own = routes[:, :, site.layer, : site.top_k]
            others[:, :, site.layer, : site.top_k] = (own + 1) % site.num_experts
        return others


def _output(result: Any) -> Tensor:
    """Return the logits, which may come after a loss; for other models, the first output."""
    logits = getattr(result, "logits", None)
    output: Tensor = result[0] if logits is None else logits
    return output


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run with every module in eval mode, and restore each module's mode."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
