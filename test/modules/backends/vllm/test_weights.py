"""The engine process's side of a weight update: its order over a fake engine, and its truth over real ones.

Truth is log-probs: checksums cannot tell a reload that went wrong, the trainer's own forward can.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from support.engines import EngineShelf, start_engine
from support.llm import FakeLLM, report
from support.loops import in_loop
from support.processes import ids_request
from support.reference import TOLERANCE
from support.versions import SECONDS, Versions
from support.versions import ask as request_of
from support.waiting import in_thread, until
from support.weights import note_made
from torchrl_moe.errors import DigestMismatch, EngineError, ManifestMismatch, WeightSyncError
from torchrl_moe.modules import AsyncVLLM, FaultPolicy
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.process.engine_program import FOLDER_VARIABLE
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, SwapReport, nothing_yet
from torchrl_moe.modules.backends.vllm import weights as weights_module
from torchrl_moe.modules.backends.vllm.weights import (
    FIRST_NUMBER,
    AdapterVersions,
    EngineWeights,
    Updates,
    WeightCheck,
    is_weight_check,
)
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.store import Manifest, WeightStoreWriter, adapter_tensors
from torchrl_moe.store.writer import version_path
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.transports.base import StageReport

# -- the weight check --------------------------------------------------------------------------------------------------
CANARY = {"token_ids": [5, 6, 7], "log_probs": [-1.0, -2.0], "tolerance": 1e-3}


def ask(engine: FakeLLM, canary: Any = None, seconds: float = 60.0) -> str:
    return asyncio.run(WeightCheck(engine, canary, "probe-3").ask(seconds))


def test_without_a_canary_one_token_is_asked_for_and_no_log_prob_of_the_prompt() -> None:
    from vllm import SamplingParams

    engine = FakeLLM()
    ask(engine)
    prompt, params, name = engine.prompts[0]
    assert (prompt, name) == ({"prompt_token_ids": [0], "cache_salt": "probe-3"}, "probe-3")
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, 0, None)
    assert is_weight_check(params)
    params.max_tokens = 2  # then it would have steps of its own for as long as it likes
    others = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, extra_args={"torchrl_moe": {"live": True}})
    assert not any(map(is_weight_check, (params, None, *others)))


def test_a_canary_is_asked_for_the_log_probs_of_its_own_prompt() -> None:
    engine = FakeLLM(prompt_logprobs=(-1.0005, -1.9995))
    ask(engine, CANARY)
    prompt, params, _ = engine.prompts[0]
    assert prompt["prompt_token_ids"] == [5, 6, 7]
    assert params.prompt_logprobs == 0
    with pytest.raises(WeightSyncError, match=r"by up to 2.0e-03 \(at token 2: -2.002 and -2\), allowed: 1.0e-03"):
        ask(FakeLLM(prompt_logprobs=(-1.0015, -2.002)), CANARY)
    with pytest.raises(WeightSyncError, match="not a number"):
        ask(FakeLLM(logprob=math.nan), CANARY)


def test_a_question_behind_a_long_queue_is_dropped_and_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(weights_module, "PROOF_SECONDS", 0.02)
    engine = FakeLLM()
    assert ask(engine) == ask(engine, CANARY) == ""
    engine.hangs = True
    for canary, seconds, waited in ((None, 60.0, "0.01"), (CANARY, 60.0, "0.02"), (CANARY, 0.005, "0.005")):
        assert ask(engine, canary, seconds) == f"the check of the new weights had no turn within {waited} s"
    assert engine.log[-2:] == ["probe", ("abort", ["probe-3"])]


# -- versions of an adapter --------------------------------------------------------------------------------------------
class Requests:
    """The adapters that requests have, and the one for those that come."""

    def __init__(self) -> None:
        self.adapter: Any = None
        self.version = 0
        self.used: list[Any] = []

    def change_adapter(self, adapter: Any, version: int) -> None:
        self.adapter, self.version = adapter, version

    def uses(self, adapter: Any) -> bool:
        return any(used is adapter for used in self.used)


class AdapterBench:
    def __init__(self, folder: Path, lora: bool = True) -> None:
        self.folder, self.copies = folder / "store", folder / "copies"
        self.writer = WeightStoreWriter(self.folder, keep_versions=2)
        self.engine, self.requests = FakeLLM(lora=lora), Requests()
        self.versions = AdapterVersions(self.engine, self.requests)  # type: ignore[arg-type]

    def publish(self, version: int) -> Any:
        files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"v%d" % version}
        return self.writer.publish(adapter_tensors(files).items(), version)

    async def stage(self, version: int) -> Any:
        manifest = self.publish(version)
        report = await self.versions.stage(version)
        assert (report.digest, report.nbytes) == (manifest.digest, 4)
        return report

    async def update(self, version: int) -> None:
        await self.stage(version)
        assert self.versions.swap(version).error is None

    async def until(self, *there: str) -> None:
        """Wait until these are loaded, and copies of these alone are on the disk."""
        async with asyncio.timeout(60.0):
            loaded = self.engine.adapters
            while sorted(loaded.values()) != list(there) or len(list(self.copies.iterdir())) != len(there):
                await asyncio.sleep(0.001)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdapterBench:
    monkeypatch.setattr(weights_module, "LEAVE_SECONDS", 0.001)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    bench = AdapterBench(tmp_path)
    bench.versions.init({"folder": str(bench.folder)}, False)
    return bench


@in_loop
async def test_an_old_version_goes_when_no_request_uses_it_and_its_files_outlive_the_store(bench: AdapterBench) -> None:
    """That each has a name of its own in vLLM's cache is in ``test/weight_update/test_weight_adapters.py``."""
    report = await bench.stage(1)
    assert bench.requests.adapter is None  # loaded, and used by nobody
    assert report.fetched + report.loaded == pytest.approx(report.seconds)
    assert bench.versions.swap(1).paused_seconds == 0.0
    first = bench.requests.adapter
    assert (first.lora_int_id, bench.requests.version) == (FIRST_NUMBER, 1)
    bench.requests.used.append(first)
    for version in (2, 3, 4):
        await bench.update(version)
    await bench.until("v1", "v4")
    assert not (bench.folder / "adapter-v1").exists()
    assert (Path(first.lora_path) / "adapter_model.safetensors").read_text() == "v1"  # vLLM may read it again
    bench.requests.used.clear()
    await bench.until("v4")
    # one that is staged and never used is dropped by the next
    await bench.stage(5)
    await bench.stage(6)
    await bench.until("v4", "v6")
    late = bench.versions.swap(5)
    assert (late.started, late.error) == (False, "adapter version 5 is not the one staged last")
    assert bench.versions.swap(6).error is None
    assert not bench.versions.swap(6).started  # nothing is staged now
    await bench.until("v6")


