"""Weights on the real engine: each way to send them is exact, and so is every token of a request across a swap."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.collectors.llm.weight_update.vllm_v2 import vLLMUpdaterV2
from transformers import AutoModelForCausalLM

from support.engines import EngineShelf
from support.processes import ids_request
from support.reference import TOLERANCE, Reference
from support.versions import SECONDS, Versions, ask, let_run, random_ids
from support.waiting import until
from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion, OnResume, Request, Scoring
from torchrl_moe.modules.serving.requests import ONE_TOKEN
from torchrl_moe.weight_update import VLLMWeightSyncScheme

# -- each way to send them --------------------------------------------------------------------------------------------
PROMPTS = [[72, 101, 108], list(range(40, 90)), [200, 3, 3, 199] * 6]
WAYS: dict[str, dict[str, Any]] = {
    "canary": {"verify": "canary", "kv": "recompute"},
    "delta of a directory, drain": {"delta": True, "mode": "drain"},
    "gloo, abort": {"transport": "gloo", "mode": "abort_resume", "prefetch": 2},
    "nothing verified": {"verify": "off"},
}


def distance(engine: AsyncVLLM, reference: Reference) -> float:
    """Between what the engine says of its answers and what the trainer's model does."""
    params = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0, "temperature": 1.0}
    return reference.distance(*engine.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False))


@pytest.mark.engine("qwen3_moe")
@pytest.mark.usefixtures("one_thread")
def test_an_engine_computes_what_the_trainer_does_however_it_is_sent(
    engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path
) -> None:
    reference = Reference(shelf.folder("qwen3_moe"))
    original = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    for number, (way, choices) in enumerate(WAYS.items()):
        folder = {"folder": tmp_path} if "delta" in choices else {}
        sender = VLLMWeightSyncScheme(**choices, **folder, timeout_seconds=120.0).create_sender()
        sender.register_model(reference.model)
        sender.init_all_workers_group(None, vllm_engine=engine)
        for seed in (2 * number, 2 * number + 1):
            reference.change(seed, only="" if seed % 2 else "layers.2")
            assert distance(engine, reference) > 100 * TOLERANCE  # the change is one that shows
            report = sender.update_weights()
            assert report.failed == {}, way
            assert distance(engine, reference) <= TOLERANCE, way
            print(f"{way}: {report}")
        if number == 3:
            sender.update_weights(original)  # the model's own, stacked names
            reference.model.load_state_dict(original)
            assert distance(engine, reference) <= TOLERANCE
        sender.shutdown()


@pytest.mark.engine("qwen3_moe")
@pytest.mark.usefixtures("one_thread")
def test_numbers_that_overflow_are_counted_and_do_not_outlive_their_weights(
    engine: AsyncVLLM, shelf: EngineShelf
) -> None:
    """An expert overflows that the weight check does not reach; the cache's blocks then hold NaN."""
    reference = Reference(shelf.folder("qwen3_moe"))
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(reference.model)
    sender.init_all_workers_group(None, vllm_engine=engine)
    reached = reference(torch.tensor([0]))[1][2][0].tolist()
    down = reference.model.model.layers[2].mlp.experts.down_proj
    chosen = next(expert for expert in range(len(down)) if expert not in reached)
    before = down.detach().clone()
    prompts = [[token, *range(token)] for token in range(1, 31)]

    def bad_log_probs() -> int:
        done = engine.generate(prompts, {"max_tokens": 20, "logprobs": 0, "ignore_eos": True}, use_tqdm=False)
        return sum(int((~np.isfinite(answer.outputs[0].logprobs)).sum()) for answer in done)

    with torch.no_grad():
        down[chosen].fill_(3e38)
    assert sender.update_weights().failed == {}
    counted = engine.stats()[0]["not_finite_logprobs"]
    bad = bad_log_probs()
    assert bad > 20
    assert engine.stats()[0]["not_finite_logprobs"] - counted == bad
    with torch.no_grad():
        down.copy_(before)
    assert (sender.update_weights().failed, bad_log_probs()) == ({}, 0)
    assert distance(engine, reference) <= TOLERANCE
    sender.shutdown()


IDS = [72, 105, 44, 32, 119, 111]


