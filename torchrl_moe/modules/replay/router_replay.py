"""``RouterReplay``: record the experts a stock transformers MoE chooses, or make it follow recorded ones.

The interception itself is in ``interception``; the state of one forward pass, and how checkpointed layers keep their
routes, in ``binding``. Here are reports, the handles on a model's modules, how routes are read, and ``RouterReplay``.

Letters: B sequences, T tokens, N = B * T rows, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_moe import _checks
from torchrl_moe.errors import ReplayError, RouteShapeError, RouteValueError, RoutingError, UnsupportedRouterError
from torchrl_moe.modules.replay.binding import (
    UNSET,
    Binding,
    LayerReport,
    Recording,
    ReplayState,
    live_rows,
    release_checkpoints,
    wrap_checkpoints,
)
from torchrl_moe.modules.replay.discovery import (
    RouterSite,
    arriving,
    check_replayed,
    computing_device,
    discover,
    dry_inputs,
    number_of_layers,
    refused_parallelism,
)
from torchrl_moe.modules.replay.interception import OwnChoice, TopK, TopKInterception
from torchrl_moe.render.tables import html_table, number_text, one_line, plain_table, share_text

# What a ``RouterReplay`` found, and what its last context did, layer by layer.


HEADER = ("layer", "replayed rows", "live rows", "refused rows", "agreement")
ROUTERS = ("layer", "module", "experts", "top-k", "scoring")
LAYERS = 64
CHARACTERS = 60


class ReplayReport(dict[int, dict[str, float | None]]):
    """A mapping, layer -> what :meth:`RouterReplay.report` says of it, that is printed as a table.

    >>> ReplayReport({3: {"replayed": 14, "live": 4, "refused": 0, "agreement": None}})
    replay of 1 layers
    layer  replayed rows  live rows  refused rows  agreement
        3             14          4             0          –
    """

    @property
    def _title(self) -> str:
        known = [row["agreement"] for row in self.values() if row["agreement"] is not None]
        mean = f", mean agreement {share_text(sum(known) / len(known))}" if known else ""
        return f"replay of {len(self)} layers{mean}" if self else "replay: no context has come to its end yet"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [
            (
                str(layer),
                *(number_text(row[name]) for name in ("replayed", "live", "refused")),
                share_text(row["agreement"]),
            )
            for layer, row in list(self.items())[:LAYERS]
        ]
        return rows + [(f"… {len(self) - LAYERS} more", "", "", "", "")] * (len(self) > LAYERS)

    def __repr__(self) -> str:
        return plain_table(self._title, HEADER, self._rows()) if self else self._title

    def _repr_html_(self) -> str:
        note = "agreement: replayed rows in which the router by itself chooses the same experts; – if not measured"
        return html_table(self._title, HEADER, self._rows(), note=note if self else "")


def routers_table(title: str, sites: Sequence[RouterSite]) -> str:
    """Return routers as a table for notebooks, one row each, of the first layers."""
    rows = [
        (
            str(site.layer),
            one_line(site.name, CHARACTERS),
            str(site.num_experts),
            str(site.top_k),
            one_line(site.scoring, CHARACTERS),
        )
        for site in sites[:LAYERS]
    ]
    rows += [(f"… {len(sites) - LAYERS} more", "", "", "", "")] * (len(sites) > LAYERS)
    return html_table(title, ROUTERS, rows)


# Handles on a model's modules while it has a ``RouterReplay``: they replace the forward of a few modules.
#
# A handle is an object in the module's own ``__dict__``, not a closure: a deep copy or a pickle of the model holds
# handles of its own modules, which do nothing until a ``RouterReplay`` is made for that model.


Jitter: TypeAlias = tuple[nn.Module, str, float]


class _Handle:
    """Stands in for ``module.forward``."""

    def __init__(self, module: nn.Module, state: ReplayState) -> None:
        self.module = module
        self.state = state
        self.shadowed = module.__dict__.get("forward")  # another library's replacement

    def forward(self, *args: object, **kwargs: object) -> object:
        """The module's own forward, looked up late: FSDP and parametrizations change its class."""
        if self.shadowed is not None:
            return self.shadowed(*args, **kwargs)
        # Not a bound method: Dynamo would look that up again.
        return type(self.module).forward(self.module, *args, **kwargs)