@in_loop
async def test_what_cannot_be_loaded_whole_is_refused_and_leaves_nothing(bench: AdapterBench) -> None:
    await bench.update(1)
    error = Exception("LoRA rank 16 is greater than max_lora_rank 8.")
    six = [[f"layers.{n}.mlp.experts" for n in range(6)]]
    two_stages = [["a", "b"], ["b", "c"]]
    for version, fail, unused, words in (
        (2, {"load_adapter": error}, [[]], "cannot load adapter version 2: LoRA rank 16 is greater"),
        (3, {}, six, r"6 modules that the engine does not adapt \(layers\.0\.mlp\.experts, .*, \.\.\.\)"),
        (4, {}, two_stages, r"1 modules that the engine does not adapt \(b\)"),
    ):
        bench.engine.fail, bench.engine.unused = fail, unused
        with pytest.raises(ManifestMismatch, match=words):
            await bench.stage(version)
    bench.engine.unused = [["a"], ["b"]]
    await bench.update(5)
    await bench.until("v5")


def test_an_engine_without_lora_says_what_to_pass(tmp_path: Path) -> None:
    bench = AdapterBench(tmp_path, lora=False)
    with pytest.raises(ValueError, match="started without: pass enable_lora=True and max_lora_rank="):
        bench.versions.init({"folder": str(bench.folder)}, False)
    with pytest.raises(WeightSyncError, match="not initialised"):
        asyncio.run(bench.versions.stage(1))


