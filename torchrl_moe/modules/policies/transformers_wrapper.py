"""``TransformersWrapper``: scores rollouts with a stock transformers model that follows the recorded experts.

TorchRL's name and keys; it scores and never generates. Which experts the forward pass uses is one switch:

- ``"R3"``: those of the rollout engine, ``("routed_experts", "full")`` (arXiv 2510.11370);
- ``"R2"``: those of this model's own forward under ``no_grad``, recorded to ``("train_routed_experts", "full")`` and
  replayed under grad (arXiv 2512.01374);
- ``"none"``: the live router's.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack, set_list_to_stack
from torch import Tensor, nn
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.llm.policies import LLMWrapperBase, LogProbs

from torchrl_moe._errors import UnsupportedRouterError
from torchrl_moe.modules.policies.rollout import stack_answers
from torchrl_moe.modules.policies.routes import (
    RECORDED,
    jagged_routes,
    no_routes,
    note_routing,
    read_routes,
    write_recorded,
)
from torchrl_moe.modules.policies.scoring import (
    ScoringBatch,
    align,
    check_dense,
    missing,
    pad_left,
    read_batch,
    read_rows,
    token_scores,
)
from torchrl_moe.modules.replay.discovery import discover, number_of_layers
from torchrl_moe.modules.replay.incoming import ON_BAD_ROUTES, OnBadRoutes
from torchrl_moe.modules.replay.router_replay import RouterReplay

__all__ = ["TransformersWrapper"]

REPLAYS = ("R3", "R2", "none")


class TransformersWrapper(LLMWrapperBase):
    """Scores tokens with a transformers model.

    Args:
        model: a model for causal language modelling, or a folder or hub name.
        tokenizer: only its pad token is used; may be ``None``.
        input_mode: must be ``"tokens"``: rendering a chat anew may give other tokens than those the routes belong to.
        generate: must be false; :class:`vLLMWrapper` generates.
        replay: which experts to use, see above.
        temperature: that of sampling; the logits are divided by it, as the engine does for its log-probs.
        pad_model_input: run a padded batch (default), or pack all sequences into one row.
        measure_agreement: also compute the live router's choice, for ``("routing", "agreement")``.
        on_bad_routes: what to do about a sample whose routes are wrong: ``"raise"``, or run it on the ``"live"`` router
            and count its tokens in ``("routing", "fallback")``.
        router_replay: a handle that the model has already.
        input_key: where the tokens are; default ``("tokens", "full")``.
        inplace: write into the input (default), or into a new TensorDict (``False`` or ``"empty"``).
        tokens_key, masks_key, log_probs_key, routed_experts_key: where to read and write.

    Raises:
        UnsupportedRouterError: replay of a model without routers, or with one that cannot be replayed exactly.

    The reference policy comes from :meth:`reference`, and is native unless told to replay.

    Example::

        actor = TransformersWrapper(model, tokenizer=tokenizer, replay="R3", temperature=0.7)
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
        temperature: float = 1.0,
        pad_model_input: bool = True,
        measure_agreement: bool = False,
        on_bad_routes: OnBadRoutes = "raise",
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
            self.router_replay = RouterReplay(self.model)
        self._arguments = {**arguments, "model": self.model, "router_replay": self.router_replay}
        self.tokenizer, self.input_mode, self.generate, self.inplace = tokenizer, input_mode, False, inplace
        self.replay, self.temperature, self.pad_model_input = replay, temperature, pad_model_input
        self.measure_agreement, self.on_bad_routes = measure_agreement, on_bad_routes
        self.tokens_key, self.masks_key, self.log_probs_key = tokens_key, masks_key, log_probs_key
        self.routed_experts_key = routed_experts_key
        self.input_key = (tokens_key, "full") if input_key is None else input_key
        self.in_keys = [self.input_key, *([(routed_experts_key, "full")] if replay == "R3" else [])]
        self.out_keys = [log_probs_key, *(["routing"] if replay != "none" else [])]
        self.out_keys += [RECORDED] if replay == "R2" else []
        # what TorchRL's base class reads
        self.num_samples, self.layout, self.pad_output = None, None, True
        self._min_batch_size = self._max_batch_size = self._batching_lock = None
        self._batch_queue: list[Any] = []
        self._futures: list[Any] = []

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(self.model.parameters()).device

    def get_new_version(self, **kwargs: Any) -> TransformersWrapper:
        """Return a wrapper of the same model with some arguments changed and all others kept.

        The handle on its routers is shared; another ``model`` gets one of its own.
        """
        unknown = sorted(set(kwargs) - set(self._arguments))
        if unknown:
            raise TypeError(f"get_new_version got unknown arguments {unknown}; known: {sorted(self._arguments)}")
        own = {"router_replay": None} if kwargs.get("model", self.model) is not self.model else {}
        return type(self)(**{**self._arguments, **own, **kwargs})

    def reference(self, model: Any = None, *, replay: bool = False) -> TransformersWrapper:
        """Return a wrapper of the reference policy, which is not trained.

        Args:
            model: its model, a folder or a hub name; default a copy of this one's as it is now. Is frozen.
            replay: make it follow the experts that this wrapper follows (the engine's, or under R2 those that this
                wrapper has recorded), instead of choosing its own. It records none.

        Raises:
            ValueError: ``replay`` of a wrapper that does not replay.
        """
        if replay and self.replay == "none":
            raise ValueError("reference(replay=True) follows the routes of this wrapper, which has replay='none'")
        frozen = copy.deepcopy(self.model) if model is None else _model_of(model)
        frozen.eval().requires_grad_(False)
        key = RECORDED if self.replay == "R2" else self.routed_experts_key
        return self.get_new_version(model=frozen, replay="R3" if replay else "none", routed_experts_key=key)

    # -- scoring ----------------------------------------------------------------------------------------------------

    def score(
        self, td: TensorDictBase, router_logits: bool = False, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs, entropies and router logits of every token, in one forward pass.

        Args:
            td: batch size ``[B]``, dense or lazily stacked; gets ``"routing"``, and the recorded routes under R2.
            router_logits: whether to return the routers' logits.
            entropy: whether to compute entropies.

        Returns:
            float32 ``[B, T]``, ``[B, T]`` or ``None``, ``[B, T, L, E]`` or ``None``; sequences of a lazy stack are
            padded on the left. Log-probs are of token t given those before it, at the sampling temperature; 0 on pads
            and on first tokens.

        Raises:
            RoutingError: the routes that ``replay`` asks for are not there, or do not fit.
        """
        batch = self._batch(td)
        output, logits = self._run(td, batch, router_logits)
        log_probs, spread = token_scores(logits, batch.ids, self.temperature, entropy)
        log_probs = log_probs.masked_fill(~batch.scored, 0.0)
        spread = None if spread is None else spread.masked_fill(~batch.scored, 0.0)
        return log_probs, spread, self._router_logits(output, batch) if router_logits else None

    def _batch(self, td: TensorDictBase) -> ScoringBatch:
        return read_batch(td, self.input_key, (self.masks_key, "all_attention_mask")).to(self.device)

    def _run(self, td: TensorDictBase, batch: ScoringBatch, router_logits: bool = False) -> tuple[Any, Tensor]:
        """Run the model under the routes that ``replay`` asks for; return its output and the logits ``[B, T, V]``."""
        inputs = batch.padded_inputs() if self.pad_model_input else batch.packed_inputs()
        recording = self.replay == "R2" and not torch.is_grad_enabled()
        routes = None if recording else self._routes(td, batch)
        context: Any = nullcontext()
        if self.router_replay is not None and recording:
            context = self.router_replay.record()
        elif self.router_replay is not None and routes is not None:
            laid_out = routes if self.pad_model_input else jagged_routes(routes, batch)
            context = self.router_replay.replay(
                laid_out, inputs.get("attention_mask"), self.measure_agreement, self.on_bad_routes
            )
        with context as recorded:
            extra = {"output_router_logits": True} if router_logits else {}
            output = self.model(**inputs, use_cache=False, **extra)
        if recording:
            own = recorded.routed_experts
            write_recorded(td, batch, own if self.pad_model_input else batch.unpack(own))
        elif routes is not None:
            assert self.router_replay is not None
            note_routing(td, batch, routes, self.router_replay.report(), self.router_replay.refused)
        logits = output.logits if self.pad_model_input else batch.unpack(output.logits)
        return output, logits

    def _routes(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor | None:
        if self.router_replay is None or self.replay == "none":
            return None
        key = self.routed_experts_key if self.replay == "R3" else RECORDED
        tail = (self.router_replay.num_layers, self.router_replay.top_k)
        routes = read_routes(td, (key, "full"), batch, tail, self.on_bad_routes)
        if routes is None:
            raise no_routes(self.replay, (key, "full"))
        return routes

    @cached_property
    def _router_layers(self) -> tuple[int, ...]:
        """Decoder layers that have a router; runs a small forward pass where no handle knows them."""
        if self.router_replay is not None:
            return self.router_replay.layers
        return tuple(site.layer for site in discover(self.model))

    def _router_logits(self, output: Any, batch: ScoringBatch) -> Tensor:
        given = getattr(output, "router_logits", None)
        if not given:
            raise UnsupportedRouterError(f"{type(self.model).__name__} returns no router logits: score without them")
        out = given[0].new_zeros(*batch.mask.shape, number_of_layers(self.model), given[0].shape[-1])
        for layer, logits in zip(self._router_layers, given, strict=True):
            rows = logits.view(*batch.mask.shape, -1) if self.pad_model_input else batch.unpack(logits[None])
            out[:, :, layer] = rows
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

    def _token_logits(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor:
        return align(self._run(td, batch)[1], self.temperature)

    def _dist(self, td: TensorDictBase, mask_key: NestedKey | None) -> LLMMaskedCategorical:
        """Return the dense distributions of all tokens, or of those that the mask at ``mask_key`` names."""
        if mask_key is None:
            return self._masked_dist(td, None)
        mask = read_rows(td, mask_key, False, self._batch(td).lengths)
        if mask is None:
            raise missing(td, mask_key)
        return self._masked_dist(td, mask)

    def _masked_dist(self, td: TensorDictBase, mask: Tensor | None) -> LLMMaskedCategorical:
        batch = self._batch(td)
        if mask is not None and mask.shape != batch.mask.shape:
            raise ValueError(f"the mask has shape {list(mask.shape)}, the padded tokens have {list(batch.mask.shape)}")
        keep = batch.scored if mask is None else mask.to(batch.mask.device).bool() & batch.scored
        return LLMMaskedCategorical(logits=self._token_logits(td, batch), mask=keep)

    def get_dist(
        self,
        tensordict: TensorDictBase,
        tensordict_out: None = None,
        logits_key: NestedKey = "logits",
        mask_key: NestedKey | None = None,
        as_padded_tensor: bool | None = None,
        as_nested_tensor: bool | None = None,
        padding_value: float | None = None,
        padding_side: str = "left",
        layout: torch.layout | None = None,
    ) -> LLMMaskedCategorical:
        """Return the distributions of all tokens, or of those that the mask at ``mask_key`` names.

        They are dense, padded on the left, and nothing is written: the other arguments are TorchRL's, and must not ask
        for anything else.

        Raises:
            KeyError: there is no mask at ``mask_key``.
            ValueError: another layout was asked for.
        """
        check_dense(logits_key, padding_side)
        if tensordict_out is not None or as_nested_tensor or as_padded_tensor is False:
            raise ValueError(
                "get_dist returns dense distributions and writes nothing: leave tensordict_out, as_nested_tensor and "
                "as_padded_tensor out"
            )
        if padding_value not in (None, 0.0) or layout not in (None, torch.strided):
            raise ValueError(f"pads are masked out and dense, got padding_value={padding_value}, layout={layout}")
        return self._dist(tensordict, mask_key)

    def _get_dist_with_prompt_mask(
        self,
        tensordict: TensorDictBase,
        tokens_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        assistant_mask_key: NestedKey | None = None,
        attention_mask_key: NestedKey | None = None,
        padding_side: str = "left",
    ) -> LLMMaskedCategorical:
        """Return those of the tokens that follow the prompt; without a prompt, those of the assistant."""
        prompts = tensordict.get(tokens_key or (self.tokens_key, "prompt"), None, as_list=True)
        if prompts is None:
            return self._get_dist_with_assistant_mask(tensordict, assistant_mask_key, logits_key, padding_side)
        check_dense(logits_key, padding_side)
        batch = self._batch(tensordict)
        rows = [torch.arange(length) >= len(p) for length, p in zip(batch.lengths, prompts, strict=True)]
        mask = pad_left(rows, False)
        if attention_mask_key is not None:
            attended = read_rows(tensordict, attention_mask_key, False, batch.lengths)
            mask = mask if attended is None else mask & attended.bool().to(mask.device)
        return self._masked_dist(tensordict, mask)

    def _get_dist_with_assistant_mask(
        self,
        tensordict: TensorDictBase,
        assistant_mask_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        padding_side: str = "left",
    ) -> LLMMaskedCategorical:
        check_dense(logits_key, padding_side)
        return self._dist(tensordict, assistant_mask_key or (self.masks_key, "all_assistant_mask"))

    def _get_dist_with_attention_mask(
        self,
        tensordict: TensorDictBase,
        attention_mask_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        padding_side: str = "left",
    ) -> LLMMaskedCategorical:
        check_dense(logits_key, padding_side)
        return self._dist(tensordict, attention_mask_key)

    def _get_dist_with_custom_mask(
        self, tensordict: TensorDictBase, mask: Tensor, logits_key: NestedKey = "logits", padding_side: str = "left"
    ) -> LLMMaskedCategorical:
        check_dense(logits_key, padding_side)
        return self._masked_dist(tensordict, mask)


def _refuse(arguments: dict[str, Any]) -> None:
    """Refuse what cannot be meant, before a model is loaded."""
    if arguments["generate"]:
        raise ValueError("TransformersWrapper(generate=True): it only scores. vLLMWrapper generates.")
    for name, allowed in (("replay", REPLAYS), ("on_bad_routes", ON_BAD_ROUTES)):
        if arguments[name] not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {arguments[name]!r}")
    if arguments["input_mode"] != "tokens":
        raise ValueError(
            f"input_mode={arguments['input_mode']!r}: encoding text anew may give other tokens than those that were "
            "generated and routed. Use input_mode='tokens', which reads ('tokens', 'full') of the rollout."
        )
    if not arguments["temperature"] > 0:
        raise ValueError(f"temperature must be positive, got {arguments['temperature']}")


def _model_of(model: Any) -> nn.Module:
    if isinstance(model, str | os.PathLike):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, a folder or a hub name, got {type(model).__name__}")
    return model