@pytest.mark.engine("qwen3_moe")
def test_torchrls_updater_brings_weights_through_our_sender(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    updater = vLLMUpdaterV2(engine)
    assert (updater.get_tp_size(), updater.model_metadata) == (1, engine.get_model_metadata())
    with pytest.raises(RuntimeError, match="init_weight_update_group: no sender has this engine"):
        updater.init()
    model = AutoModelForCausalLM.from_pretrained(shelf.folder("qwen3_moe"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(None, vllm_engine=engine)
    updater.init()

    def log_probs() -> torch.Tensor:
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([IDS])).logits[0].float(), -1)
        return rows[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])]

    version, old = engine.replica_table[0].version, log_probs()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    updater.push_weights_from_transformers(SimpleNamespace(model=model))  # as a TorchRL wrapper holds it
    assert engine.replica_table[0].version == version + 1
    assert (log_probs() - old).abs().max() > 100 * TOLERANCE
    assert (engine.score(IDS)[1:] - log_probs()).abs().max() <= TOLERANCE
    with pytest.raises(ManifestMismatch, match="missing"):  # part of a model is never loaded
        updater.push_weights(iter(list(before.items())[:3]))
    updater.push_weights(iter(before.items()))
    assert (engine.score(IDS)[1:] - old).abs().max() <= TOLERANCE
    sender.shutdown()


# -- requests across a swap -------------------------------------------------------------------------------------------
@pytest.mark.engine("qwen3_moe")
def test_what_swaps_cut_continues_by_itself_and_every_token_is_exact(versions: Versions) -> None:
    """Over the words that sampling kept, too, and answers of one request end by themselves."""
    (replica,) = versions.replicas
    kinds: list[dict[str, Any]] = [{"n": 3}, {"top_p": 0.9}, {"min_p": 0.03, "n": 2}]
    asked = [ask(f"cut-{i}", random_ids(i, 12), max_tokens=300, **kind) for i, kind in enumerate(kinds)]
    guided = Request(
        request_id="guided",
        sampling_params={"max_tokens": 310, "logprobs": 0},
        prompt_token_ids=np.arange(65, 90, dtype=np.int32),
        guided_options={"regex": "[ab]{200,300}"},
    )
    first = versions.now
    prepared = [versions.prepare(seed) for seed in (21, 22)]
    for version in (first + 1, first + 2):
        assert versions.changed(version - 1, version) > 100 * TOLERANCE
    futures = replica.submit([*asked, ask("short", random_ids(90, 12), max_tokens=3, n=3), guided])
    futures[-2].result(60.0)
    for manifest in prepared:
        let_run(replica, futures[-1:])
        versions.stage(manifest)  # again: both were, one after the other
        versions.swap(manifest, "abort")
    done: list[Completion] = [future.result(60) for future in futures]
    seen = []
    for completion, request, kind in zip(done[:-2], asked, kinds, strict=True):
        assert completion.request_id == request.request_id
        assert [output.index for output in completion.outputs] == list(range(kind.get("n", 1)))
        for output in completion.outputs:
            assert (len(output.token_ids), output.finish_reason) == (300, "length")
            assert output.policy_versions.tolist() == sorted(output.policy_versions.tolist())
            seen.append(set(output.policy_versions.tolist()))
            assert (output.kept is None) == ("n" in kind and "min_p" not in kind)
            versions.check(completion, output)
    # a machine that keeps this process waiting lets some answers end before a swap
    assert sum(had == {first, first + 1, first + 2} for had in seen) >= len(seen) // 2
    (answer,) = done[-1].outputs  # a grammar cannot be taken up in its middle
    assert set(answer.text) <= set("ab")
    assert 200 <= len(answer.text) <= 300
    assert set(answer.policy_versions.tolist()) == {versions.now}


