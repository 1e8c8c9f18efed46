"""The scoring part of a wrapper: log-probs, entropies and router logits from a stock model that follows experts.

One argument, ``replay``, selects the experts that the forward pass uses:

- ``"R3"``: those of the rollout engine, ``("routed_experts", "full")`` (arXiv 2510.11370);
- ``"R2"``: those of this model's own first forward under ``no_grad``, recorded to ``("train_routed_experts", "full")``
  and replayed by every later one (arXiv 2512.01374);
- ``"none"``: those of the live router.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorClass, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data.llm import History
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_moe import _checks
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.policies.prompts import (
    GENERATES,
    Chat,
    PolicyWrapper,
    no_distribution,
    prompts_from_text,
    require_key,
)
from torchrl_moe.modules.policies.rollout import SAMPLING
from torchrl_moe.modules.policies.scoring import (
    RECORDED,
    UNUSED,
    Layout,
    ScoringBatch,
    align,
    has_recorded,
    missing,
    note_routing,
    pad_left,
    read_batch,
    read_routes,
    read_rows,
    row_width,
    samples_of,
    write_recorded,
)
from torchrl_moe.modules.policies.scoring_model import (
    UNSAID,
    SampledFrom,
    ScoringModel,
    Selection,
    read_sampling,
    says_nothing,
)
from torchrl_moe.modules.replay.discovery import (
    RouterSite,
    computing_device,
    discover,
    number_of_layers,
    summed_again,
)
from torchrl_moe.modules.replay.router_replay import OnBadRoutes, Packing, RouterReplay

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Full sequences (prompt and answer) of every input kind, as both wrappers score them.
#
# Tokens keep their layout, padding included; text and chats are encoded, without padding. Letters: T tokens.


MARKS = re.compile(r"{%-?\s*generation\s*-?%}")
"""The markers of the assistant's text in a template."""
STAND_IN = "\u241ftorchrl_moe\u241f"


@dataclass(slots=True)
class FullSequence:
    """One sequence.

    Shapes:
        - ids: int64 ``[T]``
        - mask: bool ``[T]``, tokens that are not padding
        - assistant: bool ``[T]``, the assistant's tokens; ``None`` if that is not known

    ``text`` and ``history`` are what it was made from.
    """

    ids: Tensor
    mask: Tensor
    assistant: Tensor | None = None
    text: str | None = None
    history: History | None = None


def read_sequences(samples: Sequence[TensorDictBase], wrapper: PolicyWrapper) -> list[FullSequence]:
    """Read a sequence from each sample, batch size ``[]``.

    Tokens have the mask that is at the wrapper's ``masks_key``, or else at its ``attention_mask_key``. Without one,
    padding at both ends is ignored; if the pad token also ends turns, the first one after the tokens is real.
    """
    if wrapper.input_mode != "tokens":
        return encode(samples, wrapper)
    require_key(samples, wrapper.input_key, wrapper.input_mode)
    found = []
    for i, sample in enumerate(samples):
        ids, pad = sample.get(wrapper.input_key), wrapper._pad
        key = next((key for key in wrapper._mask_keys if sample.get(key, None) is not None), None)
        if key is not None:
            mask = sample.get(key)
            if mask.shape != ids.shape:
                raise ValueError(
                    f"sample {i}: {key!r} has shape {list(mask.shape)} and {wrapper.input_key!r} {list(ids.shape)}: "
                    "both must have been cut or padded alike, or take the mask out"
                )
            mask = _checks.as_mask(f"sample {i}: {key!r}", mask)
        elif pad is not None:
            mask = without_pads(ids, pad, wrapper._pad_ends_turns)
        else:
            mask = torch.ones_like(ids, dtype=torch.bool)
        found.append(FullSequence(ids, mask))
    return found


def without_pads(ids: Tensor, pad: int, ends_turns: bool = False) -> Tensor:
    """Return the mask, bool ``[*, T]``, of the tokens between the padding at both ends of each row.

    If the pad token also ends turns, the first one after the tokens is one of them.

    >>> without_pads(torch.tensor([[0, 0, 5, 0, 6], [7, 8, 0, 0, 0]]), 0).int().tolist()
    [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
    """
    real = ids != pad
    some_follow = real.flip(-1).cummax(-1).values.flip(-1)
    if ends_turns:
        some_follow[..., 1:] |= some_follow[..., :-1].clone()
    return real.cummax(-1).values & some_follow


