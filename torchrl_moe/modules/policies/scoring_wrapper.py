"""The scoring part of a wrapper: log-probs, entropies and router logits from a stock model that follows experts.

One argument, ``replay``, selects the experts that the forward pass uses:

- ``"R3"``: those of the rollout engine, ``("routed_experts", "full")`` (arXiv 2510.11370);
- ``"R2"``: those of this model's own first forward under ``no_grad``, recorded to ``("train_routed_experts", "full")``
  and replayed by every later one (arXiv 2512.01374);
- ``"none"``: those of the live router.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.modules.llm.policies import ChatHistory

from torchrl_moe import _checks
from torchrl_moe._errors import UnsupportedRouterError
from torchrl_moe.modules.policies.dense_distributions import DenseDistributions
from torchrl_moe.modules.policies.prompt_reading import Source
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
from torchrl_moe.modules.policies.text_scoring import (
    encode,
    log_prob_entry,
    mask_entry,
    refuse_other_tokens,
    token_entry,
    without_pads,
)
from torchrl_moe.modules.replay.discovery import discover, number_of_layers
from torchrl_moe.modules.replay.incoming import OnBadRoutes, Packing
from torchrl_moe.modules.replay.parallelism import computing_device, summed_again
from torchrl_moe.modules.replay.router_replay import RouterReplay

__all__ = ["ScoringWrapper"]


class ScoringWrapper(DenseDistributions):
    """Scores tokens with a transformers model.

    A subclass sets the attributes below, from arguments of the same names.
    """

    input_mode: str
    input_key: NestedKey
    source: Source
    pad_output: bool
    generate: bool
    text_key: str
    history_key: str
    model: nn.Module
    scoring_model: ScoringModel
    router_replay: RouterReplay | None
    replay: str
    temperature: float | None
    pad_model_input: bool | None
    measure_agreement: bool
    on_bad_routes: OnBadRoutes
    rerecord: bool
    log_probs_key: str
    routed_experts_key: str
    _has_warned = _has_warned_of_routes = _has_warned_of_sums = False
    # TorchRL's base class reads them: calls of several threads are not joined
    _min_batch_size = _max_batch_size = None

    def score(
        self, td: TensorDictBase, router_logits: bool = False, entropy: bool = True, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs, entropies and router logits of every token, in one forward pass.

        No logits ``[B, T, V]`` are made, see :class:`~torchrl_moe.modules.policies.scoring_model.ScoringModel`.

        Args:
            td: batch size ``[B]``, dense or lazily stacked; gets ``"routing"``, and the recorded routes under R2.
            router_logits: whether to return the routers' logits.
            entropy: whether to compute entropies.
            mask: bool ``[B, T]``, in the layout of the result: the tokens whose scores will be read. Other scores are
                not computed, and are 0. Default: all attended tokens.

        Returns:
            float32 ``[B, T]``, ``[B, T]`` or ``None``, ``[B, T, L, E]`` or ``None``; sequences of a lazy stack are
            padded on the left. Log-probs and entropies are of token t given those before it, at the temperature and
            over the words that it was sampled from; 0 on pads and on first tokens. Router logits are the live router's
            for token t as input, regardless of replay and of ``mask``; 0 on pads and on layers without a router.

        Raises:
            RoutingError: the routes that ``replay`` needs are missing, or do not fit.
            UnsupportedRouterError: the model returns no router logits.
            ValueError: a mask of another shape, or a batch that was sampled at another temperature, see
                ``temperature``.
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

    # -- what is read, and written ----------------------------------------------------------------------------------

    def _batch(self, td: TensorDictBase) -> ScoringBatch:
        """Return the tokens of ``td``; for chats and text, those already in it, otherwise those that they encode to."""
        if self.generate:
            raise _no_scores("this wrapper generates: get_new_version(generate=False) is one that scores")
        tokens, mask = self.input_key, (self.masks_key, "all_attention_mask")
        if self.input_mode != "tokens":
            tokens = (self.tokens_key, "full")
            if samples_of(td, tokens) is None:
                self._tokenize(td)
        elif samples_of(td, tokens) is None and (self.history_key, "full") in td.keys(True):
            raise KeyError(f"no {tokens!r}, and there are chats: input_mode='history', TorchRL's default, scores them")
        masks = (mask, self.source.attention_mask_key)
        found = next((key for key in masks if samples_of(td, key) is not None), None)
        batch = read_batch(td, tokens, found or mask)
        if found is None and self.source.pad is not None and not isinstance(td, LazyStackedTensorDict):
            batch = replace(batch, mask=without_pads(batch.ids, self.source.pad))
        return batch.to(computing_device(self.model))

    def _tokenize(self, td: TensorDictBase) -> None:
        """Write the tokens of chats or text into a batch ``[B]``, with the text that they were made from."""
        encoded = encode(td, self.source)
        refuse_other_tokens(td, self.tokens_key, encoded.ids)
        read = td.get(self.input_key)
        if self.input_mode == "history":
            td.set(self.text_key, encoded.text_entry())
            if self.input_key != (self.history_key, "full"):
                td.set(self.history_key, lazy_stack([ChatHistory(full=one) for one in read.unbind(0)]))
        elif self.input_key != (self.text_key, "full"):
            td.set(self.text_key, encoded.text_entry())
        own = samples_of(td, (self.tokens_key, "full"))
        alike = own is not None and all(
            row is not None and torch.equal(row.cpu(), ids) for row, ids in zip(own, encoded.ids, strict=True)
        )
        if not alike:
            td.set(self.tokens_key, token_entry(encoded.ids, None))
        assistant = encoded.assistant or (self._assistant(td) if alike else None)
        td.set(self.masks_key, mask_entry([torch.ones_like(ids).bool() for ids in encoded.ids], assistant, False))

    def _assistant(self, td: TensorDictBase) -> list[Tensor] | None:
        """Return the masks of the assistant's tokens, if all samples of a batch have one."""
        masks = samples_of(td, (self.masks_key, "all_assistant_mask"))
        rows = [] if masks is None else [row for row in masks if row is not None]
        return rows if len(rows) == len(td) else None

    def _scored(self, td: TensorDictBase) -> TensorDictBase:
        """Score a batch ``[B]``, and return the entries to write; they replace old ones."""
        if self.input_mode != "tokens":
            self._tokenize(td)
        log_probs = self.score(td, entropy=False)[0]
        device = torch.device(td.device or "cpu")
        batch, log_probs = self._batch(td).to(device), log_probs.to(device)
        # given rows of equal length are not changed
        made = self.pad_output and (self.input_mode != "tokens" or len(set(batch.lengths)) > 1)
        pad = (self.source.pad or 0) if self.pad_output else None
        tokens = (self.tokens_key, "full")
        if made or (self.input_mode == "tokens" and self.input_key != tokens):
            td.set(self.tokens_key, token_entry(batch.split(batch.ids), pad))
        if made or samples_of(td, (self.masks_key, "all_attention_mask")) is None:
            assistant = self._assistant(td)
            td.set(self.masks_key, mask_entry(batch.split(batch.mask), assistant, self.pad_output))
        td.set(self.log_probs_key, log_prob_entry(batch, log_probs, self.pad_output))
        return td.select(*self.out_keys, strict=False)

    def _logits(self, td: TensorDictBase) -> TensorDictBase:
        """Return the ``"logits"`` of a batch ``[B]``."""
        if self.input_mode != "tokens":
            self._tokenize(td)
        td.set("logits", self._token_logits(td, self._batch(td)))
        return td.select("logits")

    # -- how it is scored -------------------------------------------------------------------------------------------

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
        masked = self.scoring_model.sees_pads  # first: under FSDP all ranks must run this test together
        if self.pad_model_input:
            return batch.padded(masked)
        packs = self.scoring_model.packs
        if self.pad_model_input is False:
            if not packs:
                raise ValueError(
                    f"pad_model_input=False: sequences in one row attend to each other in {type(self.model).__name__}. "
                    "Leave it at None."
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
        """Make the forward pass inside follow the routes that ``replay`` selects; write what it did."""
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
        """Warn once that training does not use the experts that an engine has recorded."""
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
        if trains and not self._has_warned_of_routes and samples_of(td, (self.routed_experts_key, "full")) is not None:
            self._has_warned_of_routes = True
            warnings.warn(UNUSED, stacklevel=5)  # the caller's line

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
        """Decoder layers that have a router; runs a small forward pass if there is no ``RouterReplay``."""
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


def _no_scores(message: str) -> NotImplementedError:
    """Return the error that TorchRL's wrappers raise for distributions, if they generate."""
    return NotImplementedError(message)
