"""``TransformersWrapper``: scores rollouts with a stock transformers model that follows the recorded experts.

TorchRL's name and keys; it scores and never generates. Which experts the forward pass uses is one switch:

- ``"R3"``: those of the rollout engine, ``("routed_experts", "full")`` (arXiv 2510.11370);
- ``"R2"``: those of this model's own forward under ``no_grad``, recorded to ``("train_routed_experts", "full")`` and
  replayed under grad (arXiv 2512.01374);
- ``"none"``: the live router's.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack, set_list_to_stack
from torch import Tensor, nn
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.llm.policies import LLMWrapperBase, LogProbs

from torchrl_moe._errors import ReplayError
from torchrl_moe.data import UNSET_EXPERT, RoutedExperts
from torchrl_moe.modules.policies.scoring import ScoringBatch, read_batch, read_rows, token_scores
from torchrl_moe.modules.replay.router_replay import Recording, RouterReplay

__all__ = ["TransformersWrapper"]

REPLAYS = ("R3", "R2", "none")
RECORDED = "train_routed_experts"


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
        router_replay: a handle that the model has already.
        input_key: where the tokens are; default ``("tokens", "full")``.
        inplace: write into the input (default), or a new TensorDict (``False``).
        tokens_key, masks_key, log_probs_key, routed_experts_key: where to read and write.

    Raises:
        UnsupportedRouterError: replay of a model without routers, or with one that cannot be replayed exactly.

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
        router_replay: RouterReplay | None = None,
        input_key: NestedKey | None = None,
        inplace: bool = True,
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
        self.measure_agreement = measure_agreement
        self.tokens_key, self.masks_key, self.log_probs_key = tokens_key, masks_key, log_probs_key
        self.routed_experts_key = routed_experts_key
        self.input_key = (tokens_key, "full") if input_key is None else input_key
        self.in_keys = [self.input_key, *([(routed_experts_key, "full")] if replay == "R3" else [])]
        self.out_keys = [log_probs_key, *(["routing"] if replay != "none" else [])]
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
        """Return a wrapper of the same model with some arguments changed and all others kept."""
        unknown = sorted(set(kwargs) - set(self._arguments))
        if unknown:
            raise TypeError(f"get_new_version got unknown arguments {unknown}; known: {sorted(self._arguments)}")
        return type(self)(**{**self._arguments, **kwargs})

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
            ReplayError: the routes that ``replay`` asks for are not there, or do not fit.
        """
        batch = self._batch(td)
        output, logits = self._run(td, batch, router_logits)
        log_probs, spread = token_scores(logits, batch.ids, self.temperature, entropy)
        log_probs = log_probs.masked_fill(~batch.scored, 0.0)
        spread = None if spread is None else spread.masked_fill(~batch.scored, 0.0)
        return log_probs, spread, self._router_logits(output, batch) if router_logits else None

    def _batch(self, td: TensorDictBase) -> ScoringBatch:
        batch = read_batch(td, self.input_key, (self.masks_key, "all_attention_mask"))
        return ScoringBatch(batch.ids.to(self.device), batch.mask.to(self.device))

    def _run(self, td: TensorDictBase, batch: ScoringBatch, router_logits: bool = False) -> tuple[Any, Tensor]:
        """Run the model under the routes that ``replay`` asks for; return its output and the logits ``[B, T, V]``."""
        inputs = batch.padded_inputs() if self.pad_model_input else batch.packed_inputs()
        recording = self.replay == "R2" and not torch.is_grad_enabled()
        routes = None if recording else self._routes(td, batch)
        context: Any = nullcontext()
        if self.router_replay is not None and recording:
            context = self.router_replay.record()
        elif self.router_replay is not None and routes is not None:
            laid_out = routes if self.pad_model_input else routes[batch.mask][None]
            context = self.router_replay.replay(laid_out, inputs.get("attention_mask"), self.measure_agreement)
        with context as recorded:
            extra = {"output_router_logits": True} if router_logits else {}
            output = self.model(**inputs, use_cache=False, **extra)
        if recording:
            self._keep(td, batch, recorded)
        elif routes is not None:
            self._note(td, batch, routes)
        logits = output.logits if self.pad_model_input else batch.unpack(output.logits)
        return output, logits

    def _routes(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor | None:
        if self.replay == "none":
            return None
        key = (self.routed_experts_key if self.replay == "R3" else RECORDED, "full")
        routes = read_rows(td, key, UNSET_EXPERT)
        if routes is None and self.replay == "R3":
            raise ReplayError(
                f"replay='R3' needs {key!r}, which the input does not have: start the engine with route capture and "
                "keep the routes (vLLMWrapper(return_routed_experts=True)), or pass replay='none'"
            )
        if routes is None:
            raise ReplayError(f"replay='R2' needs {key!r}: score the batch once under torch.no_grad() to record it")
        if routes.shape[:2] != batch.ids.shape:
            raise ReplayError(f"{key!r} has {list(routes.shape[:2])} rows, the tokens have {list(batch.ids.shape)}")
        return routes.to(batch.ids.device)

    # -- what it writes about routing -------------------------------------------------------------------------------

    def _keep(self, td: TensorDictBase, batch: ScoringBatch, recording: Recording) -> None:
        """Write recorded routes, row by row as long as each sample's own tokens."""
        routes = recording.routed_experts
        routes = routes if self.pad_model_input else batch.unpack(routes)
        routes = routes.masked_fill(~batch.mask[..., None, None], UNSET_EXPERT).to(td.device or "cpu")
        lengths = [len(row) for row in td.get(self.input_key, as_list=True)]
        rows = [row[len(row) - length :] for row, length in zip(routes, lengths, strict=True)]
        td.set(RECORDED, lazy_stack([RoutedExperts(full=row) for row in rows]))

    def _note(self, td: TensorDictBase, batch: ScoringBatch, routes: Tensor) -> None:
        """Write how many rows ran on live routing, and how far the live router would have agreed."""
        assert self.router_replay is not None
        layers = list(self.router_replay.layers)
        live = (routes[..., layers, 0] == UNSET_EXPERT).any(-1) & batch.mask
        agreement = torch.full((len(routes), routes.shape[2]), float("nan"))
        for layer, figures in self.router_replay.report().items():
            if figures["agreement"] is not None:
                agreement[:, layer] = figures["agreement"]
        td.set(("routing", "fallback"), live.sum(-1).to(td.device or "cpu"))
        td.set(("routing", "agreement"), agreement.to(td.device or "cpu"))

    def _router_logits(self, output: Any, batch: ScoringBatch) -> Tensor:
        layers = range(len(output.router_logits)) if self.router_replay is None else self.router_replay.layers
        depth = max(layers) + 1 if self.router_replay is None else self.router_replay.num_layers
        first = output.router_logits[0]
        out = first.new_zeros(*batch.mask.shape, depth, first.shape[-1])
        for layer, logits in zip(layers, output.router_logits, strict=True):
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
            logits_only: write ``"logits"`` ``[B, T, V]`` instead, padded on the left.
        """
        if tensordict.ndim != 1:
            flat = lazy_stack([tensordict]) if not tensordict.ndim else tensordict.reshape(-1)
            out = self.forward(flat, tensordict_out=None, logits_only=logits_only)
            out = out[0] if not tensordict.ndim else out.view(tensordict.shape)
            return out if tensordict_out is None else tensordict_out.update(out)
        target = tensordict if self.inplace else tensordict.copy()
        if logits_only:
            return target.set("logits", self._run(target, self._batch(target))[1])
        log_probs = self.score(target, entropy=False)[0].to(target.device or "cpu")
        lengths = [len(row) for row in target.get(self.input_key, as_list=True)]
        rows = [row[len(row) - length :] for row, length in zip(log_probs, lengths, strict=True)]
        entries = [LogProbs(full=row, padded=False) for row in rows]
        target.set(self.log_probs_key, lazy_stack(entries))
        return target if tensordict_out is None else tensordict_out.update(target.select(*self.out_keys, strict=False))

    def _masked_dist(self, tensordict: TensorDictBase, mask: Tensor | None = None) -> LLMMaskedCategorical:
        """Return the dense distributions, aligned so that row t scores token t, at the sampling temperature."""
        batch = self._batch(tensordict)
        _, logits = self._run(tensordict, batch)
        aligned = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1) / self.temperature
        keep = batch.scored if mask is None else mask.to(batch.mask.device) & batch.scored
        return LLMMaskedCategorical(logits=aligned.float(), mask=keep)

    def get_dist(self, tensordict: TensorDictBase, mask_key: NestedKey | None = None, **_: Any) -> LLMMaskedCategorical:
        """Return the distributions of all tokens, or of those that the mask at ``mask_key`` names."""
        return self._masked_dist(tensordict, None if mask_key is None else read_rows(tensordict, mask_key, False))

    def _get_dist_with_prompt_mask(self, tensordict: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        batch = self._batch(tensordict)
        prompts = tensordict.get((self.tokens_key, "prompt"), None, as_list=True)
        if prompts is None:
            return self._get_dist_with_assistant_mask(tensordict)
        responses = read_rows(tensordict, (self.masks_key, "all_assistant_mask"), False)
        if responses is not None:
            return self._masked_dist(tensordict, responses)
        mask = batch.mask.clone()
        for row, prompt in zip(mask, prompts, strict=True):
            row[row.nonzero()[: len(prompt), 0]] = False
        return self._masked_dist(tensordict, mask)

    def _get_dist_with_assistant_mask(self, tensordict: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        mask = read_rows(tensordict, (self.masks_key, "all_assistant_mask"), False)
        if mask is None:
            raise KeyError(f"no {(self.masks_key, 'all_assistant_mask')!r} in the input")
        return self._masked_dist(tensordict, mask)

    def _get_dist_with_attention_mask(self, tensordict: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        return self._masked_dist(tensordict)

    def _get_dist_with_custom_mask(self, tensordict: TensorDictBase, mask: Tensor, **_: Any) -> LLMMaskedCategorical:
        return self._masked_dist(tensordict, mask)


def _refuse(arguments: dict[str, Any]) -> None:
    """Refuse what cannot be meant, before a model is loaded."""
    if arguments["generate"]:
        raise ValueError("TransformersWrapper(generate=True): it only scores. vLLMWrapper generates.")
    if arguments["replay"] not in REPLAYS:
        raise ValueError(f"replay must be one of {REPLAYS}, got {arguments['replay']!r}")
    if arguments["input_mode"] != "tokens":
        raise ValueError(
            f"input_mode={arguments['input_mode']!r}: encoding text anew may give other tokens than those that were "
            "generated and routed. Use input_mode='tokens', which reads ('tokens', 'full') of the rollout."
        )
    if arguments["temperature"] <= 0:
        raise ValueError(f"temperature must be positive, got {arguments['temperature']}")


def _model_of(model: Any) -> nn.Module:
    if isinstance(model, str | os.PathLike):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, a folder or a hub name, got {type(model).__name__}")
    return model