def encode(samples: Sequence[TensorDictBase], wrapper: PolicyWrapper) -> list[FullSequence]:
    """Read the full text or chat of each sample, and encode it."""
    key = wrapper.input_key
    require_key(samples, key, wrapper.input_mode)
    if wrapper.input_mode == "text":
        given = lazy_stack(list(samples)).get(key)
        read = prompts_from_text(given, wrapper.tokenizer, wrapper.tokenizer_kwargs)
        rows = [torch.tensor(ids, dtype=torch.long) for ids in read.ids]
        return [
            FullSequence(ids, torch.ones_like(ids, dtype=torch.bool), text=text)
            for ids, text in zip(rows, read.texts, strict=True)
        ]
    found = []
    for sample in samples:
        history, options = Chat.of(sample.get(key), key).history, wrapper._template_options(sample)
        template = wrapper._template(options.get("tools"))
        found.append(_rendered(template, history, wrapper, options))
        if template is not None and wrapper.chat_template is None and wrapper.chat_template_name is None:
            # TorchRL's losses use the assistant mask of the template that it guesses: use the same one, if possible
            guessed = _rendered(None, history, wrapper, options)
            if torch.equal(found[-1].ids, guessed.ids):
                found[-1].assistant = guessed.assistant
    if any(one.assistant is None for one in found):  # a batch has all of them, or none
        found = [replace(one, assistant=None) for one in found]
    return found


def _rendered(
    template: str | None, history: History, wrapper: PolicyWrapper, options: Mapping[str, object]
) -> FullSequence:
    """Render a chat and encode it; ``None`` is the template that TorchRL guesses."""
    how = {"tokenizer": wrapper.tokenizer, "chat_template": template, "add_generation_prompt": False, **options}
    text = history.apply_chat_template(**how)
    marked = template is None or MARKS.search(template) is not None
    # without markers TorchRL takes the first occurrence of the text, which may be in a question
    tokens = history.apply_chat_template(
        **how, tokenize=True, padding=False, return_dict=True, return_assistant_tokens_mask=marked
    )
    ids = tokens.get("input_ids").long()
    if marked:
        mask = tokens.get("assistant_masks", None)
        assistant = None if mask is None else mask.bool()
    else:
        assistant = _spoken(history.tolist(tolist_first=True), wrapper.tokenizer, template, text, ids, options)
    return FullSequence(ids, torch.ones_like(ids, dtype=torch.bool), assistant, text, history)


def _spoken(
    chat: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    text: str,
    ids: Tensor,
    options: Mapping[str, object],
) -> Tensor | None:
    """Return which tokens are the assistant's text, bool ``[T]``; ``None`` if the template changes that text.

    Its position is found by rendering a placeholder instead of it.
    """
    turns = [turn for turn in chat if turn["role"] != "<none>"]  # of a ragged batch
    answers = [turn["content"] or "" for turn in turns if turn["role"] == "assistant"]
    texts = [one for one in answers if isinstance(one, str)]
    if len(texts) != len(answers) or not getattr(tokenizer, "is_fast", False):
        return None
    # render the chat with a placeholder for each answer: what is between the placeholders is the template's own text
    blank = [{**turn, "content": STAND_IN} if turn["role"] == "assistant" else turn for turn in turns]
    parts = tokenizer.apply_chat_template(
        blank, chat_template=template, tokenize=False, add_generation_prompt=False, **options
    ).split(STAND_IN)
    if len(parts) != len(texts) + 1:
        return None
    spans, place = [], 0
    # each answer must follow its part of the template in the real text, so that its position is known
    for part, answer in zip(parts, [*texts, ""], strict=True):
        begin = place + len(part)
        if text[place:begin] != part:
            return None
        answer = answer if text.startswith(answer, begin) else answer.strip()  # as many templates strip it
        if not text.startswith(answer, begin):
            return None
        place = begin + len(answer)
        spans.append((begin, place))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if place != len(text) or encoded["input_ids"] != ids.tolist():
        return None
    return torch.tensor([any(a < end and b > begin for begin, end in spans) for a, b in encoded["offset_mapping"]])