@pytest.mark.engine("qwen3_moe")
def test_after_a_hot_swap_no_first_token_comes_from_an_old_cache(versions: Versions) -> None:
    """Many requests share a prefix that is cached; most of them wait in vLLM's queue when the weights change."""
    (replica,) = versions.replicas
    shared = random_ids(7, 400)
    asked = [ask(f"q-{i}", np.append(shared, i), max_tokens=40, n=3) for i in range(140)]
    before, manifest = versions.now, versions.prepare(31)
    futures = replica.submit(asked)
    futures[0].result(60)
    versions.swap(manifest)
    done: list[Completion] = [future.result(120) for future in futures]
    outputs = [(completion, output) for completion in done for output in completion.outputs]
    assert {int(output.policy_versions[0]) for _, output in outputs} == {before, versions.now}
    late = [pair for pair in outputs if pair[1].policy_versions[0] == versions.now]
    assert len(late) >= 20
    for completion, output in late[:: max(len(late) // 12, 1)]:
        versions.check(completion, output)


def fewest(replica: Any, asked: Sequence[Request]) -> int:
    """Tokens that the shortest of the running answers has."""
    running = {answer.request_id: answer for answer in replica.call(Engine.snapshot, 60)}
    return min((len(running[one.request_id].outputs[0].token_ids) for one in asked), default=0)


@pytest.mark.engine("qwen3_moe")
@pytest.mark.parametrize("clear_cache", [False, True])
def test_what_a_hot_swap_froze_continues_and_is_exact_if_the_cache_was_dropped(
    versions: Versions, clear_cache: bool
) -> None:
    """Else the old weights' keys and values stay in its prefix: only what it had before the swap is exact.

    The words that sampling kept are those of the version that sampled, on both sides of the swap.
    """
    (replica,) = versions.replicas
    before, manifest = versions.now, versions.prepare(41)
    assert versions.changed(before, manifest.version) > 100 * TOLERANCE
    kinds: list[dict[str, Any]] = [{"n": 2}, {"top_p": 0.9}, {"min_p": 0.03, "n": 2}]
    asked = [ask(f"f-{i}", random_ids(i, 12), max_tokens=300, **kind) for i, kind in enumerate(kinds)]
    futures = replica.submit(asked)
    until(lambda: fewest(replica, asked) >= 30)
    versions.swap(manifest, "keep", clear_cache)
    for future, kind in zip(futures, kinds, strict=True):
        completion = future.result(60)
        for output in completion.outputs:
            assert set(output.policy_versions.tolist()) == {before, versions.now}
            assert (output.kept is None) == (kind == {"n": 2})
            if output.kept is not None:
                assert all(output.kept.sizes[output.policy_versions == one].any() for one in (before, versions.now))
            versions.check(completion, output, only=None if clear_cache else before)


SEGMENTS = 3
HOW: tuple[OnResume, ...] = ("forced", "live")


@pytest.mark.engine("qwen3_moe")
@pytest.mark.parametrize(
    ("pause", "clear_cache"), [("abort", False), pytest.param("keep", True, marks=pytest.mark.soak)]
)
def test_segments_are_exact_under_recorded_rows_and_far_off_where_they_are_routed_again(
    versions: Versions, pause: str, clear_cache: bool
) -> None:
    """Weights change twice, by 2 %, under answers of which half are read again with live routing."""
    (replica,) = versions.replicas
    first = versions.now
    asked = [ask(f"{how}-{i}", random_ids(200 + i, 24), on_resume=how, max_tokens=300) for i in range(2) for how in HOW]
    futures = replica.submit(asked)
    for i in range(1, SEGMENTS):
        manifest = versions.prepare(60 + i, scale=0.02)
        until(lambda: fewest(replica, asked) >= 40 * i)  # noqa: B023  it is over before the next round
        versions.swap(manifest, pause, clear_cache)
    live = []
    for request, future in zip(asked, futures, strict=True):
        completion = future.result(120)
        (output,) = completion.outputs
        assert set(output.policy_versions.tolist()) == set(range(first, first + SEGMENTS))
        assert output.resume == request.on_resume
        if request.on_resume == "forced":
            versions.check(completion, output)  # to TOLERANCE
        else:
            live.append(versions.distance(completion, output))
    assert max(live) >= 100 * TOLERANCE


TIGHT: dict[str, Any] = {"kv_cache_memory_bytes": 10 << 18}
WAITING: dict[str, Any] = {**TIGHT, "async_scheduling": False}


@pytest.mark.soak  # a dropped cache, above, has requests read again in the same way
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(TIGHT, marks=pytest.mark.engine("qwen3_moe", **TIGHT), id="begins a step during another"),
        pytest.param(WAITING, marks=pytest.mark.engine("qwen3_moe", **WAITING), id="waits for each step"),
    ],
)
def test_a_request_that_is_preempted_is_read_again_by_the_experts_that_it_had(
    spec: Any, versions: Versions, engine: AsyncVLLM
) -> None:
    """The cache holds nine blocks, and each answer takes four in the end; its first part is of older weights."""
    (replica,) = versions.replicas
    asked = [ask(f"p-{i}", random_ids(300 + i, 100), n=2, max_tokens=350) for i in range(3)]
    futures = replica.submit(asked)
    until(
        lambda: (
            sum(len(output.token_ids) >= 8 for one in replica.call(Engine.snapshot, 60) for output in one.outputs) >= 4
        )
    )
    first, manifest = versions.now, versions.prepare(71, scale=0.02)
    versions.swap(manifest, "keep", clear_cache=True)
    before = engine.stats()[0]["preemptions"]
    seen = set()
    for future in futures:
        completion = future.result(120)
        for output in completion.outputs:
            seen |= set(output.policy_versions.tolist())
            versions.check(completion, output)
    assert engine.stats()[0]["preemptions"] >= before + 3
    assert seen == {first, first + 1}


