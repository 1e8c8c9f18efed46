"""One sample of a batch on its way to the engine, for callers that ask the engine themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_moe.modules.policies.prompts import Prompts
from torchrl_moe.modules.policies.rollout import RolloutKeys

__all__ = ["SampleRequest"]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What is asked for one sample.

    Attributes:
        sample: batch size ``[]``; an earlier turn's tokens, log-probs and routes stand where it holds them.
        prompts: of the batch that the sample is from.
        index: its place in that batch.
        keys: what is written of its answer.
        arguments: of the engine's ``agenerate``.
    """

    sample: TensorDictBase
    prompts: Prompts
    index: int
    keys: RolloutKeys
    arguments: dict[str, Any]