class _RouterHandle(_Handle):
    """On a router: runs its forward under the active binding."""

    def __init__(self, module: nn.Module, state: ReplayState, site: RouterSite) -> None:
        super().__init__(module, state)
        self.site = site

    def __call__(self, *args: object, **kwargs: object) -> object:
        binding, recompute = self.state.binding, self.state.recompute
        if binding is None:
            return self.forward(*args, **kwargs)
        if binding.measure:  # in a recompute too: selective checkpointing matches results by their order
            binding.compare(self.site, self._own_choice(*args, **kwargs))
        site = self.site

        def choose(scores: Tensor, own: OwnChoice) -> Tensor:
            return binding.choose(site, scores, own, recompute)

        def groups(scores: Tensor, own: OwnChoice, top_k: int) -> Tensor:
            return binding.groups(site, scores, own, top_k)

        opening = None if binding.routes is None else groups
        with TopKInterception(site.num_experts, site.top_k, site.rank, choose, opening):
            return self.forward(*args, **kwargs)

    def _own_choice(self, *args: object, **kwargs: object) -> Tensor:
        """Return the experts ``[N, K]`` that the router chooses in a separate run, with its own groups."""
        chosen: list[Tensor] = []

        def choose(scores: Tensor, own: OwnChoice) -> Tensor:
            result: TopK = own(None)
            chosen.append(result.indices.reshape(len(scores), -1))
            return chosen[-1]

        site = self.site
        with torch.no_grad(), TopKInterception(site.num_experts, site.top_k, site.rank, choose):
            self.forward(*args, **kwargs)
        return chosen[-1]


class _LayerHandle(_Handle):
    """On a decoder layer: it sees the batch's ``[B, T]``, routers see rows. Stores the routers' original jitter."""

    def __init__(self, module: nn.Module, state: ReplayState, jitter: list[Jitter]) -> None:
        super().__init__(module, state)
        self.jitter = jitter

    def __call__(self, *args: object, **kwargs: object) -> object:
        binding: Binding | None = self.state.binding
        if binding is not None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(hidden, Tensor) or hidden.ndim < 3:
                got = f"shape {list(hidden.shape)}" if isinstance(hidden, Tensor) else f"keywords {sorted(kwargs)}"
                raise ReplayError(
                    f"a decoder layer ({type(self.module).__name__}) must be called with hidden states [B, T, H], "
                    f"first or as hidden_states, got {got}: the batch that routes are laid out for cannot be seen"
                )
            binding.see_batch(tuple(hidden.shape[:2]))
        return self.forward(*args, **kwargs)


class _BodyHandle(_Handle):
    """On the module that runs the decoder layers: a forward pass outside of contexts is recomputed as it ran, too."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and self.state.owned:
            wrap_checkpoints(self.module, self.state)
        return self.forward(*args, **kwargs)


def _handles(model: nn.Module) -> Iterator[_Handle]:
    """Outermost first where a module has two."""
    for module in model.modules():
        handle = module.__dict__.get("forward")
        while isinstance(handle, _Handle):
            yield handle
            handle = handle.shadowed


def innermost_handle(module: nn.Module) -> _Handle | None:
    """Return the handle on a module that calls the module's own forward; ``None`` if there is none."""
    handle: object = module.__dict__.get("forward")
    while isinstance(handle, _Handle) and isinstance(handle.shadowed, _Handle):
        handle = handle.shadowed
    return handle if isinstance(handle, _Handle) else None


def owner_of(model: nn.Module) -> object | None:
    """Return the ``RouterReplay`` that owns handles on this model; a deep copy's handles have no owner."""
    return next((handle.state.owner for handle in _handles(model) if handle.state.owner is not None), None)


