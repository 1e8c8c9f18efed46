"""A real service over plain transformers: two replicas in child processes, their weights, refusals and deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM

from support.engines import EngineShelf
from support.plain import TOLERANCE, sets
from support.processes import ids_request
from support.versions import SECONDS, Versions, ask, let_run, random_ids
from support.waiting import until
from torchrl_moe.errors import EngineError, RequestRefusedError
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.modules.backends.process.engine_program import Load
from torchrl_moe.modules.backends.transformers.engine_process import EngineProcess
from torchrl_moe.modules.backends.transformers.loading import Loaded
from torchrl_moe.testing.tiny_moe import make_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme, get_model_metadata

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}


def test_several_replicas_stand_behind_one_service(second_engine: AsyncVLLM) -> None:
    assert [info.engine_version.split()[0] for info in second_engine.infos] == ["transformers"] * 2
    ids = [70, 71, 72]
    one, two = (second_engine.generate(ids, GREEDY, actor_index=i, use_tqdm=False) for i in (0, 1))
    assert [one.metrics.replica, two.metrics.replica] == [0, 1]
    assert one.outputs[0].token_ids.tolist() == two.outputs[0].token_ids.tolist()
    sampled = {"max_tokens": 30, "ignore_eos": True}
    noisy = [second_engine.generate(ids, sampled, actor_index=i, use_tqdm=False).outputs[0] for i in (0, 1)]
    assert noisy[0].token_ids.tolist() != noisy[1].token_ids.tolist()  # each has a seed of its own
    seeded = [
        second_engine.generate(ids, {**sampled, "seed": 3}, actor_index=i, use_tqdm=False).outputs[0] for i in (0, 1)
    ]
    assert seeded[0].token_ids.tolist() == seeded[1].token_ids.tolist()
    many = second_engine.generate([ids] * 6, {**sampled, "n": 2}, use_tqdm=False)
    assert {completion.metrics.replica for completion in many} == {0, 1}
    assert all(len(completion.outputs) == 2 for completion in many)
    assert second_engine.get_tokenizer().encode("Hi") == [72, 105]
    assert second_engine.get_model_metadata() == get_model_metadata(make_tiny_moe("qwen3_moe"))


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_p": 0.9, "top_k": 40, "temperature": 0.8}])
@torch.no_grad()
def test_rollouts_are_what_the_trainer_scores_with_their_experts(
    second_engine: AsyncVLLM, shelf: EngineShelf, sampling: dict[str, Any]
) -> None:
    kwargs = {"max_new_tokens": 12, "ignore_eos": True, **sampling}
    policy = vLLMWrapper(second_engine, input_mode="tokens", generate_kwargs=kwargs)
    rows = [torch.from_numpy(random_ids(seed, 5 + seed)) for seed in range(6)]
    with set_list_to_stack(True):
        td = policy(lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in rows]))
        model = AutoModelForCausalLM.from_pretrained(shelf.folder("qwen3_moe"), dtype=torch.float32)
        scored = TransformersWrapper(model, replay="R3").score(td, entropy=False)[0]
    for row, own in zip(td.unbind(0), scored, strict=True):
        sampled, routes = row["log_probs", "full"], row["routed_experts", "full"]
        known = sampled.isfinite()
        assert known.sum() == 12
        assert (sampled[known] - own[-len(sampled) :][known]).abs().max() <= TOLERANCE
        assert routes.dtype == torch.int8
        assert (routes[-1] == -1).all()
        assert (routes[:, 0] == -1).all()
        assert (routes[:-1, 1:] >= 0).all()


def test_experts_are_followed_and_tokens_are_scored(second_engine: AsyncVLLM) -> None:
    ids = [70, 71, 72, 73]
    own = second_engine.generate(ids, GREEDY, use_tqdm=False).outputs[0].routed_experts
    assert own is not None
    rows = (own[:4].astype(np.int8) + 1) % 16
    rows[:, 0] = -1
    forced = second_engine.generate(ids, GREEDY, routed_experts=rows, use_tqdm=False).outputs[0].routed_experts
    assert forced is not None
    assert (sets(forced[:4, 1:]) == sets(rows[:, 1:])).all()
    free, followed = second_engine.score([ids, ids], routed_experts=[None, rows])
    assert free.shape == followed.shape == (4,)
    assert not torch.equal(free[1:], followed[1:])


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memmap", "gloo"])
def versions(
    second_engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Versions]:
    """Versions of the weights, brought by each transport; the old ones afterwards."""
    made = Versions(second_engine, shelf, "qwen3_moe", tmp_path, request.param)
    yield made
    made.close()


def test_every_token_is_of_the_version_that_it_says(versions: Versions) -> None:
    for seed, (pause, clear_cache) in enumerate([("keep", False), ("keep", True), ("abort", False)]):
        before, manifest = versions.now, versions.prepare(seed)
        asked = ask("running", random_ids(seed, 9), max_tokens=30, n=2)
        futures = [replica.submit([asked])[0] for replica in versions.replicas]
        let_run(versions.replicas[0], futures, 0.02)
        versions.swap(manifest, pause, clear_cache)
        mixes = pause == "keep" and not clear_cache  # then old keys and values serve new tokens
        for future in futures:
            completion = future.result(SECONDS)
            for output in completion.outputs:
                assert len(output.token_ids) == 30
                only = before if mixes and output.policy_versions[0] == before else None
                versions.check(completion, output, only=only)
    for replica in versions.replicas:
        (fresh,) = (future.result(SECONDS) for future in replica.submit([ask("new", random_ids(9, 12), max_tokens=8)]))
        assert set(fresh.outputs[0].policy_versions.tolist()) == {versions.now}
        versions.check(fresh, fresh.outputs[0])


def test_a_trainer_sends_its_weights_and_a_killed_replica_gets_the_newest(
    second_engine: AsyncVLLM, tmp_path: Path
) -> None:
    sender = VLLMWeightSyncScheme(mode="abort_resume", verify="canary").create_sender()
    try:
        for seed in (1, 0):  # the last are those that it had
            model = make_tiny_moe("qwen3_moe", seed=seed)
            sender.register_model(model)
            sender.init_all_workers_group(None, vllm_engine=second_engine)
            report = sender.update_weights()
            assert report.failed == {}
            completion = second_engine.generate([70, 71, 72], GREEDY, use_tqdm=False)
            (output,) = completion.outputs
            assert set(output.policy_versions.tolist()) == {report.version}
            with torch.no_grad():
                ids = torch.tensor([[70, 71, 72, *output.token_ids.tolist()]])
                assert model(ids).logits[0, 2:-1].argmax(-1).tolist() == output.token_ids.tolist()
        restarts = second_engine.replica_table[1].restarts
        os.kill(second_engine.replica_table[1].replica._child.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        many = second_engine.generate([[70, 71]] * 8, GREEDY, use_tqdm=False)  # none is lost
        assert len(many) == 8

        def is_back() -> bool:
            entry = second_engine.replica_table[1]
            return entry.restarts > restarts and entry.state.name == "SERVING"

        until(is_back, SECONDS)
        late = second_engine.generate([70, 71], GREEDY, actor_index=1, use_tqdm=False)
        assert set(late.outputs[0].policy_versions.tolist()) == {report.version}
    finally:
        sender.shutdown()


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_what_it_does_not_serve_is_refused_by_name_and_it_continues(second_engine: AsyncVLLM) -> None:
    with pytest.raises(ValueError, match="sleep: engine='transformers' keeps its model in memory"):
        second_engine.sleep()
    with pytest.raises(ValueError, match="torchrl_moe_save_params: engine='transformers' has no workers"):
        second_engine.save_model_params()
    with pytest.raises(RequestRefusedError, match="serves no adapters"):
        second_engine.generate([70], GREEDY, lora_request={"lora_name": "a", "lora_path": "b"}, use_tqdm=False)
    with pytest.raises(RequestRefusedError, match="does not serve logit_bias"):
        second_engine.generate([70], {**GREEDY, "logit_bias": {1: 1.0}}, use_tqdm=False)
    sender = VLLMWeightSyncScheme(lora="adapter").create_sender()
    with pytest.raises((ValueError, EngineError), match="lora='merged'"):
        try:
            sender.init_all_workers_group(None, vllm_engine=second_engine)
        finally:
            sender.shutdown()
    second_engine.wake_up()
    assert second_engine.reset_prefix_cache()
    assert second_engine.generate([70], GREEDY, use_tqdm=False).outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"enable_prefix_caching": True}, "there is no prefix cache"),
        ({"tensor_parallel_size": 2}, "a replica computes on one device"),
        ({"enable_fp32_output": True}, "enable_fp32_output is vLLM's"),
        ({"gpu_memory_utilisation": 0.5}, "has no gpu_memory_utilisation"),
    ],
)
def test_arguments_are_refused_before_a_process_starts(
    shelf: EngineShelf, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        AsyncVLLM.from_pretrained(shelf.folder("qwen3_moe"), engine="transformers", **arguments)


def test_an_engine_that_nobody_knows_is_refused(shelf: EngineShelf) -> None:
    with pytest.raises(ValueError, match="engine must be one of vllm, transformers, got 'sglang'"):
        AsyncVLLM.from_pretrained(shelf.folder("qwen3_moe"), engine="sglang")  # type: ignore[arg-type]


# -- one process from the inside --------------------------------------------------------------------------------------


class Inbox:
    """The driver's messages, put by hand."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def put(self, *message: Any) -> None:
        self.messages.put_nowait(message)


