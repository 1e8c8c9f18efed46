"""A causal language model that returns the scores of chosen tokens instead of the logits of all tokens.

For one forward pass its head is replaced by :func:`~torchrl_moe.ops.log_probs.selected_log_probs`. The rest of the
model runs unchanged: wrappers (peft, FSDP2, ``torch.compile``, autocast) see an ordinary forward pass, and the head's
weight is the one that the head itself would use.

Letters: B sequences, T tokens of the longest, N tokens to score, V vocabulary, E experts; R rows of W input tokens.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_moe._compat_transformers import restore_frequencies
from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import dense_mask, select_rows
from torchrl_moe.modules.policies.rollout import SAMPLING
from torchrl_moe.modules.policies.scoring import Layout, ScoringBatch, token_scores
from torchrl_moe.modules.policies.unstack import base_model, linear_parts, logit_transform, obstacle
from torchrl_moe.modules.replay.discovery import dry_inputs
from torchrl_moe.modules.replay.router_replay import evaluating
from torchrl_moe.ops.linear_head import RowVocabularies
from torchrl_moe.ops.log_probs import LogitTransform, selected_log_probs

# The distributions that a batch was sampled from, as a scorer needs them: temperatures and kept tokens.
#
# Letters: B samples, T tokens of the longest, N tokens to score, M token ids kept of all of them, V vocabulary.


UNSAID = (
    "sample {} has an engine's log-probs, but no 'sampling' entry that gives the temperature and the vocabulary "
    "entries that it was sampled from: it is scored at temperature 1, over the whole vocabulary. Select 'sampling' "
    "along with the other keys, or, if nothing was excluded, pass temperature=. Shown once."
)
"""The warning; see :func:`says_nothing`."""


@dataclass(frozen=True, slots=True)
class SampledFrom:
    """For each sample: ``temperatures`` float32 ``[B]``, and the kept tokens; ``None`` if no token id was excluded."""

    temperatures: Tensor
    kept: tuple[KeptTokens | None, ...]

    def truncate(self, logits: Tensor, batch: ScoringBatch) -> Tensor:
        """Return dense logits ``[B, T, V]`` in which excluded token ids have the lowest finite value."""
        if all(one is None for one in self.kept):
            return logits
        logits, least = logits.clone(), torch.finfo(logits.dtype).min
        for i, (kept, length) in enumerate(zip(self.kept, batch.lengths, strict=True)):
            if kept is not None:
                mask = dense_mask(kept.ids.to(logits.device), kept.sizes.to(logits.device), logits.shape[-1])
                logits[i, logits.shape[1] - length :].masked_fill_(~mask, least)
        return logits


def says_nothing(td: TensorDictBase, log_probs: NestedKey) -> int | None:
    """Return the first sample that an engine sampled and that does not say how; ``None`` if there is none.

    An engine's answers have both log-probs and policy versions; entries from other sources do not.
    """
    sampled = (log_probs, ("policy_versions", "full"))
    for i, sample in enumerate(td.unbind(0)):
        if sample.get(SAMPLING, None) is None and all(sample.get(key, None) is not None for key in sampled):
            return i
    return None


def read_sampling(td: TensorDictBase, batch: ScoringBatch, temperature: float | None) -> SampledFrom:
    """Read how a batch was sampled."""
    temperatures, found = [], []
    for i, sample in enumerate(td.unbind(0)):
        said = sample.get((SAMPLING, "temperature"), None)
        known = (1.0 if temperature is None else temperature) if said is None else float(said)
        if not known > 0:
            raise ValueError(
                f"sample {i} was sampled at temperature {known:g}: it is greedy, and has no distribution to train on. "
                "Sample at a positive temperature, or exclude 'sampling' to score it at a temperature of your choice"
            )
        if temperature is not None and abs(known - temperature) > 1e-6 * temperature:
            raise ValueError(
                f"sample {i} was sampled at temperature {known:g}, and is to be scored at {temperature:g}: leave "
                "temperature= out, and each sample is scored at its own"
            )
        kept = sample.get((SAMPLING, "kept"), None)
        if kept is not None and not isinstance(kept, KeptTokens):
            kept = KeptTokens.from_tensordict(kept)
        if kept is not None and len(kept.sizes) != batch.lengths[i]:
            raise ValueError(
                f"('{SAMPLING}', 'kept') of sample {i} is for {len(kept.sizes)} tokens, and there are "
                f"{batch.lengths[i]}: both must have been cut or padded alike"
            )
        temperatures.append(known)
        found.append(kept)
    return SampledFrom(torch.tensor(temperatures), tuple(found))


FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
"""Errors of a forward pass without logits, if the model uses them in an unknown way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to score: ``rows`` int64 ``[N]`` of the flat input, and the ``tokens`` int64 ``[N]`` that follow them."""

    rows: Tensor
    tokens: Tensor
    temperature: float | Tensor
    """One for all, or ``[N]``."""
    entropy: bool
    kept: tuple[Tensor, Tensor] | None = None
    """The token ids that each token was sampled from, as ``selected_log_probs`` takes them; ``None`` for all."""

    @classmethod
    def of(
        cls, batch: ScoringBatch, layout: Layout, wanted: Tensor, sampled_from: SampledFrom, entropy: bool
    ) -> Selection:
        """Select the tokens in ``wanted``, bool ``[B, T]``; none of the first column."""
        # one temperature stays a number: its logits need no grouping
        of_samples = sampled_from.temperatures
        temperature: float | Tensor = float(of_samples[0])
        if bool((of_samples != of_samples[0]).any()):
            temperature = of_samples.to(wanted.device)[:, None].expand(wanted.shape)[wanted]
        kept = None
        if any(one is not None for one in sampled_from.kept):
            ids, sizes = [], []
            for one, row in zip(sampled_from.kept, batch.split(wanted), strict=True):
                if one is None:  # all ids of the vocabulary: 0
                    sizes.append(row.new_zeros(int(row.sum()), dtype=torch.int32))
                    continue
                of_sample = select_rows(one.ids.to(row.device), one.sizes.to(row.device), row)
                ids.append(of_sample[0])
                sizes.append(of_sample[1])
            kept = torch.cat(ids), torch.cat(sizes)
        rows = layout.index[:, :-1][wanted[:, 1:]]
        return cls(rows=rows, tokens=batch.ids[wanted], temperature=temperature, entropy=entropy, kept=kept)

    def dense(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores from the logits of all tokens, ``[R * W, V]``."""
        rows, mask = logits[self.rows], None
        if self.kept is not None:
            RowVocabularies(*self.kept).check_values(self.tokens, rows.shape[-1])
            mask = dense_mask(*self.kept, rows.shape[-1])
        return token_scores(rows, self.tokens, self.temperature, self.entropy, mask)

    def parts(self) -> tuple[list[tuple[float, Selection]], Tensor | None]:
        """Return a selection per temperature, and each token's position in all of them, ``[N]``; ``None`` for one."""
        if isinstance(self.temperature, float) or not len(self.temperature):
            return [(self.temperature if isinstance(self.temperature, float) else 1.0, self)], None
        found, places = [], []
        for value in self.temperature.unique().tolist():
            part = self.temperature == value
            kept = None if self.kept is None else select_rows(*self.kept, part)
            found.append(
                (value, replace(self, rows=self.rows[part], tokens=self.tokens[part], temperature=value, kept=kept))
            )
            places.append(part.nonzero()[:, 0])
        return found, torch.cat(places).argsort()