@in_loop
async def test_a_trainer_of_adapters_and_one_of_whole_weights_take_turns(bench: AdapterBench, tmp_path: Path) -> None:
    whole = WeightStoreWriter(tmp_path / "whole").publish([("w", torch.ones(4))], 5)
    updates = Updates(make(bench.engine), bench.requests, bench.versions)  # type: ignore[arg-type]

    async def stage_and_swap(version: int, digest: str) -> str | None:
        assert (await updates.stage(version, "digest", 1, None)).digest == digest
        return (await updates.swap(version, "keep", False, None, 60.0)).error

    await updates.open("adapter", {"folder": str(bench.folder)})
    assert await stage_and_swap(1, bench.publish(1).digest) is None
    adapter = bench.requests.adapter
    await updates.open("memmap", {"folder": str(tmp_path / "whole")})
    bench.engine.fail["start"] = RuntimeError("x")
    assert await stage_and_swap(5, whole.digest) == "RuntimeError: x"
    assert bench.requests.adapter is adapter is not None  # the old weights serve on, and it with them
    bench.engine.fail.clear()
    for _ in range(2):
        assert await stage_and_swap(5, whole.digest) is None
        assert bench.requests.adapter is None
    await bench.until()
    with pytest.raises(ValueError, match="start the engine from the model that the adapter is for"):
        await updates.open("adapter", {"folder": str(bench.folder)})


# -- over a fake engine -----------------------------------------------------------------------------------------------
GOOD = [("pause", "keep", False), "start", ("update", {"version": 7}), ("finish", "7"), "probe", "resume"]


def make(engine: FakeLLM | None = None) -> EngineWeights:
    return EngineWeights(engine or FakeLLM(), lambda: {"w": (torch.float32, torch.Size([4]))})


def swap(weights: EngineWeights, version: int = 7, mode: Any = "keep", patience: float = 60.0) -> SwapReport:
    return asyncio.run(weights.swap(version, mode, False, None, patience))


def test_a_swap_is_one_transaction_that_ends_with_a_probe_and_it_is_the_first_to_be_answered() -> None:
    engine = FakeLLM()
    weights = make(engine)
    salts = [asyncio.run(weights.salt())]
    report = swap(weights)
    assert (engine.log, report.error, weights.version) == (GOOD, None, 7)
    assert 0 < report.pausing_seconds < report.paused_seconds
    # every swap has a salt of its own, even of the same version: another trainer may begin to count at 1 again
    for version in (1, 2, 1, 1):
        salts.append(asyncio.run(weights.salt()))
        assert swap(weights, version).error is None
    assert salts[0] == {}
    assert len({salt["cache_salt"] for salt in salts[1:]}) == 4
    # where all requests were aborted the canary is asked afterwards: later releases refuse requests in such a pause
    engine.log.clear()
    assert swap(weights, 7, "abort").error is None
    assert engine.log == [("pause", "abort", False), *GOOD[1:4], "resume", "probe"]


def test_a_canary_that_gets_no_turn_before_the_driver_gives_up_proves_nothing() -> None:
    engine = FakeLLM()
    engine.hangs = True
    weights = make(engine)
    report = swap(weights, patience=0.05)
    assert (report.started, report.error, weights.version) == (True, None, 7)
    assert report.unproved.startswith("the check of the new weights had no turn within ")
    assert engine.log == [*GOOD, ("abort", ["weight-probe-1"])]


@pytest.mark.parametrize("when", ["before the swap", "after it failed"])
def test_an_engine_that_the_user_paused_stays_paused_also_by_a_second_attempt(when: str) -> None:
    engine = FakeLLM()
    weights = make(engine)
    if when == "before the swap":
        asyncio.run(weights.pause("keep", False))
    engine.fail["update"], engine.whole = RuntimeError("boom"), [False]
    assert swap(weights).error == "RuntimeError: boom"
    if when == "after it failed":
        asyncio.run(weights.pause("keep", False))
    engine.fail.clear()
    assert swap(weights).error is None
    assert "resume" not in engine.log


