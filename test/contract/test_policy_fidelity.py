"""What replay is for: bf16 rollouts of a real engine, on the tokens for which trainer and engine route differently.

``test_policy_sampling.py`` proves the mapping in float32, where there is nothing to gain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from torch import Tensor
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM

from support.engines import EngineShelf, start_engine
from torchrl_moe.modules import TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import MismatchMetrics
from torchrl_moe.testing.tiny_moe import save_tiny_moe

DEEP = {"num_hidden_layers": 6, "num_experts": 64, "num_experts_per_tok": 8, "hidden_size": 128}
PROMPTS, PROMPT_TOKENS, NEW = 16, 8, 40


@pytest.fixture
def rollouts(no_engine: EngineShelf, tmp_path: Path) -> tuple[Path, TensorDictBase]:
    """A model's folder, and what an engine answered with it, in bf16."""
    path = save_tiny_moe(tmp_path, "qwen3_moe", dtype=torch.bfloat16, **DEEP)
    prompts = torch.randint(0, 256, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    sampling = {"max_new_tokens": NEW, "temperature": 1.0, "ignore_eos": True}
    with start_engine(path, dtype="bfloat16") as engine, set_list_to_stack(True):
        policy = vLLMWrapper(engine, input_mode="tokens", generate_kwargs=sampling)
        return path, policy(lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in prompts]))


def experts(td: TensorDictBase, key: str) -> Tensor:
    """Sets of experts ``[B, T, L, K]``, comparable."""
    return torch.stack(td.get((key, "full"), as_list=True)).long().sort(-1).values


@pytest.mark.engine
@torch.no_grad()
def test_replay_halves_the_mismatch_of_tokens_whose_routes_differ(
    rollouts: tuple[Path, TensorDictBase], record_property: Any
) -> None:
    path, td = rollouts
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    recording = TransformersWrapper(model, replay="R2")
    live = recording.score(td, entropy=False)[0]  # the live router's log-probs, and its experts beside the engine's
    replayed = recording.get_new_version(replay="R3").score(td, entropy=False)[0]

    theirs, ours = experts(td, "routed_experts"), experts(td, "train_routed_experts")
    differ = torch.zeros(theirs.shape[:2], dtype=torch.bool)
    differ[:, 1:] = (theirs != ours).any(-1).any(-1)[:, :-1]  # a token's log-prob is that of the row before it
    sampled = torch.stack(td.get(("log_probs", "full"), as_list=True))
    at = differ & sampled.isfinite()
    gaps = [(log_probs - sampled)[at].abs().mean().item() for log_probs in (live, replayed)]

    kl = []
    for log_probs in (live, replayed):
        metrics = MismatchMetrics(thresholds=None)
        metrics.update(td, log_probs)
        kl.append(metrics.compute()["mismatch/k3"])
    record_property("k3_live", kl[0])
    record_property("k3_replayed", kl[1])
    print(
        f"{at.sum()} of {sampled.isfinite().sum()} tokens differ: |dlogp| {gaps[0]:.1e} live, {gaps[1]:.1e} replayed;"
    )
    print(f"k3 of all {kl[0]:.1e} live, {kl[1]:.1e} replayed")

    assert at.sum() > 100
    assert gaps[0] > 2 * gaps[1]
    assert kl[0] > kl[1]
