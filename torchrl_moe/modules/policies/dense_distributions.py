"""``get_dist`` and its masked variants: the dense distributions that TorchRL's stock losses ask a wrapper for.

They hold logits ``[B, T, V]``. Our losses call ``score``, which makes none.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_moe.modules.policies.scoring import ScoringBatch, missing, pad_left, read_rows

__all__ = ["DenseDistributions"]


class DenseDistributions(LLMWrapperBase):
    """The part of a wrapper that answers TorchRL's losses."""

    tokens_key: str
    masks_key: str

    @abstractmethod
    def _batch(self, td: TensorDictBase) -> ScoringBatch:
        """Return the tokens of ``td``."""

    @abstractmethod
    def _token_logits(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor:
        """Return ``[B, T, V]``: row t holds the logits of token t's own distribution."""

    def _dist(self, td: TensorDictBase, mask_key: NestedKey | None) -> LLMMaskedCategorical:
        """Return the dense distributions of all tokens, or of those that the mask at ``mask_key`` selects."""
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
        """Return the distributions of all tokens, or of those that the mask at ``mask_key`` selects.

        They are dense and padded on the left, and nothing is written. The other arguments exist for compatibility with
        TorchRL, and must not request anything else.

        Raises:
            KeyError: there is no mask at ``mask_key``.
            ValueError: another layout was requested.
        """
        _check_dense(logits_key, padding_side)
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
        """Return the distributions of the tokens after the prompt or, without a prompt, of the assistant's tokens."""
        prompts = tensordict.get(tokens_key or (self.tokens_key, "prompt"), None, as_list=True)
        if prompts is None:
            return self._get_dist_with_assistant_mask(tensordict, assistant_mask_key, logits_key, padding_side)
        _check_dense(logits_key, padding_side)
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
        _check_dense(logits_key, padding_side)
        return self._dist(tensordict, assistant_mask_key or (self.masks_key, "all_assistant_mask"))

    def _get_dist_with_attention_mask(
        self,
        tensordict: TensorDictBase,
        attention_mask_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        padding_side: str = "left",
    ) -> LLMMaskedCategorical:
        _check_dense(logits_key, padding_side)
        return self._dist(tensordict, attention_mask_key)

    def _get_dist_with_custom_mask(
        self, tensordict: TensorDictBase, mask: Tensor, logits_key: NestedKey = "logits", padding_side: str = "left"
    ) -> LLMMaskedCategorical:
        _check_dense(logits_key, padding_side)
        return self._masked_dist(tensordict, mask)


def _check_dense(logits_key: NestedKey, padding_side: str) -> None:
    """Refuse options of TorchRL's masked distributions that are not supported here."""
    if padding_side != "left" or logits_key != "logits":
        raise ValueError(
            f"distributions are padded on the left and made from 'logits', got padding_side={padding_side!r} and "
            f"logits_key={logits_key!r}"
        )