def refuse_other_tokens(td: TensorDictBase, tokens_key: str, ids: Sequence[Tensor]) -> None:
    """Refuse samples of truncated sampling whose text encodes to tokens other than those sampled.

    The kept tokens are known only for the sampled tokens.
    """
    for i, (sample, row) in enumerate(zip(td.unbind(0), ids, strict=True)):
        own, kept = sample.get((tokens_key, "full"), None), sample.get((SAMPLING, "kept"), None)
        if kept is not None and (own is None or not torch.equal(own.cpu(), row)):
            raise ValueError(
                f"sample {i} says which vocabulary entries each token was sampled from, and its text is encoded to "
                "other tokens: score it with input_mode='tokens', or exclude 'sampling'"
            )


def entry_of(kind: type[TensorClass], pad: float | None, **rows: Sequence[Tensor]) -> TensorClass:
    """Return an entry of a batch from rows ``[T]`` of each field: padded on the left, or a lazy stack for ``None``."""
    if pad is None:
        samples = zip(*rows.values(), strict=True)
        return lazy_stack([kind(**dict(zip(rows, sample, strict=True)), padded=False) for sample in samples])
    fields = {name: pad_left(of_field, pad) for name, of_field in rows.items()}
    return kind(**fields, padded=True, batch_size=[len(next(iter(rows.values())))])