def install(model: nn.Module, sites: Sequence[RouterSite], state: ReplayState) -> None:
    """Put handles on all routers, the first decoder layer with one, and what runs the layers; switch jitter off."""
    modules = dict(model.named_modules())
    for site in sites:
        router = modules[site.name]
        router.forward = _RouterHandle(router, state, site)
    layer = modules[sites[0].layer_name]
    # jitter would change the scores of a replay; its values are kept, to be restored
    jitter = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if "jitter" in name and isinstance(value, float) and value > 0
    ]
    for module, name, _ in jitter:
        setattr(module, name, 0.0)
    layer.forward = _LayerHandle(layer, state, jitter)
    body = modules[sites[0].layer_name.rpartition(".")[0].rpartition(".")[0]]
    body.forward = _BodyHandle(body, state)


def uninstall(model: nn.Module) -> None:
    """Remove every handle, and restore the routers' jitter."""
    for handle in list(_handles(model)):
        if isinstance(handle, _LayerHandle):
            for module, name, value in handle.jitter:
                setattr(module, name, value)
        if handle.shadowed is None:
            del handle.module.forward
        else:
            handle.module.forward = handle.shadowed
    release_checkpoints(model)


# Incoming routes: read in the layout of the batch, and checked once, before a forward pass may use them.
#
# In any layout, the rows of the real tokens are checked as one list, sample after sample, so a message names the same
# sample and token for a padded, a packed and a jagged batch.
#
# Letters: B sequences, T tokens, M real tokens of all sequences, N = B * T rows, L decoder layers, K experts per
# token.


OnBadRoutes = Literal["raise", "live"]
ON_BAD_ROUTES: tuple[OnBadRoutes, ...] = ("raise", "live")

_BATCH = "Routes are laid out as the batch; L counts all decoder layers, dense ones too."
_ENGINE = "For what an engine returned, RoutedExperts.from_vllm."


@dataclass(frozen=True, slots=True)
class Packing:
    """The positions of a batch's tokens in a model's input, which may hold several sequences in a row.

    Args:
        index: int64 ``[B, T]``, the position of each real token in the flattened input.
        shape: of the input, ``(R, W)``.
    """

    index: Tensor
    shape: tuple[int, int]


def bind_routes(
    routes: object,
    sites: Sequence[RouterSite],
    num_layers: int,
    *,
    attention_mask: Tensor | None = None,
    measure: bool = False,
    on_bad_routes: OnBadRoutes = "raise",
    device: torch.device | None = None,
    packing: Packing | None = None,
) -> Binding:
    """Check routes and bind them to one forward pass; see :meth:`RouterReplay.replay`."""
    if on_bad_routes not in ON_BAD_ROUTES:
        raise ValueError(f"on_bad_routes must be one of {ON_BAD_ROUTES}, got {on_bad_routes!r}")
    _checks.check_bool("measure", measure)
    _checks.check_instance("packing", packing, Packing, none=True)
    # everything but the ids: rows [M, L, K] of the real tokens, how many each sample has, and their places in the input
    tail = (num_layers, max(site.top_k for site in sites))
    rows, lengths, shape, places = _read(routes, attention_mask, tail, device)
    if packing is not None:  # the same rows, for an input with other token positions
        hint = "A place for each token of [B, T]."
        _checks.check_shape("packing.index", packing.index.shape, shape, error=RouteShapeError, hint=hint)
        if packing.index.dtype != torch.int64:
            raise RouteValueError(f"packing.index must have dtype torch.int64, got {packing.index.dtype}")
        index, shape = packing.index.flatten().to(rows.device), packing.shape
        places = index if places is None else index[places]
        # real tokens have positions inside the input, each a different one
        ordered = places.sort().values
        wrong = (ordered < 0) | (ordered >= shape[0] * shape[1])
        wrong[1:] |= ordered[1:] == ordered[:-1]
        if bool(wrong.any()):
            raise RouteValueError(
                f"packing.index holds {int(ordered[wrong][0])}, which is out of range or there twice; the places of "
                f"real tokens are distinct, from 0 to {shape[0] * shape[1] - 1} for an input of {list(shape)}. Give "
                "the attention_mask if some are placeholders of pads."
            )
    refused = _check_values(rows, lengths, sites, on_bad_routes)
    # laid out as the input, [N, L, K], -1 on pads
    flat = rows
    if places is not None:
        flat = rows.new_full((shape[0] * shape[1], *rows.shape[1:]), UNSET)
        flat[places] = rows
    known = flat[..., 0] != UNSET
    replayed = tuple(known.sum(0).tolist())
    layers = [site.layer for site in sites]
    return Binding(
        layers=tuple(layers),
        routes=flat,
        shape=shape,
        known=known,
        replayed=replayed,
        complete=tuple(count == len(flat) for count in replayed),
        live=live_rows(known, layers),
        refused=refused,
        refused_rows=sum(lengths[i] for i in refused),
        measure=measure,
    )