@pytest.mark.parametrize("step", ["start", "update", "finish", "probe"])
@in_loop
async def test_the_user_pauses_and_resumes_no_engine_in_the_middle_of_a_swap(step: str) -> None:
    engine = FakeLLM()
    weights = make(engine)
    asked: list[asyncio.Task[None]] = []
    plain = engine._step

    async def disturbed(name: str, *details: Any) -> None:
        if name == step:
            asked.extend(map(asyncio.ensure_future, (weights.resume(), weights.pause("abort", True))))
            await asyncio.sleep(0.01)
        await plain(name, *details)

    engine._step = disturbed  # type: ignore[method-assign]
    assert (await weights.swap(7, "keep", False)).error is None
    await asyncio.gather(*asked)
    assert engine.log == [*GOOD, "resume", ("pause", "abort", True)]


@pytest.mark.parametrize("whole", [[True, True], [True, False], RuntimeError("the engine is dead")])
@pytest.mark.parametrize(("step", "done"), [("pause", 1), ("start", 2), ("update", 3), ("finish", 4)])
def test_an_update_that_fails_pauses_the_engine_unless_old_weights_are_whole(step: str, done: int, whole: Any) -> None:
    engine = FakeLLM()
    engine.fail[step], engine.whole = RuntimeError("boom"), whole
    weights = make(engine)
    report = swap(weights)
    serves_on = step == "pause" or whole == [True, True]  # before the pause nobody has touched them
    assert (report.started, report.error) == (not serves_on, "RuntimeError: boom")
    assert engine.log == [*GOOD[:done], *(["resume"] if serves_on else [])]
    assert weights.version == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_probe_that_is_not_a_number_pauses_the_engine_again(bad: float) -> None:
    engine = FakeLLM(logprob=bad)
    weights = make(engine)
    report = swap(weights)
    assert report.error == "WeightSyncError: the new weights give a log-prob that is not a number"
    assert report.started
    assert engine.log == [*GOOD, ("pause", "keep", False), ("abort", [])]
    assert (weights.proved_version, weights.accepting.is_set()) == (0, False)
    with pytest.raises(WeightSyncError, match="it must be updated, or restarted, first"):
        asyncio.run(weights.resume())
    engine.logprob = -1.0
    engine.log.clear()
    assert swap(weights).error is None
    assert engine.log == GOOD
    assert (weights.version, weights.proved_version, weights.accepting.is_set()) == (7, 7, True)


# -- staging ----------------------------------------------------------------------------------------------------------
async def staged(weights: EngineWeights, version: int, verify: str = "digest", manifest: str | None = None) -> Any:
    return await weights.stage(version, verify, 1, manifest)


@pytest.fixture
def store(tmp_path: Path) -> WeightStoreWriter:
    return WeightStoreWriter(tmp_path)


def publish(store: WeightStoreWriter, version: int, name: str = "w") -> Manifest:
    return store.publish([(name, torch.ones(4))], version)


def opened(engine: FakeLLM, store: WeightStoreWriter) -> EngineWeights:
    weights = make(engine)
    asyncio.run(weights.init("memmap", {"folder": str(store.folder)}))
    engine.log.clear()
    return weights


@pytest.mark.parametrize(("version", "sent"), [(301, True), (302, False)])  # which no other test reads
def test_a_manifest_is_read_once_for_all_engines_of_a_process_and_never_in_their_loop(
    store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch, version: int, sent: bool
) -> None:
    published = publish(store, version)
    text, made = published.to_json(), note_made(monkeypatch)
    engines = [FakeLLM() for _ in range(4)]
    for engine in engines:
        engine.begins = [[False], [False]]  # asked again
        engine.reports = [[report(running=True)]] * 5 + [[report()]]
    every = [opened(engine, store) for engine in engines]

    async def main() -> list[Any]:
        calls = (staged(weights, version, manifest=text if sent else None) for weights in every * 2)
        return await asyncio.gather(*calls, return_exceptions=True)

    assert any(not isinstance(each, Exception) and each.digest == published.digest for each in asyncio.run(main()))
    assert len(made[version]) == 1
    assert made[version][0] is not threading.main_thread()