class ScoringModel:
    """Runs a model for its scores.

    :meth:`check` tests it on a few tokens. If the scores differ from those of its logits, or if its head is
    unsupported, the model is run for its logits, with one warning.
    """

    def __init__(self, model: nn.Module) -> None:
        restore_frequencies(model)
        self.model = model
        self.language_model = unwrap(model)
        getter = getattr(self.language_model, "get_output_embeddings", None)
        self.head: nn.Module | None = None if getter is None else getter()
        self.splits = False
        self._warned = False
        if self.head is not None:
            self._head = _ScoringHead(self.head)
            self._output = _ScoringOutput(self.language_model, self._head)

    def __call__(
        self, inputs: dict[str, Tensor], selection: Selection, router_logits: bool = False
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...] | None]:
        """Run one forward pass."""
        # fallback: all logits, of which the wanted rows are read
        if not self.splits:
            output, routers = self.run(inputs, router_logits)
            return *selection.dense(output.logits.flatten(0, 1)), routers
        with self._scoring(selection):
            output, routers = self.run(inputs, router_logits)
        scores = output.logits
        return scores[:, 0], scores[:, 1] if selection.entropy else None, routers

    def run(self, inputs: dict[str, Tensor], router_logits: bool = False) -> tuple[Any, tuple[Tensor, ...] | None]:
        """Run one forward pass for the model's own output, and its routers' logits."""
        if not router_logits:
            return self.model(**inputs, use_cache=False), None
        kept: list[Any] = []
        # router logits come from the body, before the model adds its auxiliary loss
        body = getattr(self.language_model, "base_model", None)
        if body is None or body is self.language_model:
            output = self.model(**inputs, use_cache=False, output_router_logits=True)
            return output, getattr(output, "router_logits", None)

        def take(_: Any, __: Any, output: Any) -> None:
            """Hide the logits from the model's auxiliary loss, which would expand them to layers x tokens x K x E."""
            kept.append(getattr(output, "router_logits", None))
            if kept[-1] is not None:
                output.router_logits = None

        handle = body.register_forward_hook(take)
        try:
            output = self.model(**inputs, use_cache=False, output_router_logits=True)
        finally:
            handle.remove()
        return output, kept[-1] if kept else getattr(output, "router_logits", None)

    # -- what the model allows --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Find out whether scores need no logits; the first call runs the model, so no context may be open."""
        with _lock_of(self.language_model):
            reason = "it has no output embeddings" if self.head is None else obstacle(self.head) or self._difference
        self.splits = not reason
        if reason and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self.language_model).__name__} is scored from its dense logits [B, T, V]: its head cannot be "
                f"run separately ({reason}). Scores are correct, but need much memory.",
                stacklevel=3,
            )

    @cached_property
    def packs(self) -> bool:
        """Whether sequences in one row do not attend to each other; tested on a few tokens.

        Uses four sequences, in one row if they are packed like that, otherwise in two. (For flash attention
        transformers separates sequences in one row, but not in several.)
        """
        # Llama 4 scales queries by a token's index in its row, from an index on that is beyond the tokens of the test
        config = getattr(self.language_model, "config", None)
        text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
        if getattr(text, "attn_temperature_tuning", False):
            return False
        batch = self._four_sequences()
        # change the first sequence, and see whether the others' logits move
        layout = batch.packed(None if self.packs_in_one_row else 2 * batch.ids.shape[1])
        return self._leaves_alone(layout, layout.index[0], batch.padded())

    @cached_property
    def sees_pads(self) -> bool:
        """Whether tokens attend to later ones in their row, so that padding must be masked; tested in the same way."""
        batch = self._four_sequences(ragged=True)
        layout = batch.padded(masked=False)
        return not self._leaves_alone(layout, (~batch.mask).flatten(), layout)

    def _four_sequences(self, ragged: bool = False) -> ScoringBatch:
        """Return four equal sequences; if ragged, each is one token shorter than the previous one."""
        ids = dry_inputs(self.model)["input_ids"].expand(4, -1)
        length = ids.shape[1]
        lengths = torch.tensor([length - i * ragged for i in range(4)], device=ids.device)
        mask = torch.arange(length, device=ids.device) < lengths[:, None]
        return ScoringBatch(ids, mask, (length,) * 4)

    def _leaves_alone(self, layout: Layout, changed: Tensor, rows: Layout) -> bool:
        """Whether the logits of all sequences but the first stay the same when the tokens in ``changed`` change.

        Up to rounding, which is measured in ``rows``, where the first sequence changes in its own row.
        """
        with _dry_run(self.model):
            try:
                leak, scale = self._moved(layout, changed)
                rounding, _ = self._moved(rows, rows.index[0])
            except FAILURES:
                return False
        return leak <= 10 * rounding + 1e-6 * scale

    def _moved(self, layout: Layout, changed: Tensor) -> tuple[float, float]:
        """Return how far the logits of all sequences but the first move when ``changed`` does, and their size."""
        # the same input with other tokens in the changed places
        others = dict(layout.inputs, input_ids=layout.inputs["input_ids"].clone())
        others["input_ids"].view(-1)[changed] += 1
        before, after = (
            layout.read(self.run(inputs)[0].logits.flatten(0, 1))[1:].float() for inputs in (layout.inputs, others)
        )
        return float((after - before).abs().max()), float(before.abs().max())

    @property
    def packs_in_one_row(self) -> bool:
        """Whether packing adds no attention cost between sequences, however long the row."""
        config = getattr(self.language_model, "config", None)
        return str(getattr(config, "_attn_implementation", "")).startswith(("flash", "kernels-community/flash"))

    @cached_property
    def _difference(self) -> str:
        """Text on how the scores differ from those of the logits on a few tokens; empty if they do not."""
        # score a few tokens both ways, and compare
        inputs = dry_inputs(self.model)
        count = inputs["input_ids"].numel()
        tokens = inputs["input_ids"].flatten().roll(1)
        selection = Selection(
            rows=torch.arange(count, device=tokens.device), tokens=tokens, temperature=1.0, entropy=True
        )
        with _dry_run(self.model):
            logits = self.run(inputs)[0].logits.flatten(0, 1)
            wanted = torch.stack([part for part in token_scores(logits, tokens, 1.0, True) if part is not None], -1)
            try:
                with self._scoring(selection):
                    got = self.run(inputs)[0].logits
                gap = float((got - wanted).abs().max())
            except FAILURES as error:
                return f"{type(error).__name__}: {error}"
        # the coarser of the two dtypes decides what is rounding
        precision = max(torch.finfo(dtype).eps for dtype in (logits.dtype, self._head.dtype))
        bound = max(1e-4, 4 * precision) * max(1.0, float(logits.abs().max()))
        return "" if gap <= bound else f"scores are off by {gap:.1e}, and {bound:.1e} would be rounding"

    @contextmanager
    def _scoring(self, selection: Selection) -> Iterator[None]:
        """Make the next forward pass return scores ``[N, 2]`` as its logits, ``[N, 1]`` without entropies."""
        assert self.head is not None
        with _lock_of(self.language_model):
            self._head.thread = threading.get_ident()
            self._head.parts, self._head.places = selection.parts()  # here, outside any graph: it depends on values
            self._head.transform = logit_transform(getattr(self.language_model, "config", None))
            # replaced for this pass only, and under the lock: another wrapper may share the model
            stand_ins: dict[nn.Module, Any] = {self.head: self._head, self.language_model: self._output}
            for module, stand_in in stand_ins.items():
                stand_in.shadowed = module.__dict__.get("forward")
                module.forward = stand_in
            try:
                yield
            finally:
                for module, stand_in in stand_ins.items():
                    if stand_in.shadowed is None:
                        del module.forward
                    else:
                        module.forward = stand_in.shadowed
                self._head.parts, self._head.places, self._head.scores = [], None, None