def _read(
    routes: object, mask: Tensor | None, tail: tuple[int, int], device: torch.device | None
) -> tuple[Tensor, list[int], tuple[int, int], Tensor | None]:
    """Return the rows of the real tokens, each sample's number of them, the shape of the input, and their places."""
    full = getattr(routes, "full", routes)
    try:
        given = torch.as_tensor(full.copy() if isinstance(full, np.ndarray) else full)  # it may be read-only
    except (TypeError, ValueError, RuntimeError) as error:
        raise RouteValueError(f"routes must be a tensor of integers, got {type(routes).__name__}: {error}") from error
    if given.is_meta:
        raise RouteValueError("routes must hold values, got a tensor on the meta device")
    if given.layout is not (torch.jagged if given.is_nested else torch.strided):
        raise RouteValueError(f"routes must be dense or nested jagged, got layout {given.layout}")
    if mask is not None:
        mask = _checks.as_mask("attention_mask", mask, error=RouteValueError)
    _checks.check_integer("routes", given, signed=True, error=RouteValueError, hint=_ENGINE)
    given, device = given.detach(), device or given.device
    if not given.is_nested:
        _checks.check_shape("routes", given.shape, ("B", "T", *tail), error=RouteShapeError, hint=_BATCH)
        batch, length = given.shape[:2]
        rows = given.flatten(0, 1)
        if mask is None:
            return rows.to(device, copy=True), [length] * batch, (batch, length), None
        hint = "It is that of the batch, [B, T]."
        _checks.check_shape("attention_mask", mask.shape, (batch, length), error=RouteShapeError, hint=hint)
        keep = mask.flatten()
        return rows[keep.to(rows.device)].to(device), mask.sum(1).tolist(), (batch, length), keep.to(device)
    # a row per real token: of a batch packed into one row, or of a padded one with its mask
    samples = given.unbind()
    for i, sample in enumerate(samples):
        _checks.check_shape(f"routes of sample {i}", sample.shape, ("T", *tail), error=RouteShapeError, hint=_BATCH)
    rows, lengths = torch.cat(list(samples)).to(device), [len(sample) for sample in samples]
    if mask is None:
        return rows, lengths, (1, len(rows)), None
    _checks.check_shape("attention_mask", mask.shape, (len(lengths), "T"), error=RouteShapeError)
    for i, (got, wanted) in enumerate(zip(lengths, mask.sum(1).tolist(), strict=True)):
        hint = "A row for each token that attention_mask keeps."
        _checks.check_rows(f"routes of sample {i}", got, wanted, hint=hint)
    return rows, lengths, (mask.shape[0], mask.shape[1]), mask.flatten().to(device)