def test_a_probe_says_whether_a_step_ends_in_time(plain: Loaded) -> None:
    async def main() -> None:
        process = EngineProcess(plain, Inbox(), lambda message: None)  # type: ignore[arg-type]
        idle = await process.command_probe(60.0)
        async with process.requests.turn:
            late = await process.command_probe(0.01)
        again = await process.command_probe(60.0)
        assert [one.core_answered for one in (idle, late, again)] == [True, False, True]
        assert 0 < idle.cpu_seconds <= again.cpu_seconds
        process.close()

    asyncio.run(main())


def test_a_model_that_fails_ends_the_process_with_its_words(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(plain.decoder, "step", fail)
    sent: list[tuple[Any, ...]] = []

    async def main() -> None:
        process = EngineProcess(plain, Inbox(), sent.append)  # type: ignore[arg-type]
        serving = asyncio.create_task(process.serve())
        process.start(ids_request("a", [70]))
        await asyncio.wait_for(serving, 60.0)
        process.close()

    asyncio.run(main())
    assert [message for message in sent if message[0] != "stats"] == [
        ("died", "the model failed: RuntimeError: out of memory")
    ]


def test_stats_are_those_of_the_batch(plain: Loaded) -> None:
    async def main() -> None:
        process = EngineProcess(plain, Inbox(), lambda message: None)  # type: ignore[arg-type]
        assert isinstance(process.load, Load)
        process.start(ids_request("a", [70], sampling_params={"max_tokens": 3, "ignore_eos": True, "n": 2}))
        working = asyncio.create_task(process.requests.run())
        async with asyncio.timeout(60.0):
            while process.requests:
                await asyncio.sleep(0.001)
        working.cancel()
        stats = await process.command_stats()
        assert (stats.completions, stats.generated_tokens, stats.steps, stats.running) == (2, 6, 3, 0)
        assert stats.step_at > 0
        process.close()

    asyncio.run(main())
