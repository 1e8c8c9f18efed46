"""The request for one sample of a batch, for callers that send requests to the engine themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_moe.modules.policies.prompts import Prompts
from torchrl_moe.modules.policies.rollout import RolloutKeys

__all__ = ["SampleRequest"]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The request for one sample.

    Attributes:
        sample: batch size ``[]``; may hold an earlier turn's tokens, log-probs and routes.
        prompts: of the batch that the sample is from.
        index: of the sample in that batch.
        keys: that its answer is written to.
        arguments: of the engine's ``agenerate``.
    """

    sample: TensorDictBase
    prompts: Prompts
    index: int
    keys: RolloutKeys
    arguments: dict[str, Any]
