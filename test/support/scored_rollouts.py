"""Rollouts of a fake engine, for tests of what scores them: three answers of unequal length, with random routes.

No router would choose such routes, so a row that is not replayed, or replayed one off, shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.modules.policies.rollout import RolloutKeys, pad_answers
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

LAYOUT = RoutingLayout(num_layers=4, moe_layers=(1, 2, 3), top_k=4, num_experts=16)
SAMPLES = {"1+1=": 3, "a longer question": 6, "hm": 1}
"""Prompt -> tokens of its answer."""


def fake_rollouts() -> LazyStackedTensorDict:
    """Three answers of unequal length, without padding."""
    with FakeAsyncVLLM(seed=1, layout=LAYOUT) as engine:
        policy = vLLMWrapper(engine, input_mode="text")
        asked = [(lazy_stack([TensorDict({"text": {"prompt": prompt}})]), new) for prompt, new in SAMPLES.items()]
        answers = [policy(prompts, max_new_tokens=new)[0] for prompts, new in asked]
    assert len({len(answer["tokens", "full"]) for answer in answers}) == 3
    return lazy_stack(answers)


def at(temperature: float, td: TensorDictBase) -> TensorDictBase:
    """As if it had been sampled at a temperature."""
    for sample in td.unbind(0):
        sample["sampling", "temperature"] = torch.tensor(temperature)
    return td


def dense(td: TensorDictBase) -> TensorDictBase:
    """With pads on both sides, as ``vLLMWrapper(pad_output=True)`` writes them."""
    keys = td.select("tokens", "masks", "log_probs", "routed_experts", "policy_versions", "sampling")
    out = pad_answers(list(keys.unbind(0)), ByteTokenizer().pad_token_id, RolloutKeys(), [len(td)])
    mask = out["masks", "all_attention_mask"]
    assert not mask[:, 0].all()
    assert not mask[:, -1].all()
    return out


LAYOUTS: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {"ragged": lambda td: td, "dense": dense}