def test_staging_needs_the_transport_and_then_checks_everything(store: WeightStoreWriter) -> None:
    engine = FakeLLM()
    weights = make(engine)
    with pytest.raises(WeightSyncError, match=r"not initialised: call init_all_workers_group\(\) first"):
        asyncio.run(staged(weights, 1))
    options = {"folder": str(store.folder)}
    asyncio.run(weights.init("memmap", options))
    assert engine.log == [("init", {"transport": "memmap", "options": options})]
    manifest = publish(store, 1)
    found = asyncio.run(staged(weights, 1))
    assert (found.nbytes, found.digest, found.loaded) == (16, manifest.digest, 0.0)
    assert 0 < found.fetched < found.seconds
    engine.log.clear()
    with pytest.raises(ManifestMismatch, match="version 2 is not in the store"):
        asyncio.run(staged(weights, 2))
    publish(store, 2, "v")
    with pytest.raises(ManifestMismatch, match=r"1 missing \(w\); 1 unknown to the engine \(v\)"):
        asyncio.run(staged(weights, 2))
    assert engine.log == []  # no worker was asked
    file = store.folder / "v1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DigestMismatch, match="bytes of w"):
        asyncio.run(staged(weights, 1))
    for verify in ("canary", "off"):
        assert asyncio.run(staged(weights, 1, verify)).digest == manifest.digest
    # a transport that cannot look versions up is given the manifest
    asyncio.run(weights.init("gloo", {"port": 1}))
    with pytest.raises(WeightSyncError, match="cannot look version 1 up: give its manifest"):
        asyncio.run(staged(weights, 1))
    assert asyncio.run(staged(weights, 1, manifest=manifest.to_json())).digest == manifest.digest
    assert engine.log[-1] == ("stage", manifest.to_json(), True, 1)


def test_workers_are_looked_after_until_all_have_ended(store: WeightStoreWriter) -> None:
    engine, running = FakeLLM(), {"running": True}
    weights = opened(engine, store)
    publish(store, 1)
    engine.begins = [[True, False], [True, True]]  # one is still at the version before
    engine.reports = [[running, report()], [running, running], [report(), report(fetched=1.0)]]
    found = asyncio.run(staged(weights, 1))
    assert [entry[0] for entry in engine.log] == ["stage", "stage"]
    assert len(engine.reports) == 1
    assert found.fetched >= 1.0
    engine.reports = [[report(), report(error="MemoryError: no room")]]
    with pytest.raises(WeightSyncError, match="version 1 could not be staged: MemoryError: no room"):
        asyncio.run(staged(weights, 1))


def test_a_staging_that_the_driver_gave_up_ends_with_the_next(store: WeightStoreWriter) -> None:
    engine = FakeLLM()
    weights = opened(engine, store)
    publish(store, 1)

    async def run() -> tuple[StageReport, BaseException]:
        engine.reports = [[{"running": True}]]
        stalled = asyncio.create_task(staged(weights, 1))
        while "stage" not in [entry[0] for entry in engine.log]:
            await asyncio.sleep(0.001)
        engine.begins = [[False], [True]]
        following = asyncio.create_task(staged(weights, 1))
        (error,) = await asyncio.wait_for(asyncio.gather(stalled, return_exceptions=True), 60.0)
        engine.reports = [[report()]]
        return await following, error

    found, error = asyncio.run(run())
    assert (found.nbytes, str(error)) == (16, "another version was staged meanwhile")


# -- what leaves ------------------------------------------------------------------------------------------------------
def completion(name: str, version: int, length: int) -> Completion:
    output = CompletionOutput(
        index=0,
        token_ids=np.zeros(length, np.int64),
        text="",
        finish_reason="stop",
        policy_versions=np.full(length, version, np.int32),
    )
    return replace(nothing_yet(ids_request(name)), outputs=[output])


def versions_of(done: Completion | None) -> list[int] | None:
    return None if done is None else done.outputs[0].policy_versions.tolist()