class ScoringWrapper(PolicyWrapper):
    """Scores tokens with a transformers model.

    A subclass sets the attributes below, from arguments of the same names.
    """

    model: nn.Module
    scoring_model: ScoringModel
    router_replay: RouterReplay | None
    replay: Literal["R3", "R2", "none"]
    temperature: float | None
    pad_model_input: bool | int | None
    measure_agreement: bool
    on_bad_routes: OnBadRoutes
    rerecord: bool
    _has_warned = _has_warned_of_routes = _has_warned_of_sums = False

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
            over the kept tokens it was sampled from; 0 on pads and on first tokens. Router logits are the live router's
            for token t as input, regardless of replay and of ``mask``; 0 on pads and on layers without a router.

        Raises:
            RoutingError: the routes that ``replay`` needs are missing, or do not fit.
            UnsupportedRouterError: the model returns no router logits.
            ValueError: a mask of another shape; a batch that was sampled at another temperature, see ``temperature``;
                or, with gradients, router logits that reentrant checkpointing cut from the graph.
            KeyError: there are no tokens to score.
            NotImplementedError: the wrapper generates.
        """
        batch, width = self._batch(td), row_width(self.pad_model_input)
        if width is not None and len(batch.ids) > 1:
            return self._one_by_one(td, batch, router_logits, entropy, mask)
        wanted = batch.scored
        if mask is not None:
            _checks.check_shape("mask", mask.shape, tuple(wanted.shape), hint="It is laid out as the padded tokens.")
            wanted = wanted & mask.bool().to(wanted.device)
        # before any context is open: the first check runs the model
        self.scoring_model.check()
        summed = summed_again(self.scoring_model.language_model) if torch.is_grad_enabled() else ""
        if summed and not self._has_warned_of_sums:
            self._has_warned_of_sums = True
            warnings.warn(
                f"{summed} has a gradient already, and transformers will sum it over tensor-parallel ranks once more "
                "in the next backward pass: gradients of norms become too large. Run one backward pass for each step, "
                "or keep these gradients aside in between.",
                stacklevel=2,
            )
        # lay the tokens out for the model, select what is scored, and run it under the routes
        layout = self._layout(batch)
        selection = Selection.of(batch, layout, wanted, self._sampled_from(td, batch), entropy)
        with self._routed(td, batch, layout):
            if width is None:
                log_probs, spread, routers = self.scoring_model(layout.inputs, selection, router_logits)
            else:  # by the head's own product, as an engine makes its logits
                output, routers = self.scoring_model.run(layout.inputs, router_logits)
                log_probs, spread = selection.dense(output.logits.flatten(0, 1))
        # back into the batch's own layout
        blank = log_probs.new_zeros(wanted.shape)
        return (
            blank.masked_scatter(wanted, log_probs),
            None if spread is None else blank.masked_scatter(wanted, spread),
            self._router_logits(routers, layout) if router_logits else None,
        )

    def _one_by_one(
        self, td: TensorDictBase, batch: ScoringBatch, router_logits: bool, entropy: bool, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Score each sequence in a forward pass of its own, of one shape; return what :meth:`score` does."""
        rows = td if isinstance(td, LazyStackedTensorDict) else lazy_stack(list(td.unbind(0)))
        longest, parts = batch.ids.shape[1], []
        for i, length in enumerate(batch.lengths):
            own = None if mask is None else mask[i : i + 1, longest - length :]
            found = [one for one in self.score(rows[i : i + 1], router_logits, entropy, own) if one is not None]
            left = (longest - length, 0)
            parts.append([nn.functional.pad(one, (*((0, 0) * (one.ndim - 2)), *left)) for one in found])
        if rows is not td:  # what a pass writes is in samples of our own
            for key in ("routing", RECORDED):
                if (written := rows.get(key, None)) is not None:
                    td.set(key, written)
        joined = iter([torch.cat(one) for one in zip(*parts, strict=True)])
        return next(joined), next(joined) if entropy else None, next(joined) if router_logits else None

    # -- what is read, and written ----------------------------------------------------------------------------------

    def _batch(self, td: TensorDictBase) -> ScoringBatch:
        """Return the tokens of ``td``; for chats and text, those already in it, otherwise those that they encode to."""
        if self.generate:
            raise no_distribution(GENERATES)
        tokens = self.input_key
        if self.input_mode != "tokens":
            tokens = (self.tokens_key, "full")
            if samples_of(td, tokens) is None:
                self._tokenize(td)
        elif samples_of(td, tokens) is None and (self.history_key, "full") in td.keys(True):
            raise KeyError(f"no {tokens!r}, and there are chats: input_mode='history', TorchRL's default, scores them")
        found = next((key for key in self._mask_keys if samples_of(td, key) is not None), None)
        batch = read_batch(td, tokens, found or self._mask_keys[0])
        if found is None and self._pad is not None:
            ids = batch.ids.masked_fill(~batch.mask, self._pad)
            batch = replace(batch, mask=without_pads(ids, self._pad, self._pad_ends_turns))
        return batch.to(computing_device(self.model))

    def _tokenize(self, td: TensorDictBase) -> None:
        """Write the tokens of chats or text into a batch ``[B]``, with the text that they were made from."""
        encoded = encode(td.unbind(0), self)
        ids = [one.ids for one in encoded]
        refuse_other_tokens(td, self.tokens_key, ids)
        # the text, or the chat, stands beside the tokens that it became
        chats = self.input_mode == "history"
        if chats or self.input_key != (self.text_key, "full"):
            td.set(self.text_key, lazy_stack([Text(full=one.text) for one in encoded]))
        if chats and self.input_key != (self.history_key, "full"):
            td.set(self.history_key, lazy_stack([ChatHistory(full=one) for one in td.get(self.input_key).unbind(0)]))
        own = samples_of(td, (self.tokens_key, "full"))
        alike = own is not None and all(
            row is not None and torch.equal(row.cpu(), new) for row, new in zip(own, ids, strict=True)
        )
        if not alike:
            td.set(self.tokens_key, entry_of(Tokens, None, full=ids))
        # the mask of a rollout is of its own tokens, so it stays only with the same ones
        spoken = [one.assistant for one in encoded if one.assistant is not None]
        assistant = {"all_assistant_mask": spoken} if spoken else (self._assistant(td) if alike else {})
        td.set(self.masks_key, entry_of(Masks, None, all_attention_mask=[one.mask for one in encoded], **assistant))

    def _assistant(self, td: TensorDictBase) -> dict[str, list[Tensor]]:
        """Return the masks of the assistant's tokens, by their name, if all samples of a batch have one."""
        masks = samples_of(td, (self.masks_key, "all_assistant_mask"))
        rows = [] if masks is None else [row for row in masks if row is not None]
        return {"all_assistant_mask": rows} if len(rows) == len(td) else {}

    def _scored(self, td: TensorDictBase) -> TensorDictBase:
        """Score a batch ``[B]``, and return the entries to write; they replace old ones."""
        if self.input_mode != "tokens":
            self._tokenize(td)
        # score on the model's device, write on the batch's
        log_probs = self.score(td, entropy=False)[0]
        device = torch.device(td.device or "cpu")
        batch, log_probs = self._batch(td).to(device), log_probs.to(device)
        # given rows of equal length are not changed
        made = self.pad_output and (self.input_mode != "tokens" or len(set(batch.lengths)) > 1)
        pads = (self._pad or 0, False, 0.0) if self.pad_output else (None, None, None)
        if made or (self.input_mode == "tokens" and self.input_key != (self.tokens_key, "full")):
            td.set(self.tokens_key, entry_of(Tokens, pads[0], full=batch.split(batch.ids)))
        if made or samples_of(td, self._mask_keys[0]) is None:
            mask = batch.split(batch.mask)
            td.set(self.masks_key, entry_of(Masks, pads[1], all_attention_mask=mask, **self._assistant(td)))
        td.set(self.log_probs_key, entry_of(LogProbs, pads[2], full=batch.split(log_probs)))
        return td.select(*self.out_keys, strict=False)

    # -- how it is scored -------------------------------------------------------------------------------------------

    def _sampled_from(self, td: TensorDictBase, batch: ScoringBatch) -> SampledFrom:
        if self.temperature is None and not self._has_warned:
            unsaid = says_nothing(td, (self.log_probs_key, "full"))
            if unsaid is not None:
                self._has_warned = True
                warnings.warn(UNSAID.format(unsaid), stacklevel=3)
        return read_sampling(td, batch, self.temperature)

    def _layout(self, batch: ScoringBatch) -> Layout:
        width = row_width(self.pad_model_input)
        if width is not None:
            return batch.padded(masked=False, width=width)
        masked = self.scoring_model.sees_pads  # first: under FSDP all ranks must run this test together
        if self.pad_model_input:
            return batch.padded(masked)
        # an explicit layout must be possible; by default the smaller one is taken
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
            trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters())
            key = (self.routed_experts_key, "full")
            if trains and not self._has_warned_of_routes and samples_of(td, key) is not None:
                self._has_warned_of_routes = True
                warnings.warn(UNUSED, stacklevel=4)  # the caller's line
            yield
        elif self.replay == "R2" and not torch.is_grad_enabled() and (self.rerecord or not has_recorded(td)):
            with self.router_replay.record() as recording:
                yield
            routes = layout.read(recording.routed_experts.flatten(0, 1))
            write_recorded(td, batch, routes, self.router_replay.num_experts)
        else:
            # routes are laid out as the batch, and the model's input may be packed
            tail = (self.router_replay.num_layers, self.router_replay.top_k)
            name = self.routed_experts_key if self.replay == "R3" else RECORDED
            routes = read_routes(td, (name, "full"), batch, tail, self.on_bad_routes, self.replay)
            packing = Packing(layout.index, (layout.shape[0], layout.shape[1]))
            with self.router_replay.replay(routes, batch.mask, self.measure_agreement, self.on_bad_routes, packing):
                yield
            note_routing(td, batch, routes, self.router_replay.report(), self.router_replay.refused)

    def _token_logits(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor:
        layout = self._layout(batch) if self.pad_model_input is False else batch.padded(self.scoring_model.sees_pads)
        with self._routed(td, batch, layout):
            output, _ = self.scoring_model.run(layout.inputs)
        sampled_from = self._sampled_from(td, batch)
        return sampled_from.truncate(align(layout.read(output.logits.flatten(0, 1)), sampled_from.temperatures), batch)

    @cached_property
    def _router_sites(self) -> Sequence[RouterSite]:
        """The model's routers; runs a small forward pass if there is no ``RouterReplay``."""
        return discover(self.model) if self.router_replay is None else self.router_replay.sites

    def _router_logits(self, given: tuple[Tensor, ...] | None, layout: Layout) -> Tensor:
        if not given:
            raise UnsupportedRouterError(f"{type(self.model).__name__} returns no router logits: score without them")
        # logits that sum to 1 in every row are probabilities
        if bool(((given[0].float().sum(-1) - 1).abs() < 1e-3).all()):
            raise UnsupportedRouterError(
                f"{type(self.model).__name__} returns its routers' probabilities as their logits: score without them"
            )
        out = given[0].new_zeros(*layout.mask.shape, number_of_layers(self.model), given[0].shape[-1])
        for site, logits in zip(self._router_sites, given, strict=True):
            if torch.is_grad_enabled() and not logits.requires_grad and site.trains(self.model):
                raise ValueError(
                    f"the router logits of layer {site.layer} have no gradient, and a loss on them would train "
                    "nothing: reentrant activation checkpointing keeps them from the graph. Enable checkpointing with "
                    "use_reentrant=False, or score under torch.no_grad()"
                )
            out[:, :, site.layer] = layout.read(logits.reshape(layout.shape.numel(), -1))
        return out

    # -- get_dist and its masked variants, which TorchRL's stock losses call: they hold logits [B, T, V] ---------------

    def _dist(
        self,
        td: TensorDictBase,
        mask_key: NestedKey | None,
        logits_key: NestedKey,
        padding_side: str,
        mask: Tensor | None = None,
    ) -> LLMMaskedCategorical:
        """Return the dense distributions of all tokens, or of those that ``mask``, or the one at its key, selects."""
        if padding_side != "left" or logits_key != "logits":
            raise ValueError(
                "distributions are padded on the left and made from 'logits', got "
                f"padding_side={padding_side!r} and logits_key={logits_key!r}"
            )
        batch = self._batch(td)
        if mask_key is not None:
            mask = read_rows(td, mask_key, False, batch.lengths)
            if mask is None:
                raise missing(td, mask_key)
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
        """Return the distributions of all tokens, or of those that the mask at ``mask_key`` selects.

        They are dense and padded on the left, and nothing is written. The other arguments exist for compatibility with
        TorchRL, and must not request anything else.

        Raises:
            KeyError: there is no mask at ``mask_key``.
            ValueError: another layout was requested.
            NotImplementedError: the wrapper generates.
        """
        if tensordict_out is not None or as_nested_tensor or as_padded_tensor is False:
            raise ValueError(
                "get_dist returns dense distributions and writes nothing: leave tensordict_out, as_nested_tensor and "
                "as_padded_tensor out"
            )
        if padding_value not in (None, 0.0) or layout not in (None, torch.strided):
            raise ValueError(f"pads are masked out and dense, got padding_value={padding_value}, layout={layout}")
        return self._dist(tensordict, mask_key, logits_key, padding_side)

    def _get_dist_with_prompt_mask(
        self,
        tensordict: TensorDictBase,
        tokens_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        assistant_mask_key: NestedKey | None = None,
        attention_mask_key: NestedKey | None = None,
        padding_side: str = "left",
    ) -> LLMMaskedCategorical:
        """Return the distributions of the tokens after the prompt or, without a prompt, of the assistant's tokens."""
        # without a prompt, all that the assistant said counts
        prompts = tensordict.get(tokens_key or (self.tokens_key, "prompt"), None, as_list=True)
        if prompts is None:
            return self._get_dist_with_assistant_mask(tensordict, assistant_mask_key, logits_key, padding_side)
        batch = self._batch(tensordict)
        rows = [torch.arange(length) >= len(p) for length, p in zip(batch.lengths, prompts, strict=True)]
        mask = pad_left(rows, False)
        if attention_mask_key is not None:
            attended = read_rows(tensordict, attention_mask_key, False, batch.lengths)
            mask = mask if attended is None else mask & attended.bool().to(mask.device)
        return self._dist(tensordict, None, logits_key, padding_side, mask)

    def _get_dist_with_assistant_mask(
        self,
        tensordict: TensorDictBase,
        assistant_mask_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        padding_side: str = "left",
    ) -> LLMMaskedCategorical:
        key = assistant_mask_key or (self.masks_key, "all_assistant_mask")
        return self._dist(tensordict, key, logits_key, padding_side)

    def _get_dist_with_attention_mask(
        self,
        tensordict: TensorDictBase,
        attention_mask_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        padding_side: str = "left",
    ) -> LLMMaskedCategorical:
        return self._dist(tensordict, attention_mask_key, logits_key, padding_side)

    def _get_dist_with_custom_mask(
        self, tensordict: TensorDictBase, mask: Tensor, logits_key: NestedKey = "logits", padding_side: str = "left"
    ) -> LLMMaskedCategorical:
        return self._dist(tensordict, None, logits_key, padding_side, mask)