class _ScoringHead:
    """Replaces the head's ``forward``: FSDP has gathered its weight by then, and hooks see what it returns."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.shadowed: Any = None
        self.parts: list[tuple[float, Selection]] = []
        self.places: Tensor | None = None
        self.transform = LogitTransform()
        self.scores: Tensor | None = None
        self.dtype = torch.float32
        self.thread = 0

    @property
    def elsewhere(self) -> bool:
        """Whether this is another thread, which gets the unchanged model."""
        return not torch.compiler.is_compiling() and self.thread != threading.get_ident()

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.elsewhere:
            return (self.shadowed or type(self.head).forward.__get__(self.head))(hidden)
        self.dtype = hidden.dtype
        flat, scores = hidden.flatten(0, -2), []
        for temperature, part in self.parts:
            # only the wanted rows reach the product with the vocabulary
            hiddens, weights, bias = linear_parts(self.head, flat[part.rows])
            transform = replace(self.transform, temperature=temperature)
            found = selected_log_probs(
                hiddens, weights, part.tokens, bias=bias, transform=transform, entropy=part.entropy, kept=part.kept
            )
            scores.append(torch.stack([one for one in found if one is not None], -1))
        self.scores = scores[0] if self.places is None else torch.cat(scores)[self.places]
        return self.scores


class _ScoringOutput:
    """Replaces the model's ``forward``: undoes what the model does to its logits, which are scores here.

    The scores are returned in the model's own output, where FSDP looks for the start of the backward pass.
    """

    def __init__(self, model: nn.Module, head: _ScoringHead) -> None:
        self.model = model
        self.head = head
        self.shadowed: Any = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.shadowed is None:  # no bound method: after a graph break, torch.compile would look it up on the model
            output: Any = type(self.model).forward(self.model, *args, **kwargs)
        else:
            output = self.shadowed(*args, **kwargs)
        if not self.head.elsewhere:
            output["logits"] = self.head.scores
        return output


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def _lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock for replacing a model's methods; not an attribute, since models are copied and pickled."""
    return _LOCKS.setdefault(model, threading.RLock())


def unwrap(model: nn.Module) -> nn.Module:
    """Return the transformers model inside ``torch.compile`` and peft."""
    return base_model(getattr(model, "_orig_mod", model))


@contextmanager
def _dry_run(model: nn.Module) -> Iterator[None]:
    """Run with every module in eval mode, without gradients, and uncompiled."""
    with evaluating(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
