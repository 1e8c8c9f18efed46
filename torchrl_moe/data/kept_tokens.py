"""Which token ids of the vocabulary a token was sampled from, where sampling cut some off.

top_k, top_p, min_p, bad words, allowed ids, minimum lengths and grammars all cut ids off, and the log-prob of a token
is then normalised over the ids that were kept. A trainer that replays a rollout needs the same ids.

Letters: T tokens of one sequence, M ids of all its tokens together, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import TensorClass, lazy_stack

from torchrl_moe import _checks
from torchrl_moe.data.routed_experts import refuse_casts
from torchrl_moe.render.routes import kept_rows
from torchrl_moe.render.tables import html_table

UNSET_ID = -1
NOTHING = torch.zeros(0, dtype=torch.int32)


def dense_mask(ids: torch.Tensor, sizes: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return which ids were kept for each token, bool ``[T, V]``; for tests and small vocabularies.

    >>> dense_mask(torch.tensor([2, 0, 1]), torch.tensor([0, -1, 2]), 3).int().tolist()
    [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    """
    counts = sizes.long().abs()
    rows = torch.repeat_interleave(torch.arange(len(sizes), device=ids.device), counts)
    mask = (sizes <= 0)[:, None].repeat(1, vocabulary)
    mask[rows, ids[: len(rows)].long()] = (sizes > 0)[rows]
    return mask