def _check_values(
    rows: Tensor, lengths: Sequence[int], sites: Sequence[RouterSite], on_bad_routes: OnBadRoutes
) -> tuple[int, ...]:
    """Check every id; return the refused samples, whose rows are set to -1.

    Layers with another E or K are checked separately, and a smaller K leaves trailing -1.
    """
    names = _checks.RowNames((len(lengths),), lengths)
    bad = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    kinds = sorted({(site.num_experts, site.top_k) for site in sites})
    for num_experts, top_k in kinds:
        layers = [site.layer for site in sites if (site.num_experts, site.top_k) == (num_experts, top_k)]
        part = rows[..., :top_k]
        if len(kinds) > 1:
            others = [site.layer for site in sites if site.layer not in layers]
            part = part.index_fill(1, torch.tensor(others, device=rows.device), UNSET)
        surplus = (rows[:, layers, top_k:] != UNSET).any(-1)
        if on_bad_routes == "live":
            bad |= _checks.find_bad_routes(part, layers, num_experts) | surplus.any(-1)
            continue
        _checks.check_routes(part, layers, num_experts, where=names.row)
        if bool(surplus.any()):
            row, i = surplus.nonzero()[0].tolist()
            raise RouteValueError(
                f"routed_experts: {names.row(row)}, layer {layers[i]} holds {rows[row, layers[i]].tolist()}; its "
                f"router chooses {top_k} experts, so columns {top_k} and up must be -1"
            )
    if not bool(bad.any()):
        return ()
    sample_of = torch.repeat_interleave(torch.tensor(lengths, device=rows.device))
    samples = sample_of[bad].unique()
    rows[torch.isin(sample_of, samples)] = UNSET
    return tuple(samples.tolist())


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
            context, pipeline, sequence or expert-tensor parallelism.

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
        _checks.check_instance("model", model, nn.Module)
        owner = owner_of(model)
        if owner is not None:
            raise ReplayError(
                f"this model has a RouterReplay already: use it, RouterReplay.of(model), or call its remove(). It is "
                f"{owner!r}"
            )
        reason = refused_parallelism(model)
        if reason:
            raise UnsupportedRouterError(f"{type(model).__name__} cannot be replayed under {reason}")
        uninstall(model)  # handles of the model that this one is a copy of
        self.model = model
        self._state = ReplayState(owner=self)
        self._last: dict[int, LayerReport] = {}
        self._refused: tuple[int, ...] = ()
        try:
            with evaluating(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self.sites = discover(model)
                self.num_layers = number_of_layers(model)
                install(model, self.sites, self._state)
                self._self_test()
        except BaseException:
            self.remove()
            raise

    @classmethod
    def of(cls, model: nn.Module) -> RouterReplay:
        """Return the ``RouterReplay`` that a model has; a new one if it has none."""
        owner = owner_of(model)
        return owner if isinstance(owner, cls) else cls(model)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if any(handle.state is self._state for handle in _handles(self.model)):  # not if it was removed
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
        routes: object,
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
        _checks.check_bool("record", record)
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
        report = ReplayReport()
        for layer, (replayed, live, refused, agreeing) in self._last.items():
            # reading the count waits for the device
            agreement = int(agreeing) / replayed if agreeing is not None and replayed else None
            report[layer] = {"replayed": replayed, "live": live, "refused": refused, "agreement": agreement}
        return report

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
        uninstall(self.model)

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
            others = recording.routed_experts
            for site in self.sites:  # every row holds other experts
                own = others[:, :, site.layer, : site.top_k]
                others[:, :, site.layer, : site.top_k] = (own + 1) % site.num_experts
            with self.replay(others), arriving(self.model) as arrived:
                changed = _output(self.model(**inputs))
            for output, rows in zip(replayed, ("", " in every other row"), strict=True):
                if not torch.equal(native, output):
                    worst = (native - output).abs().max().item()
                    raise UnsupportedRouterError(
                        f"replaying its own routes{rows} changes its output by up to {worst:.1e}. Its routing is more "
                        "than the choice that topk makes."
                    )
            if torch.equal(native, changed) and any(site.top_k < site.num_experts for site in self.sites):
                raise UnsupportedRouterError(
                    "replaying other routes changes nothing. Its routers do not use the choice that topk makes."
                )
            if bool((native.isfinite() & ~changed.isfinite()).any()):
                raise UnsupportedRouterError(
                    "replaying other routes makes its output infinite or nan. It masks experts that its routers would "
                    "not have chosen, in a way that cannot be opened."
                )
            check_replayed(self.model, self.sites, arrived, others.flatten(0, 1))
        except RoutingError as error:
            raise UnsupportedRouterError(f"{type(self.model).__name__} failed the self-test: {error}") from error
        self._last = {}
        self._state.used = False


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
