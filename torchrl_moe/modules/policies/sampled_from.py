"""The distributions that a batch was sampled from, as a scorer needs them: temperatures and kept words.

Letters: B samples, T tokens of the longest, N tokens to score, M word ids of all of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import dense_mask, select_rows
from torchrl_moe.modules.policies.sampling_entry import SAMPLING
from torchrl_moe.modules.policies.scoring import ScoringBatch

__all__ = ["UNSAID", "SampledFrom", "parts_by_temperature", "read_sampling", "says_nothing"]

Kept = tuple[Tensor, Tensor]
"""``ids`` int32 ``[M]`` and ``sizes`` int32 ``[N]``, as in :class:`~torchrl_moe.data.KeptTokens`."""


UNSAID = (
    "sample {} has an engine's log-probs, but no 'sampling' entry that gives the temperature and the words it was "
    "sampled from: it is scored at temperature 1, over all words. Select 'sampling' along with the other keys, or, if "
    "no word was excluded, pass temperature=. Shown once."
)
"""The warning; see :func:`says_nothing`."""


@dataclass(frozen=True, slots=True)
class SampledFrom:
    """For each sample: ``temperatures`` float32 ``[B]``, and the kept words; ``None`` if no word was excluded."""

    temperatures: Tensor
    kept: tuple[KeptTokens | None, ...]

    def of_tokens(self, batch: ScoringBatch, wanted: Tensor) -> tuple[float | Tensor, Kept | None]:
        """Return the temperature, ``[N]`` if there are several, and the kept words of the wanted tokens.

        Args:
            batch: the tokens.
            wanted: bool ``[B, T]``.
        """
        several = bool((self.temperatures != self.temperatures[0]).any())
        rows = self.temperatures.to(wanted.device)[:, None].expand(wanted.shape)[wanted]
        temperature: float | Tensor = rows if several else float(self.temperatures[0])
        if all(one is None for one in self.kept):
            return temperature, None
        found = [self._of_sample(one, row) for one, row in zip(self.kept, batch.split(wanted), strict=True)]
        ids, sizes = zip(*found, strict=True)
        return temperature, (torch.cat(ids), torch.cat(sizes))

    @staticmethod
    def _of_sample(kept: KeptTokens | None, wanted: Tensor) -> Kept:
        if kept is None:
            sizes = wanted.new_zeros(int(wanted.sum()), dtype=torch.int32)
            return sizes[:0], sizes
        return select_rows(kept.ids.to(wanted.device), kept.sizes.to(wanted.device), wanted)

    def truncate(self, logits: Tensor, batch: ScoringBatch) -> Tensor:
        """Return dense logits ``[B, T, V]`` in which excluded words have the lowest finite value."""
        if all(one is None for one in self.kept):
            return logits
        logits, least = logits.clone(), torch.finfo(logits.dtype).min
        for i, (kept, length) in enumerate(zip(self.kept, batch.lengths, strict=True)):
            if kept is not None:
                mask = dense_mask(kept.ids.to(logits.device), kept.sizes.to(logits.device), logits.shape[-1])
                logits[i, logits.shape[1] - length :].masked_fill_(~mask, least)
        return logits


def parts_by_temperature(temperature: float | Tensor) -> Iterator[tuple[float, Tensor | None]]:
    """Yield each temperature, and a mask, bool ``[N]``, of its tokens; ``None`` for all. Without tokens, yield 1.

    >>> list(parts_by_temperature(0.5))
    [(0.5, None)]
    """
    if isinstance(temperature, float) or not len(temperature):
        yield temperature if isinstance(temperature, float) else 1.0, None
        return
    for value in temperature.unique().tolist():
        yield value, temperature == value


def says_nothing(td: TensorDictBase, log_probs: NestedKey) -> int | None:
    """Return the first sample that an engine sampled and that does not say how; ``None`` if there is none.

    An engine's answers have both log-probs and policy versions; entries from other sources do not.

    Args:
        td: batch size ``[B]``.
        log_probs: key of an engine's log-probs.
    """
    sampled = (log_probs, ("policy_versions", "full"))
    for i, sample in enumerate(td.unbind(0)):
        if sample.get(SAMPLING, None) is None and all(sample.get(key, None) is not None for key in sampled):
            return i
    return None


def read_sampling(td: TensorDictBase, batch: ScoringBatch, temperature: float | None) -> SampledFrom:
    """Read how a batch was sampled.

    Args:
        td: batch size ``[B]``; without ``("sampling", "temperature")`` it was sampled at 1.
        batch: its tokens.
        temperature: that all samples must have; ``None``: the batch decides.

    Raises:
        ValueError: a sample has another temperature than required, or 0, or has kept words for other tokens.
    """
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
