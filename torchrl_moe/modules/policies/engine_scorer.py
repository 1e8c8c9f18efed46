"""Log-probs of full sequences by an engine: what ``vLLMWrapper(generate=False)`` does.

Tokens of a rollout follow the recorded experts (R3), at the temperature and over the words that the batch gives. Text
and chats are encoded, perhaps to tokens other than those sampled, so the routes and kept words of the sampled tokens do
not apply. No gradient flows through it: it gives old log-probs from a replica that is serving anyway, or those of a
reference policy from an engine that is never synced, in place of a second model in the trainer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_moe._errors import ReplayError
from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import select_rows
from torchrl_moe.modules.policies.full_sequences import FullSequence, scored_tensordict
from torchrl_moe.modules.policies.request_keys import request_arguments
from torchrl_moe.modules.policies.routes import no_routes, read_routes
from torchrl_moe.modules.policies.sampled_from import UNSAID, read_sampling, says_nothing
from torchrl_moe.modules.policies.sampling_entry import SAMPLING
from torchrl_moe.modules.policies.scoring import ScoringBatch, read_batch
from torchrl_moe.modules.serving.service import GenerationService

__all__ = ["EngineScorer"]


@dataclass(frozen=True, kw_only=True)
class EngineScorer:
    """Scores rollouts with an engine.

    Args:
        engine: a service.
        replay: ``"R3"``: tokens follow the experts at ``routed_experts_key``; ``"none"``: the engine's weights route.
        temperature: see :class:`TransformersWrapper`.
        tokens_key, mask_key, routed_experts_key, sampled_key: where to read; the last is the key of an engine's
        log-probs: samples that have them should also say how they were sampled, otherwise a warning is shown.
        arguments: of the engine's ``score``: ``actor_index``, ``lora_request``, ``timeout_seconds``, ``use_tqdm``.
    """

    engine: GenerationService
    replay: Literal["R3", "none"] = "R3"
    temperature: float | None = None
    tokens_key: Any = ("tokens", "full")
    mask_key: Any = ("masks", "all_attention_mask")
    routed_experts_key: Any = ("routed_experts", "full")
    sampled_key: Any = ("log_probs", "full")
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_keys(self) -> list[Any]:
        """The keys that it reads from every sample besides its sequence."""
        return [self.routed_experts_key] if self.replay == "R3" else []

    def answers(
        self, samples: Sequence[TensorDictBase], sequences: Sequence[FullSequence], keys: Mapping[str, Any]
    ) -> list[TensorDictBase]:
        """Return the output of each sample; see :meth:`score`, and ``scored_tensordict``.

        Args:
            samples: of the batch, batch size ``[]`` each.
            sequences: as read from the samples.
            keys: where to write.

        Raises:
            ValueError: text or a chat of a sample whose kept words may belong to other tokens.
        """
        rows = [self._row(*pair, i) for i, pair in enumerate(zip(samples, sequences, strict=True))]
        scores = self.score(lazy_stack(rows))
        return [scored_tensordict(one, row, keys) for one, row in zip(sequences, scores, strict=True)]

    def _row(self, sample: TensorDictBase, sequence: FullSequence, position: int) -> TensorDictBase:
        """Return a sample with its sequence where :meth:`score` reads it, and the other entries that it reads."""
        if sequence.text is None:
            row = sample.copy()
        else:
            if sample.get((SAMPLING, "kept"), None) is not None:
                raise ValueError(
                    f"sample {position} says which words each token was sampled from, and text may be encoded to other "
                    f"tokens: input_mode='tokens' scores those; or exclude {SAMPLING!r}, and all words count"
                )
            row = sample.select(SAMPLING, "min_version", strict=False).copy()
        row.set(self.tokens_key, sequence.ids)
        return row.set(self.mask_key, sequence.mask)

    def score(self, td: TensorDictBase) -> list[Tensor]:
        """Return the log-probs of each sample's tokens, float32 ``[T]``; 0 on pads and on first tokens.

        Args:
            td: batch size ``[B]``, dense or lazily stacked. ``"min_version"``, one per sample, is read if present.

        Raises:
            RoutingError: the routes that ``replay`` needs are missing, or do not fit.
            ValueError: a batch that was not sampled at ``temperature``, or a sample without real tokens.
        """
        batch = read_batch(td, self.tokens_key, self.mask_key)
        if self.temperature is None and (unsaid := says_nothing(td, self.sampled_key)) is not None:
            warnings.warn(UNSAID.format(unsaid), stacklevel=4)
        sampled_from = read_sampling(td, batch, self.temperature)
        routes = self._routes(td, batch)
        real = batch.split(batch.mask)
        if empty := [i for i, mask in enumerate(real) if not mask.any()]:
            raise ValueError(f"sample {empty[0]} has no tokens but pads")
        rows = [] if routes is None else batch.split(routes)
        scores = self.engine.score(
            [ids[mask] for ids, mask in zip(batch.split(batch.ids), real, strict=True)],
            None if routes is None else [one[mask] for one, mask in zip(rows, real, strict=True)],
            temperature=sampled_from.temperatures.tolist(),
            kept=[_of_tokens(kept, mask) for kept, mask in zip(sampled_from.kept, real, strict=True)],
            min_version=request_arguments(td.unbind(0)).get("min_version"),
            **self.arguments,
        )
        assert isinstance(scores, list)  # a list of sequences was passed
        return [_laid_out(one, mask) for one, mask in zip(scores, real, strict=True)]

    def _routes(self, td: TensorDictBase, batch: ScoringBatch) -> Tensor | None:
        if self.replay == "none":
            return None
        layout = self.engine.routing_layout
        if layout is None:
            raise ReplayError("replay='R3' needs an engine that captures routes: pass replay='none' for this one")
        tail = (layout.num_layers, layout.top_k)
        routes = read_routes(td, self.routed_experts_key, batch, tail, "raise")
        if routes is None:
            raise no_routes("R3", self.routed_experts_key)
        return routes


def _of_tokens(kept: KeptTokens | None, mask: Tensor) -> KeptTokens | None:
    if kept is None:
        return None
    ids, sizes = select_rows(kept.ids, kept.sizes, mask)
    return KeptTokens(ids=ids, sizes=sizes)


def _laid_out(scores: Tensor, mask: Tensor) -> Tensor:
    row = torch.zeros(len(mask))
    row[mask] = scores.nan_to_num(0.0)
    return row