def select_rows(ids: torch.Tensor, sizes: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and sizes of some tokens, bool ``[T]``. What follows the last token's ids ``[M]`` is ignored.

    >>> select_rows(torch.tensor([2, 0, 1]), torch.tensor([0, -1, 2]), torch.tensor([True, False, True]))
    (tensor([0, 1]), tensor([0, 2]))
    """
    counts = sizes.long().abs()
    return ids[: int(counts.sum())][torch.repeat_interleave(wanted, counts)], sizes[wanted]


class KeptTokens(TensorClass["nocast"]):  # type: ignore[name-defined] # mypy takes "nocast" for a type
    """The token ids that each token was sampled from, where sampling cut some off.

    ``sizes[t]`` says how many ids token t has in ``ids``, those of earlier tokens first. ``n > 0``: these n were kept;
    ``-n < 0``: all but these n were kept; 0: all were kept, or the token was not sampled. A rollout stores the shorter
    of the two lists, so banning a few ids costs as little as a small top_k. Nothing is checked on construction:
    :meth:`validate` does it.

    Samples of unequal T are a lazy stack: ``lazy_stack([a, b])``; index it, or :meth:`pad` it.

    Shapes:
        ids: int32 ``[*B, M]``; -1 after the last token's ids, in a padded batch.
        sizes: int32 ``[*B, T]``.

    >>> kept = KeptTokens(ids=torch.tensor([7, 3, 5]), sizes=torch.tensor([0, 2, -1])).validate(vocabulary=9)
    >>> kept
    KeptTokens(shape=[T=3], tokens with ids cut off=2, ids=3, nbytes=48)
    >>> [kept.ids_of(t, vocabulary=9).tolist() for t in (1, 2)]
    [[3, 7], [0, 1, 2, 3, 4, 6, 7, 8]]
    """

    _own_doc = __doc__
    ids: torch.Tensor
    sizes: torch.Tensor

    def validate(
        self, *, vocabulary: int, num_tokens: int | None = None, tokens: torch.Tensor | None = None
    ) -> KeptTokens:
        """Check shapes and values of each sample; return self.

        Args:
            vocabulary: number of token ids.
            num_tokens: tokens of every sample.
            tokens: ``[*B, T]``, the tokens; each must be among the ids kept for it.

        Raises:
            ValueError: wrong rank or length, not integers, another number of ids than the sizes say, an id out of range
                or listed twice, a token that no id is left for, or a token that is not among the ids kept for it.
        """
        _checks.check_number("vocabulary", vocabulary, 1, 2**31 - 1, whole=True)
        _checks.check_number("num_tokens", num_tokens, 0, whole=True, none=True)
        samples = self._samples()
        chosen = [None] * len(samples) if tokens is None else list(tokens.reshape(len(samples), -1))
        for i, (sample, given) in enumerate(zip(samples, chosen, strict=True)):
            name = "kept" if not self.batch_dims else f"kept of sample {i}"
            _validate(name, sample.ids, sample.sizes, vocabulary, num_tokens, given)
        return self

    def truncate(self, num_tokens: int) -> KeptTokens:
        """Keep the first ``num_tokens`` tokens of each sample; shorter samples stay whole.

        Raises:
            ValueError: ``num_tokens`` is below 1.
        """
        _checks.check_number("num_tokens", num_tokens, whole=True)
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}: a sample keeps a token.")
        if self.batch_dims:
            return lazy_stack([part.truncate(num_tokens) for part in self.unbind(0)])
        sizes = self.sizes[:num_tokens]
        return type(self)(ids=self.ids[: int(sizes.long().abs().sum())], sizes=sizes, device=self.device)

    def followed_by(self, later: KeptTokens) -> KeptTokens:
        """Return a later turn, whose first tokens are this turn's and keep what is known here.

        Args:
            later: of a sequence that starts with this one's tokens; both have batch size ``[]``.

        Raises:
            ValueError: ``later`` is shorter, or there are several samples.
        """
        if self.batch_dims or later.batch_dims:
            raise ValueError("turns are joined one sample at a time: index the batch first")
        count = len(self.sizes)
        if len(later.sizes) < count:
            raise ValueError(f"a later turn repeats {count} tokens, and has {len(later.sizes)}")
        # The first writer wins: only the later turn's new tokens come from it.
        after = torch.arange(len(later.sizes), device=later.sizes.device) >= count
        ids, sizes = select_rows(later.ids, later.sizes, after)
        own = self.ids[: int(self.sizes.long().abs().sum())]
        return type(self)(ids=torch.cat([own, ids]), sizes=torch.cat([self.sizes, sizes]), device=self.device)

    def pad(self, length: int | None = None, side: Literal["left", "right"] = "left") -> KeptTokens:
        """Make every sample ``length`` tokens long, with tokens of size 0; the result is a dense copy.

        Args:
            length: of each sample afterwards. None: that of the longest sample.
            side: where tokens are added. Left is the convention of TorchRL's policies. Ids are padded at the end.

        Raises:
            ValueError: a sample is longer than ``length``, or ``side`` is invalid, or ``length`` is no count of tokens.
        """
        _checks.check_number("length", length, 0, _checks.MOST_TOKENS, whole=True, none=True)
        if side not in ("left", "right"):
            raise ValueError(f"side must be 'left' or 'right', got {side!r}.")
        samples = self._samples()
        longest = max((len(sample.sizes) for sample in samples), default=0)
        length = longest if length is None else length
        if longest > length:
            raise ValueError(f"cannot pad to {length} tokens, the longest sample has {longest}: truncate() first.")
        most = max((len(sample.ids) for sample in samples), default=0)
        # Of a lazy stack without samples nothing says the dtype.
        like = samples[0] if samples else self if self.sizes is not None else KeptTokens(ids=NOTHING, sizes=NOTHING)
        # A pad has size 0, which reads as "all ids kept"; ids are flat, so their pads go to the end on either side.
        sizes = like.sizes.new_zeros(len(samples), length)
        ids = like.ids.new_full((len(samples), most), UNSET_ID)
        for i, sample in enumerate(samples):
            first = length - len(sample.sizes) if side == "left" else 0
            sizes[i, first : first + len(sample.sizes)] = sample.sizes
            ids[i, : len(sample.ids)] = sample.ids
        batch = self.batch_size
        ids, sizes = ids.view(*batch, most), sizes.view(*batch, length)
        return type(self)(ids=ids, sizes=sizes, batch_size=batch, device=self.device)

    def ids_of(self, token: int, *, vocabulary: int) -> torch.Tensor:
        """Return the ids, ascending, that one token of one sample was sampled from.

        Raises:
            ValueError: no token has this number, ``vocabulary`` is no count, or there are several samples.
        """
        if self.batch_dims:
            raise ValueError(f"a token is one of one sample, got {self!r}: index the batch first")
        _checks.check_number("token", token, -len(self.sizes), len(self.sizes) - 1, whole=True)
        _checks.check_number("vocabulary", vocabulary, 1, 2**31 - 1, whole=True)
        wanted = torch.zeros_like(self.sizes, dtype=torch.bool)
        wanted[token] = True
        return dense_mask(*select_rows(self.ids, self.sizes, wanted), vocabulary)[0].nonzero()[:, 0]

    @property
    def nbytes(self) -> int:
        """Bytes of ids and sizes, summed over the samples."""
        return sum(sample.ids.nbytes + sample.sizes.nbytes for sample in self._samples())

    def _samples(self) -> list[KeptTokens]:
        """One of batch size ``[]`` per sample, in the order of the flattened batch."""
        return [sample for part in self.unbind(0) for sample in part._samples()] if self.batch_dims else [self]

    def _summary(self) -> str:
        """The repr, one line. A TensorDict that is printed calls it, so it must not raise."""
        try:
            samples = self._samples()
            lengths = sorted({len(sample.sizes) for sample in samples})
            rows = f"{lengths[0]}..{lengths[-1]}" if len(lengths) > 1 else str(lengths[0] if lengths else 0)
            cut = sum(int((sample.sizes != 0).sum()) for sample in samples)
            ids = sum(int(sample.sizes.long().abs().sum()) for sample in samples)
        # Meta and fake tensors, and fields that are not set yet, have no values to read.
        except (RuntimeError, AttributeError, KeyError, TypeError):
            return f"KeptTokens(batch_size={list(self.batch_size)})"
        shape = ", ".join([*map(str, self.batch_size), f"T={rows}"])
        return f"KeptTokens(shape=[{shape}], tokens with ids cut off={cut}, ids={ids}, nbytes={self.nbytes})"

    def _repr_html_(self) -> str:
        """The repr, and from how many ids tokens were sampled. It must not raise either."""
        try:
            sizes = [sample.sizes.reshape(-1).cpu() for sample in self._samples()]
            table = kept_rows(torch.cat(sizes).numpy()) if sizes else []
        except (RuntimeError, AttributeError, KeyError, TypeError):  # as above
            table = []
        note = "prompts and pads count as all" if table else ""
        return html_table(self._summary(), ("vocabulary entries", "tokens"), table, note=note)


# TensorClass writes its own __doc__ and __repr__ into a class after the body has run.
_CLASS: Any = KeptTokens
_CLASS.__doc__, _CLASS.__repr__ = _CLASS._own_doc, _CLASS._summary
refuse_casts(_CLASS, "kept", ValueError)


def _validate(
    name: str,
    ids: torch.Tensor,
    sizes: torch.Tensor,
    vocabulary: int,
    num_tokens: int | None,
    tokens: torch.Tensor | None,
) -> None:
    for field, values in (("ids", ids), ("sizes", sizes)):
        _checks.check_rank(f"{field} of {name}", values, 1)
        _checks.check_integer(f"{field} of {name}", values)
    for count in (num_tokens, None if tokens is None else len(tokens)):
        if count is not None:
            _checks.check_rows(name, len(sizes), count, hint="A sample has a size for each token.")
    counts = sizes.long().abs()
    empty = -sizes.long() >= vocabulary
    if bool(empty.any()):
        raise ValueError(
            f"token {int(empty.nonzero()[0, 0])} of {name} has nothing left to be sampled from: all {vocabulary} ids "
            "are cut off."
        )
    # In a padded batch -1 follows the last token's ids, and nothing else does.
    total = int(counts.sum())
    if total > len(ids) or bool((ids[total:] != UNSET_ID).any()):
        raise ValueError(f"the sizes of {name} say {total} ids, and there are {len(ids)}: cut both at the same token.")
    used = ids[:total].long()
    outside = (used < 0) | (used >= vocabulary)
    if bool(outside.any()):
        raise ValueError(f"ids of {name} must be in 0..{vocabulary - 1}, got {int(used[outside][0])}.")
    # Token and id as one number: a repeated number is an id that a token lists twice.
    rows = torch.repeat_interleave(torch.arange(len(sizes), device=ids.device), counts)
    places = rows * vocabulary + used
    if len(places.unique()) != len(places):
        raise ValueError(f"a token of {name} lists an id twice.")
    if tokens is None:
        return
    tokens = tokens.long()
    # Prompts and pads may hold anything; an id outside would fall on another token's place.
    outside = (sizes != 0) & ((tokens < 0) | (tokens >= vocabulary))
    if bool(outside.any()):
        t = int(outside.nonzero()[0, 0])
        raise ValueError(f"token {t} of {name} must be in 0..{vocabulary - 1}, got {int(tokens[t])}.")
    named = torch.isin(torch.arange(len(tokens), device=tokens.device) * vocabulary + tokens, places)
    wrong = ((sizes > 0) & ~named) | ((sizes < 0) & named)
    if bool(wrong.any()):
        t = int(wrong.nonzero()[0, 0])
        raise ValueError(f"token {t} of {name}, {int(tokens[t])}, is not among the ids that it was sampled from.")
