"""``TransformersWrapper``: scores rollouts with a stock transformers model that follows the recorded experts.

TorchRL's name and keys; it scores and never generates. Which experts the forward pass uses is one switch:

- ``"R3"``: those of the rollout engine, ``("routed_experts", "full")`` (arXiv 2510.11370);
- ``"R2"``: those of this model's own first forward under ``no_grad``, recorded to ``("train_routed_experts", "full")``
  and replayed by every later one (arXiv 2512.01374);
- ``"none"``: the live router's.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack, set_list_to_stack
from torch import Tensor, nn
from torchrl.modules.llm.policies import LogProbs

from torchrl_moe import _checks
from torchrl_moe._errors import UnsupportedRouterError
from torchrl_moe.modules.policies.dense_distributions import DenseDistributions
from torchrl_moe.modules.policies.rollout import stack_answers
from torchrl_moe.modules.policies.routes import (
    RECORDED,
    UNUSED,
    has_recorded,
    no_routes,
    note_routing,
    read_routes,
    write_recorded,
)
from torchrl_moe.modules.policies.sampled_from import UNSAID, SampledFrom, read_sampling, says_nothing
from torchrl_moe.modules.policies.scoring import Layout, ScoringBatch, align, read_batch, samples_of
from torchrl_moe.modules.policies.scoring_model import ScoringModel, Selection
from torchrl_moe.modules.replay.discovery import discover, number_of_layers
from torchrl_moe.modules.replay.incoming import ON_BAD_ROUTES, OnBadRoutes, Packing
from torchrl_moe.modules.replay.parallelism import computing_device, refused_parallelism, summed_again
from torchrl_moe.modules.replay.router_replay import RouterReplay

__all__ = ["TransformersWrapper"]

REPLAYS = ("R3", "R2", "none")


class TransformersWrapper(DenseDistributions):
    """Scores tokens with a transformers model.

    Args:
        model: a model for causal language modelling, or a folder or hub name.
        tokenizer: only its pad token is used; may be ``None``.
        input_mode: must be ``"tokens"``: rendering a chat again may give other tokens than those the routes belong to.
        generate: must be false; :class:`vLLMWrapper` generates.
        replay: which experts to use, see above.
        temperature: that of sampling; the logits are divided by it, as the engine does for its log-probs. Default: what
            each sample says, ``("sampling", "temperature")``, 1 if it says nothing; of an engine's answer that says
            nothing you are warned, once.
        pad_model_input: run a padded batch (``True``), or one row that holds all sequences (``False``). Default: a
            padded batch, or several sequences in a row where that means fewer pads and the model keeps them apart.
        measure_agreement: also compute the live router's choice, for ``("routing", "agreement")``.
        on_bad_routes: what to do about a sample whose routes are wrong: ``"raise"``, or run it on the ``"live"`` router
            and count its tokens in ``("routing", "fallback")``.
        rerecord: under R2, record again in a forward under ``no_grad`` although the batch has recorded routes.
        router_replay: a handle that the model has already; default: the one that it has, or a new one.
        input_key: where the tokens are; default ``("tokens", "full")``.
        inplace: write into the input (default), or into a new TensorDict (``False`` or ``"empty"``).
        tokens_key, masks_key, log_probs_key, routed_experts_key: where to read and write.

    Raises:
        UnsupportedRouterError: replay of a model without routers, or with one that cannot be replayed exactly.

    The reference policy comes from :meth:`reference`, and is native unless told to replay.

    Example::

        actor = TransformersWrapper(model, tokenizer=tokenizer, replay="R3")
        log_probs, entropy, _ = actor.score(td)  # [B, T], padded on the left
        loss = GRPOLoss(actor)(td)
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        input_mode: str = "tokens",
        generate: bool = False,
        replay: Literal["R3", "R2", "none"] = "R3",
        temperature: float | None = None,
        pad_model_input: bool | None = None,
        measure_agreement: bool = False,
        on_bad_routes: OnBadRoutes = "raise",
        rerecord: bool = False,
        router_replay: RouterReplay | None = None,
        input_key: NestedKey | None = None,
        inplace: bool | Literal["empty"] = True,
        tokens_key: str = "tokens",
        masks_key: str = "masks",
        log_probs_key: str = "log_probs",
        routed_experts_key: str = "routed_experts",
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        _refuse(arguments)
        self.model: nn.Module = _model_of(model)
        self.router_replay = router_replay
        if replay != "none" and router_replay is None:
            self.router_replay = RouterReplay.of(self.model)
        self.scoring_model = ScoringModel(self.model)
        self._arguments = {**arguments, "model": self.model, "router_replay": self.router_replay}
        self.tokenizer, self.input_mode, self.generate, self.inplace = tokenizer, input_mode, False, inplace
        self.replay, self.temperature, self.pad_model_input = replay, temperature, pad_model_input
        self.measure_agreement, self.on_bad_routes, self.rerecord = measure_agreement, on_bad_routes, rerecord
        self.tokens_key, self.masks_key, self.log_probs_key = tokens_key, masks_key, log_probs_key
        self.routed_experts_key = routed_experts_key
        self.input_key = (tokens_key, "full") if input_key is None else input_key
        self.in_keys = [self.input_key, *([(routed_experts_key, "full")] if replay == "R3" else [])]
        self.out_keys = [log_probs_key, *(["routing"] if replay != "none" else [])]
        self.out_keys += [RECORDED] if replay == "R2" else []
        self._has_warned = self._has_warned_of_routes = self._has_warned_of_sums = False
        # what TorchRL's base class reads
        self.num_samples, self.layout, self.pad_output = None, None, True
        self._min_batch_size = self._max_batch_size = self._batching_lock = None
        self._batch_queue: list[Any] = []
        self._futures: list[Any] = []

    @property
    def device(self) -> torch.device:
        """Where the model computes, which may not be where its parameters are."""
        return computing_device(self.model)

    def get_new_version(self, **kwargs: Any) -> TransformersWrapper:
        """Return a wrapper of the same model with some arguments changed and all others kept.

        The handle on its routers is shared; another ``model`` gets one of its own.
        """
        unknown = sorted(set(kwargs) - set(self._arguments))
        if unknown:
            raise TypeError(f"get_new_version got unknown arguments {unknown}; known: {sorted(self._arguments)}")
        same = kwargs.get("model", self.model) is self.model
        new = type(self)(**{**self._arguments, **({} if same else {"router_replay": None}), **kwargs})
        if same:
            new.scoring_model = self.scoring_model
            self._arguments["router_replay"] = new.router_replay  # a model has one, whichever version made it
        return new

    def reference(self, model: Any = None, *, replay: bool = False) -> TransformersWrapper:
        """Return a wrapper of the reference policy, which is not trained.

        Args:
            model: its model, a folder or a hub name; default a copy of this one's as it is now. Is frozen.
            replay: make it follow the experts that this wrapper follows (the engine's, or under R2 those that this
                wrapper has recorded), instead of choosing its own. It records none.

        Raises:
            ValueError: ``replay`` of a wrapper that does not replay, or this wrapper's own model.
        """
        if model is self.model:
            raise ValueError("reference(model=...) freezes its model, and this one is trained: leave it out for a copy")
        if replay and self.replay == "none":
            raise ValueError("reference(replay=True) follows the routes of this wrapper, which has replay='none'")
        frozen = copy.deepcopy(self.model) if model is None else _model_of(model)
        frozen.eval().requires_grad_(False)
        key = RECORDED if self.replay == "R2" else self.routed_experts_key
        return self.get_new_version(model=frozen, replay="R3" if replay else "none", routed_experts_key=key)

    # -- scoring ----------------------------------------------------------------------------------------------------

    def score(
        self, td: TensorDictBase, router_logits: bool = False, entropy: bool = True, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs, entropies and router logits of every token, in one forward pass.

        No logits ``[B, T, V]`` are made, see :class:`~torchrl_moe.modules.policies.scoring_model.ScoringModel`.

        Args:
            td: batch size ``[B]``, dense or lazily stacked; gets ``"routing"``, and the recorded routes under R2.
            router_logits: whether to return the routers' logits.
            entropy: whether to compute entropies.
            mask: bool ``[B, T]``, laid out as what is returned: the tokens whose scores will be read. Those of others
                are not computed, and 0. Default: all attended tokens.

        Returns:
            float32 ``[B, T]``, ``[B, T]`` or ``None``, ``[B, T, L, E]`` or ``None``; sequences of a lazy stack are
            padded on the left. Log-probs and entropies are of token t given those before it, at the temperature and
            over the words that it was sampled from; 0 on pads and on first tokens. Router logits are the live router's
            for token t as input, whatever is replayed and whatever ``mask``
            says; 0 on pads and on layers without a router.

        Raises:
            RoutingError: the routes that ``replay`` asks for are not there, or do not fit.
            UnsupportedRouterError: the model returns no router logits.
            ValueError: a mask of another shape, or a batch that was sampled otherwise, see ``temperature``.
        """
        batch = self._batch(td)
        wanted = batch.scored
        if mask is not None:
            _checks.check_shape("mask", mask.shape, tuple(wanted.shape), hint="It is laid out as the padded tokens.")
            wanted = wanted & mask.bool().to(wanted.device)
        self.scoring_model.check()
        self._warn_of_sums()
        layout = self._layout(batch)
        selection = Selection.of(batch, layout, wanted, self._sampled_from(td, batch), entropy)
        with self._routed(td, batch, layout):
            log_probs, spread, routers = self.scoring_model(layout.inputs, selection, router_logits)
        blank = log_probs.new_zeros(wanted.shape)
        return (
            blank.masked_scatter(wanted, log_probs),
            None if spread is None else blank.masked_scatter(wanted, spread),
            self._router_logits(routers, layout) if router_logits else None,
        )

    def _batch(self, td: TensorDictBase) -> ScoringBatch:
        return read_batch(td, self.input_key, (self.masks_key, "all_attention_mask")).to(self.device)

    def _sampled_from(self, td: TensorDictBase, batch: ScoringBatch) -> SampledFrom:
        if self.temperature is None and not self._has_warned:
            unsaid = says_nothing(td, (self.log_probs_key, "full"))
            if unsaid is not None:
                self._has_warned = True
                warnings.warn(UNSAID.format(unsaid), stacklevel=3)
        return read_sampling(td, batch, self.temperature)

    def _warn_of_sums(self) -> None:
        name = summed_again(self.scoring_model.language_model) if torch.is_grad_enabled() else ""
        if name and not self._has_warned_of_sums:
            self._has_warned_of_sums = True
            warnings.warn(
                f"{name} has a gradient already, and transformers will sum it over tensor-parallel ranks once more in "
                "the next backward pass: gradients of norms become too large. Run one backward pass for each step, or "
                "keep these gradients aside in between.",
                stacklevel=3,
            )

    def _layout(self, batch: ScoringBatch) -> Layout:
        masked = self.scoring_model.sees_pads  # asked first: under FSDP all ranks find out together, whatever they have
        if self.pad_model_input:
            return batch.padded(masked)
        packs = self.scoring_model.packs
        if self.pad_model_input is False:
            if not packs:
                raise ValueError(
                    f"pad_model_input=False: sequences in one row see each other in {type(self.model).__name__}. Leave "
                    "it at None."
                )
            return batch.packed()
        if not packs:
            return batch.padded(masked)
        longest = max(1, int(batch.mask.sum(-1).max()))
        packed = batch.packed(None if self.scoring_model.packs_in_one_row else longest)
        padded = batch.padded(masked)
        return packed if packed.shape.numel() < padded.shape.numel() else padded

    @contextmanager
    def _routed(self, td: TensorDictBase, batch: ScoringBatch, layout: Layout) -> Iterator[None]:
        """Make the forward pass inside follow the routes that ``replay`` asks for; write what it did."""
        if self.router_replay is None or self.replay == "none":
            self._warn_of_routes(td)
            yield
        elif self.replay == "R2" and not torch.is_grad_enabled() and (self.rerecord or not has_recorded(td)):
            with self.router_replay.record() as recording:
                yield
            write_recorded(td, batch, layout.read(recording.routed_experts.flatten(0, 1)))
        else:
            routes = self._routes(td, batch)
            packing = Packing(layout.index, (layout.shape[0], layout.shape[1]))
            with self.router_replay.replay(routes, batch.mask, self.measure_agreement, self.on_bad_routes, packing):
                yield
            note_routing(td, batch, routes, self.router_replay.report(), self.router_replay.refused)

    def _warn_of_routes(self, td: TensorDictBase) -> None:
        """Say once that the experts an engine has recorded are not those that are trained."""
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        if trains and not self._has_warned_of_routes and samples_of(td, (self.routed_experts_key, "full")) is not None:
            self._has_warned_of_routes = True
            warnings.warn(UNUSED, stacklevel=5)  # where scores are asked for

    def _token_logits(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor:
        layout = self._layout(batch) if self.pad_model_input is False else batch.padded(self.scoring_model.sees_pads)
        with self._routed(td, batch, layout):
            output, _ = self.scoring_model.run(layout.inputs)
        sampled_from = self._sampled_from(td, batch)
        return sampled_from.truncate(align(layout.read(output.logits.flatten(0, 1)), sampled_from.temperatures), batch)

    def _routes(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor:
        assert self.router_replay is not None
        key = (self.routed_experts_key if self.replay == "R3" else RECORDED, "full")
        tail = (self.router_replay.num_layers, self.router_replay.top_k)
        routes = read_routes(td, key, batch, tail, self.on_bad_routes)
        if routes is None:
            raise no_routes("R3" if self.replay == "R3" else "R2", key)
        return routes

    @cached_property
    def _router_layers(self) -> tuple[int, ...]:
        """Decoder layers that have a router; runs a small forward pass where no handle knows them."""
        if self.router_replay is not None:
            return self.router_replay.layers
        return tuple(site.layer for site in discover(self.model))

    def _router_logits(self, given: tuple[Tensor, ...] | None, layout: Layout) -> Tensor:
        if not given:
            raise UnsupportedRouterError(f"{type(self.model).__name__} returns no router logits: score without them")
        if bool(((given[0].float().sum(-1) - 1).abs() < 1e-3).all()):
            raise UnsupportedRouterError(
                f"{type(self.model).__name__} returns its routers' probabilities as their logits: score without them"
            )
        out = given[0].new_zeros(*layout.mask.shape, number_of_layers(self.model), given[0].shape[-1])
        for layer, logits in zip(self._router_layers, given, strict=True):
            out[:, :, layer] = layout.read(logits.reshape(layout.shape.numel(), -1))
        return out

    # -- TorchRL's side ---------------------------------------------------------------------------------------------

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]
    def forward(
        self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None, logits_only: bool = False
    ) -> TensorDictBase:
        """Write the log-probs of every token, ``(log_probs_key, "full")``, as long as the sample's tokens.

        Args:
            tensordict: of any batch size.
            tensordict_out: where to write, instead of what ``inplace`` says.
            logits_only: write ``"logits"`` ``[B, T, V]`` instead, padded on the left: row t is of token t's own
                distribution, as TorchRL has them.
        """
        samples = list(tensordict.reshape(-1).unbind(0)) if tensordict.ndim else [tensordict]
        batch_td = tensordict.copy() if tensordict.ndim == 1 else lazy_stack(samples).copy()
        if logits_only:
            batch_td.set("logits", self._token_logits(batch_td, self._batch(batch_td)))
        else:
            log_probs = self.score(batch_td, entropy=False)[0].to(batch_td.device or "cpu")
            rows = self._batch(batch_td).split(log_probs)
            batch_td.set(self.log_probs_key, lazy_stack([LogProbs(full=row, padded=False) for row in rows]))
        keys = ["logits"] if logits_only else self.out_keys
        written = batch_td.select(*keys, strict=False)
        if tensordict.ndim != 1:
            written = stack_answers(written.unbind(0), tensordict.batch_size)
        target = tensordict_out
        if target is None:
            target = tensordict if self.inplace is True else tensordict.empty()
        for key in written.keys():  # noqa: SIM118  a TensorDict iterates over its batch
            target.set(key, written.get(key))
        return target


def _refuse(arguments: dict[str, Any]) -> None:
    """Refuse what cannot be meant, before a model is loaded."""
    if arguments["generate"]:
        raise ValueError("TransformersWrapper(generate=True): it only scores. vLLMWrapper generates.")
    for name, allowed in (("replay", REPLAYS), ("on_bad_routes", ON_BAD_ROUTES)):
        if arguments[name] not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {arguments[name]!r}")
    if arguments["input_mode"] != "tokens":
        raise ValueError(
            f"input_mode={arguments['input_mode']!r}: encoding text again may give other tokens than those that were "
            "generated and routed. Use input_mode='tokens', which reads ('tokens', 'full') of the rollout."
        )
    if arguments["temperature"] is not None and not arguments["temperature"] > 0:
        raise ValueError(f"temperature must be positive, got {arguments['temperature']}")


def _model_of(model: Any) -> nn.Module:
    if isinstance(model, str | os.PathLike):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, a folder or a hub name, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(f"{type(model).__name__} hides its model: give its module, and use fully_shard for ranks")
    reason = refused_parallelism(model)
    if reason:
        raise TypeError(f"{type(model).__name__} cannot be scored under {reason}")
    return model
