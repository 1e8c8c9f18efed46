"""Adapters sent to a real engine: it computes what peft does, and a request keeps the adapter that it began with."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from support.engines import ADAPTED, EngineShelf
from support.reference import TOLERANCE, Reference
from support.waiting import until
from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.sender import VLLMWeightSender

IDS = [(7 * place + 3) % 256 for place in range(280)]  # more than a block of the prefix cache
SHORT = IDS[:9]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def tune(shelf: EngineShelf) -> tuple[Reference, Any]:
    """The engine's model with an adapter on its attention: as a reference, and as peft's."""
    from peft import LoraConfig, get_peft_model

    reference = Reference(shelf.folder("qwen3_moe"))
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=ATTENTION, init_lora_weights=False)
    return reference, get_peft_model(reference.model, config)


@torch.no_grad()
def train(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))


def ask(engine: AsyncVLLM, ids: list[int] = IDS, tokens: int = 12) -> Completion:
    params = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "temperature": 1.0}
    completion: Completion = engine.generate(ids, params, use_tqdm=False)
    return completion


def loaded(engine: AsyncVLLM) -> set[int]:
    ((numbers,),) = engine.collective_rpc("list_loras")
    return {number for number in numbers if number >= 1 << 30}


def connect(engine: AsyncVLLM, model: Any) -> VLLMWeightSender:
    sender = VLLMWeightSyncScheme(lora="adapter").create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(None, vllm_engine=engine)
    return sender


@pytest.mark.engine("qwen3_moe", **ADAPTED)
@pytest.mark.usefixtures("one_thread")
def test_an_engine_computes_with_each_adapter_what_peft_does(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    reference, model = tune(shelf)
    sender = connect(engine, model)
    before = engine.replica_table[0].version
    for step in range(1, 3):
        train(model)
        assert reference.distance(ask(engine)) > 100 * TOLERANCE  # the change is one that shows
        report = sender.update_weights()
        print(report)
        completion = ask(engine)
        assert completion.num_cached_tokens == 0  # all that is cached is of other adapters
        assert reference.distance(completion) <= TOLERANCE
        assert set(completion.outputs[0].policy_versions.tolist()) == {before + step}
        again = ask(engine)
        assert again.num_cached_tokens > 0
        assert reference.distance(again) <= TOLERANCE
    assert (report.failed, report.replicas[0].paused) == ({}, 0.0)
    until(lambda: len(loaded(engine)) == 1, 30.0, look_every=0.05)
    sender.shutdown()
    assert reference.distance(ask(engine)) <= TOLERANCE  # it stays when its store is gone


@pytest.mark.engine("qwen3_moe", **ADAPTED)
@pytest.mark.usefixtures("one_thread")
def test_a_request_that_began_with_an_adapter_is_exact_when_merged_weights_come(
    engine: AsyncVLLM, shelf: EngineShelf
) -> None:
    """They have the adapter in them: with it once more, each token would be of a model that nobody has."""
    reference, model = tune(shelf)
    sender = connect(engine, model)
    train(model)
    before = sender.update_weights().version
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sender.shutdown()
    train(model)
    merged = VLLMWeightSyncScheme(mode="hot_swap", kv="recompute").create_sender()
    merged.register_model(model)
    merged.init_all_workers_group(None, vllm_engine=engine)
    after = merged.publish()
    staged = merged.prefetch(after)
    answers: list[Completion] = []
    asking = threading.Thread(target=lambda: answers.append(ask(engine, SHORT, 480)))
    asking.start()
    replica = engine.replica_table[0].replica
    until(lambda: any(len(one.outputs[0].token_ids) >= 20 for one in replica.call(Engine.snapshot, 30.0)))
    assert merged.apply(after, staged).failed == {}
    asking.join(60.0)
    (completion,) = answers
    (output,) = completion.outputs
    versions = torch.from_numpy(output.policy_versions.astype("int64"))
    assert versions.unique_consecutive().tolist() == [before, after]
    assert output.finish_reason == "length"
    got, ids = torch.from_numpy(output.logprobs.copy()), [*SHORT, *output.token_ids.tolist()]
    rows = torch.cat([versions[:1].expand(len(SHORT) - 1), versions])  # row t comes with token t + 1
    for version, state in ((after, model.state_dict()), (before, old)):
        model.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
        log_probs, _ = reference(torch.tensor(ids), routes=output.routed_experts, followed=rows < version)
        off = (got - log_probs[len(SHORT) :]).abs()
        assert off[versions == version].max() <= 5 * TOLERANCE  # of 480 tokens, some are rare
        assert off[versions != version].max() > 100 * TOLERANCE
    merged.shutdown()
    shelf.clear()  # it takes no adapters any more


@pytest.mark.engine("qwen3_moe", **ADAPTED)
@pytest.mark.usefixtures("one_thread")
def test_a_request_under_way_keeps_its_adapter(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    reference, model = tune(shelf)
    sender = connect(engine, model)
    version = sender.update_weights().version
    answers: list[Completion] = []
    asking = threading.Thread(target=lambda: answers.append(ask(engine, SHORT, 480)))
    asking.start()
    while not engine.replica_table[0].replica.call(Engine.stats, 30.0).running:
        assert asking.is_alive()
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model)
    sender.update_weights()
    assert asking.is_alive()  # nothing waited for it
    after = ask(engine)
    asking.join(60.0)
    assert reference.distance(after) <= TOLERANCE
    assert set(after.outputs[0].policy_versions.tolist()) == {version + 1}
    assert reference.distance(answers[0]) > 100 * TOLERANCE
    model.load_state_dict(old)
    assert reference.distance(answers[0]) <= TOLERANCE
    assert set(answers[0].outputs[0].policy_versions.tolist()) == {version}
    sender.shutdown()


@pytest.mark.engine("qwen3_moe", **ADAPTED)
def test_an_adapter_that_the_engine_would_not_apply_whole_is_refused(engine: AsyncVLLM) -> None:
    from peft import LoraConfig, get_peft_model

    before = engine.replica_table[0].version
    for config, words in (
        ({"r": 16, "target_modules": ["q_proj"]}, "LoRA rank 16 is greater than max_lora_rank 8"),
        ({"r": 4, "target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, "experts"),
    ):
        sender = connect(engine, get_peft_model(make_tiny_moe("qwen3_moe"), LoraConfig(**config)))
        with pytest.raises(WeightSyncError, match=words) as caught:
            sender.update_weights()
        print(caught.value)
        sender.shutdown()
    assert engine.replica_table[0].version == before
    assert ask(engine).outputs[0].finish_reason == "length"