@pytest.mark.parametrize("good", [True, False])
@in_loop
async def test_nothing_that_new_weights_made_leaves_before_the_canary(good: bool) -> None:
    engine = FakeLLM(logprob=-1.0 if good else math.nan)
    engine.counts = {"frozen": ("frozen", 0, 2)}
    weights = make(engine)
    asked, answer = asyncio.Event(), asyncio.Event()
    add_request = engine.add_request

    async def add(request_id: str, prompt: Any, params: Any) -> Any:
        sent = await add_request(request_id, prompt, params)

        async def get() -> Any:
            asked.set()
            await answer.wait()
            return await sent.get()

        return SimpleNamespace(get=get)

    engine.add_request = add  # type: ignore[method-assign]
    assert await weights.deliver(completion("before", 0, 3)) is not None
    swapping = asyncio.create_task(weights.swap(7, "keep", False))
    await asked.wait()
    leaving = asyncio.create_task(weights.deliver(completion("early", weights.version, 3)))
    arriving = asyncio.create_task(weights.salt())
    await asyncio.sleep(0.02)
    assert not leaving.done()
    assert not arriving.done()
    answer.set()
    assert ((await swapping).error is None) == good
    await arriving
    if not good:  # neither old weights nor good new ones: until the next swap succeeds
        await asyncio.sleep(0.02)
        assert not leaving.done()
        engine.logprob = -1.0
        assert (await weights.swap(8, "keep", False)).error is None
    left = await asyncio.wait_for(leaving, 60.0)
    assert (left is None) == (not good)  # else it starts again
    late = await weights.deliver(completion("frozen", weights.version, 4))
    assert versions_of(late) == ([0, 0, 7, 7] if good else None)
    again = await weights.deliver(completion("frozen", weights.version, 2))
    assert versions_of(again) == [weights.version] * 2


def test_tokens_of_the_last_step_are_waited_for() -> None:
    engine = FakeLLM()
    engine.counts = {"a": ("a", 0, 2)}
    engine.arriving = [("a", 3), ("a", 4)]
    weights = make(engine)
    swap(weights, 1)
    assert versions_of(weights.stamp(completion("a", 1, 5))) == [0, 0, 0, 0, 1]


# -- over real engines ------------------------------------------------------------------------------------------------
PROMPTS = [[72, 101, 108], list(range(40, 90)), [7], [200, 3, 3, 199] * 6]


@pytest.fixture
def versions(request: pytest.FixtureRequest, engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path) -> Iterator[Any]:
    """Versions of the marked engine's weights; its own come back afterwards."""
    family = request.node.get_closest_marker("engine").args[0]
    made = Versions(engine, shelf, family, tmp_path / "store", "memmap")
    yield made
    made.close()


def asked(versions: Versions, prompts: Any = PROMPTS, tokens: int = 12) -> list[Future[Completion]]:
    requests = [request_of(f"r{i}", ids, max_tokens=tokens) for i, ids in enumerate(prompts)]
    return versions.replicas[0].submit(requests)


def check_answers(versions: Versions, futures: list[Future[Completion]], tokens: int = 12) -> None:
    """They are whole, exact, and of the newest version."""
    for future in futures:
        done = future.result(SECONDS)
        (output,) = done.outputs
        assert output.policy_versions.tolist() == [versions.now] * tokens
        versions.check(done, output)


@pytest.mark.engine("deepseek_v3")
def test_after_each_update_the_engine_computes_what_the_trainer_does(versions: Versions) -> None:
    """Also where the correction biases alone change, so that other experts win; qwen3_moe is in test/weight_update."""
    check_answers(versions, asked(versions))
    before = versions.now
    for is_bias in (False, True):
        if is_bias:
            for name, bias in versions.reference.model.state_dict().items():
                if "correction_bias" in name:
                    bias.copy_(bias.flip(0) * 5)
        else:
            versions.change(0)
        manifest = versions.publish(before + 1)
        versions.keep(manifest.version)
        versions.stage(manifest)
        versions.swap(manifest)
        assert versions.changed(before, manifest.version) > 100 * TOLERANCE  # the change is one that shows
        check_answers(versions, asked(versions))
        before = manifest.version