@pytest.mark.engine("qwen3_moe", max_num_batched_tokens=64, max_num_seqs=8, enable_chunked_prefill=True)
@pytest.mark.parametrize(
    ("pause", "clear_cache"), [("abort", False), ("keep", False), pytest.param("keep", True, marks=pytest.mark.soak)]
)
def test_a_sequence_is_scored_by_one_version_whatever_comes(versions: Versions, pause: str, clear_cache: bool) -> None:
    """While prompts are read in chunks, the weights change; and somebody asks what there is so far."""
    (replica,) = versions.replicas
    first, manifest = versions.now, versions.prepare(81)
    sequences = [random_ids(400 + i, 500) for i in range(6)]
    futures = replica.submit(
        [
            ids_request(f"score-{i}", ids, sampling_params=ONE_TOKEN, scoring=Scoring(temperature=0.8))
            for i, ids in enumerate(sequences)
        ]
    )
    until(lambda: futures[0].done())
    so_far = replica.call(Engine.snapshot, 60)
    assert 0 < len(so_far) < len(sequences)
    assert all(one.prompt_logprobs is None for one in so_far if one.aborted)
    versions.swap(manifest, pause, clear_cache)
    made_by = set()
    for ids, future in zip(sequences, futures, strict=True):
        completion = future.result(120)
        (version,) = set(completion.outputs[0].policy_versions.tolist())
        versions.load(version)
        off = torch.from_numpy(completion.prompt_logprobs.copy()) - versions.reference(ids, 0.8)[0]
        assert off[1:].abs().max() <= TOLERANCE
        made_by.add(version)
    assert made_by == {first, first + 1}


@pytest.mark.engine("qwen3_moe", tensor_parallel_size=2)
@pytest.mark.parametrize(("transport", "pause", "clear_cache"), [("memmap", "abort", False), ("gloo", "keep", True)])
def test_two_workers_of_one_model_have_each_version_exactly(
    engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path, transport: str, pause: str, clear_cache: bool
) -> None:
    with closing(Versions(engine, shelf, "qwen3_moe", tmp_path, transport)) as versions:
        (replica,) = versions.replicas
        before, manifest = versions.now, versions.prepare(1)
        assert versions.changed(before, manifest.version) > 100 * TOLERANCE
        futures = replica.submit([ask(f"t-{i}", random_ids(i, 20), max_tokens=150) for i in range(2)])
        let_run(replica, futures, 0.1)
        versions.swap(manifest, pause, clear_cache)
        for future in futures:
            completion = future.result(SECONDS)
            assert len(completion.outputs[0].token_ids) == 150
            versions.check(completion, completion.outputs[0])
        for future in replica.submit([ask(f"new-{i}", random_ids(i, 20 + i), max_tokens=12, n=2) for i in range(3)]):
            completion = future.result(SECONDS)
            for output in completion.outputs:
                assert set(output.policy_versions.tolist()) == {versions.now}
                versions.check(completion, output)