@pytest.mark.engine("qwen3_moe")
def test_generation_continues_while_a_version_is_staged(versions: Versions) -> None:
    manifest = versions.publish(versions.now + 1)
    path, aside = version_path(versions.store.folder, manifest.version), versions.store.folder / "aside"
    path.rename(aside)
    os.mkfifo(path)  # as a file system that does not answer: staging waits
    staging = in_thread(lambda: versions.stage(manifest))
    check_answers(versions, asked(versions))
    assert not staging.done()
    path.open("wb").close()
    assert staging.exception(SECONDS) is not None
    aside.rename(path)
    versions.stage(manifest)


@pytest.mark.soak
@pytest.mark.engine("qwen3_moe")
def test_two_hundred_updates_under_load_leave_memory_files_and_shared_memory_as_they_were(versions: Versions) -> None:
    leader = psutil.Process(versions.replicas[0]._child.process.pid)  # type: ignore[attr-defined]
    processes = [psutil.Process(), leader, *leader.children(recursive=True)]
    updated = threading.Event()

    def held() -> list[int]:
        """Bytes of driver and of engine, open files of all, bytes of the weight store."""
        driver, *engine = (process.memory_info().rss for process in processes)
        files = sum(process.num_fds() for process in processes)
        store = sum(path.stat().st_size for path in versions.store.folder.iterdir())
        return [driver, sum(engine), files, store]

    def load() -> int:
        rounds = 0
        while not updated.is_set():
            for future in asked(versions, tokens=24):
                future.result(SECONDS)
            rounds += 1
        return rounds

    sizes, loading = [], in_thread(load)
    try:
        for seed in range(200):
            versions.update(seed)
            versions.weights = {version: versions.weights[version] for version in (versions.held, versions.now)}
            sizes.append(held())
    finally:
        updated.set()
    assert loading.result(SECONDS) > 20
    first, last = np.median(sizes[50:70], axis=0), np.median(sizes[-20:], axis=0)
    driver, engine, files, store = (last - first).tolist()
    assert driver < 20 * (1 << 20)
    assert engine < 40 * (1 << 20)
    assert abs(files) <= 2  # of requests that come and go
    assert abs(store) < 4096  # a manifest's numbers have more digits


@pytest.mark.engine
def test_weights_that_are_no_numbers_end_a_replica_and_what_it_was_asked(no_engine: EngineShelf) -> None:
    """They are loaded before the check finds them: the old ones are gone."""
    tensors = checkpoint_tensors(make_tiny_moe("qwen3_moe"))
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38)  # which overflows
    with start_engine(no_engine.folder("qwen3_moe"), faults=FaultPolicy(restart=False)) as engine:
        sender = VLLMWeightSyncScheme().create_sender()
        sender.init_all_workers_group(None, vllm_engine=engine)
        params = {"max_tokens": 450, "ignore_eos": True}
        frozen = in_thread(lambda: engine.generate([[1, 2, 3]] * 16, params, use_tqdm=False))
        until(lambda: engine.replica_table[0].inflight, 30.0, look_every=0.001)
        with pytest.raises(WeightSyncError, match="log-prob that is not a number") as caught:
            sender.update_weights(tensors)
        assert caught.value.report.replicas[0].attempts == 2
        assert isinstance(frozen.exception(SECONDS), EngineError)  # nobody is left to answer
        assert engine.replica_table[0].state.name in ("QUARANTINED", "DEAD")
        sender.shutdown()


@pytest.mark.engine("qwen3_moe")
def test_a_canary_that_fails_holds_every_request_until_good_weights_come(versions: Versions) -> None:
    """Requests in flight ran on the failed weights for a moment: none of their tokens may be of those."""
    replica = versions.replicas[0]
    canary = {"token_ids": [5, 6, 7], "tolerance": 1e-4}
    canary["log_probs"] = versions.reference(torch.tensor([5, 6, 7]))[0][1:].tolist()
    manifest = versions.prepare(41)
    futures = asked(versions, [list(range(start, 60)) for start in range(44, 50)], 200)
    until(lambda: replica.call(Engine.stats, SECONDS).running)
    what = (manifest.version, manifest.digest, "keep", False, canary)
    report = replica.call(Engine.swap_weights, SECONDS, *what)
    assert report.started
    assert "the new weights' log-probs differ from the trainer's by up to" in str(report.error)
    versions.update(42)
    check_answers(versions, futures, 200)
    check_answers(versions, asked(versions))
