"""Requests in one loop and new weights between its steps; a real service over plain transformers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engines import EngineShelf
from support.plain import TOLERANCE, Bench, check_output, loaded, serve
from support.processes import ids_request
from support.versions import SECONDS, Versions, ask, let_run, random_ids
from support.waiting import until
from torchrl_moe.errors import EngineError, ManifestMismatch, RequestRefusedError, WeightSyncError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.replica import Completion, Scoring
from torchrl_moe.modules.backends.transformers.answer import Answer
from torchrl_moe.modules.backends.transformers.decoder import Loaded
from torchrl_moe.modules.backends.transformers.transformers_process import EngineProcess, EngineWeights, exchange
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.store import WeightStoreWriter
from torchrl_moe.testing.tiny_moe import make_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme


# -- requests ---------------------------------------------------------------------------------------------------------
def test_each_request_is_answered_and_counted(plain: Loaded) -> None:
    async def script(bench: Bench) -> None:
        bench.start("a")
        bench.start("b", [70], params={"n": 3, "max_tokens": 2})
        bench.start("bad", params={"logit_bias": {1: 1.0}})
        bench.start("s", [70, 71, 72], scoring=Scoring(temperature=0.5))
        await bench.until(lambda: len(bench.sent) == 3)

    bench = serve(plain, script)
    assert list(bench.refused) == ["bad"]
    assert [len(output.token_ids) for output in bench.sent["b"].outputs] == [2, 2, 2]
    assert bench.sent["a"].outputs[0].finish_reason == "length"
    scores = bench.sent["s"].prompt_logprobs
    assert scores is not None
    assert scores[1:] == pytest.approx(plain.decoder.score([70, 71, 72], Scoring(temperature=0.5))[1:], abs=TOLERANCE)
    load, metrics = bench.requests.load, bench.sent["a"].metrics
    assert (load.requests, load.completions, load.prompt_tokens, load.generated_tokens) == (3, 4, 6, 8 + 6)
    assert (load.running, load.waiting, len(bench.requests._running), load.tokens) == (0, 0, 0, 14)
    assert 0 <= metrics.queue_seconds <= metrics.first_token_seconds <= metrics.total_seconds
    assert load.generation_seconds >= metrics.total_seconds


def test_a_late_abort_spares_the_next_request_of_that_id(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on, step = threading.Event(), threading.Event(), plain.decoder.step

    def slow_step(*arguments: Any) -> None:
        step(*arguments)
        inside.set()
        go_on.wait(60.0)

    monkeypatch.setattr(plain.decoder, "step", slow_step)

    async def script(bench: Bench) -> None:
        def take(completion: Completion) -> None:
            bench._take(completion)
            if len(bench.order) == 1:
                bench.start("a", params={"max_tokens": 2})

        bench.requests.deliver = take  # type: ignore[method-assign]
        bench.start("a", params={"max_tokens": 1})
        await bench.until(inside.is_set)
        bench.requests.abort(["a"])  # its only token is there already
        go_on.set()
        await bench.until(lambda: len(bench.order) == 2)
        assert not bench.sent["a"].aborted
        assert len(bench.sent["a"].outputs[0].token_ids) == 2

    serve(plain, script)


def test_requests_of_lower_priority_value_join_first_if_the_engine_goes_by_priority(plain: Loaded) -> None:
    arguments = replace(plain.arguments, max_num_seqs=1, scheduling_policy="priority")

    async def script(bench: Bench) -> None:
        for name, priority in (("first", 0), ("p7", 7), ("p3", 3), ("p5", 5), ("again", 3)):
            bench.start(name, priority=priority)
            await bench.tokens("first", 1)
        await bench.until(lambda: len(bench.sent) == 5)

    assert serve(replace(plain, arguments=arguments), script).order == ["first", "p3", "again", "p5", "p7"]


def test_whatever_comes_between_each_answer_is_the_models(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any lengths in a batch with too little room, some aborted, all paused now and then, and read again."""
    rng = random.Random(0)
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "kv_cache_memory_bytes": 150 * plain.decoder.token_bytes}
    limited, take_step = replace(plain, arguments=replace(plain.arguments, **limits)), plain.decoder.step

    def step(joining: list[Answer], version: int) -> None:
        batch = [*plain.decoder.answers, *joining]
        assert len(batch) <= 5
        assert len(batch) * max(answer.longest for answer in batch) <= 150  # of keys and values
        assert len(joining) <= 1 or len(joining) * max(len(answer.ids) for answer in joining) <= 40  # one may be longer
        take_step(joining, version)

    monkeypatch.setattr(plain.decoder, "step", step)
    prompts = {f"r{i}": [rng.randrange(256) for _ in range(rng.randint(1, 30))] for i in range(14)}

    async def script(bench: Bench) -> None:
        for name, ids in prompts.items():
            bench.start(name, ids, params={"n": rng.randint(1, 3), "max_tokens": rng.randint(1, 20)})
        for i in range(6):
            await asyncio.sleep(rng.random() * 0.02)
            if i % 2:
                bench.requests.abort([f"r{rng.randrange(14)}"])
            else:
                await bench.requests.pause(("keep", "wait", "abort")[i // 2], i % 4 == 0)
                bench.start(f"late{i}", [70], params={"max_tokens": 2})
                await asyncio.sleep(0.01)
                assert f"late{i}" not in bench.sent
                await bench.requests.resume()
        await bench.until(lambda: len(bench.sent) == 17)

    sent = serve(limited, script).sent
    for name, completion in sent.items():
        for output in completion.outputs:
            assert completion.aborted or output.finish_reason == "length"
            if len(output.token_ids):
                check_output(plain, prompts.get(name, [70]), output)


# -- new weights ------------------------------------------------------------------------------------------------------
IDS = list(range(70, 80))
LONG = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture
def engine(plain_folder: Path) -> Loaded:
    """An engine whose weights may be changed."""
    return loaded(plain_folder)


def others(seed: int = 1) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(make_tiny_moe(seed=seed)).items()}


def state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# -- the exchange -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "config"),
    [("qwen3_moe", {}), ("deepseek_v3", {}), ("mixtral", {"tie_word_embeddings": True}), ("qwen3", {})],
)
def test_a_model_gets_a_checkpoints_weights_and_stays_itself(family: str, config: dict[str, Any]) -> None:
    model, wanted = make_tiny_moe(family, **config), make_tiny_moe(family, seed=1, **config)
    source = {name: tensor.clone() for name, tensor in checkpoint_tensors(wanted).items()}
    parameters, old = set(map(id, model.parameters())), state(model)
    part = {name: tensor for name, tensor in source.items() if name != "model.norm.weight"}
    with pytest.raises(WeightSyncError, match=r"cannot take these weights: missing_keys model\.norm\.weight"):
        exchange(model, part, {})
    assert same(state(model), old)
    before = exchange(model, source, {})
    assert same(state(model), state(wanted))
    assert same(before, old)
    assert set(map(id, model.parameters())) == parameters
    for tensor in source.values():  # nothing of the model lies in what was given
        if tensor.is_floating_point():
            tensor.fill_(7)
    assert same(state(model), state(wanted))
    exchange(model, part, {"missing_keys": {"model.norm.weight"}})  # the checkpoint lacked it, too


# -- a version on its way ---------------------------------------------------------------------------------------------
class Updates:
    """A store, and an engine's weights behind it."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.writer = WeightStoreWriter(folder / "store")
        self.weights = EngineWeights(bench.requests)

    async def open(self, transport: str = "memmap") -> None:
        await self.weights.open(transport, {"folder": str(self.writer.folder)})

    async def stage(self, version: int, tensors: Mapping[str, Tensor]) -> Any:
        self.writer.publish(tensors.items(), version)
        return await self.weights.stage(version, "digest", 1, None)

    async def bring(self, version: int, tensors: Mapping[str, Tensor], pause: Any = "keep", canary: Any = None) -> Any:
        await self.stage(version, tensors)
        return await self.weights.swap(version, pause, False, canary, 60.0)


def test_wait_lets_answers_finish_with_the_old_weights(engine: Loaded, tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        updates = Updates(bench, tmp_path)
        await updates.open()
        bench.start("a", IDS, params=LONG)
        await bench.tokens("a", 1)
        await updates.bring(1, others(), "wait")
        bench.start("b", IDS, params=LONG)
        await bench.until(lambda: len(bench.sent) == 2)
        await bench.requests.pause("keep", False)
        bench.start("c", IDS)
        frozen = await updates.bring(2, others(2), "wait")
        assert (frozen.started, "resume() it first" in frozen.error) == (False, True)
        assert (await updates.bring(2, others(2))).error is None  # an engine that is paused may be updated

    bench = serve(engine, script)
    assert [set(bench.sent[name].outputs[0].policy_versions.tolist()) for name in "ab"] == [{0}, {1}]
    assert bench.requests.version == 2


def test_new_weights_must_answer_the_canary(engine: Loaded, tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        updates, model = Updates(bench, tmp_path), engine.decoder.model
        await updates.open()
        before, broken = state(model), others()
        broken["model.norm.weight"].fill_(3e38)  # which overflows

        def canary() -> dict[str, Any]:
            return {"token_ids": IDS, "tolerance": 1e-4, "log_probs": engine.decoder.score(IDS, Scoring())[1:].tolist()}

        for version, weights, proof, words in (
            (1, others(), canary(), "differ from the trainer's by up to"),
            (2, broken, None, "a log-prob that is not a number"),
        ):
            report = await updates.bring(version, weights, canary=proof)
            assert (report.started, words in report.error) == (False, True)
            assert same(state(model), before)
            assert bench.requests.version == 0
        exchange(model, others(), {})
        assert (await updates.bring(3, others(), canary=canary())).error is None

    assert serve(engine, script).requests.version == 3


def test_what_does_not_fit_is_refused_before_anything_is_paused(engine: Loaded, tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        updates = Updates(bench, tmp_path)
        for transport, hint in (("adapter", "use lora='merged'"), ("mpi", "transport='memmap'")):
            with pytest.raises(ValueError, match=f"takes no weights by '{transport}': .*{hint}"):
                await updates.open(transport)
        with pytest.raises(WeightSyncError, match=r"call init_all_workers_group\(\) first"):
            await updates.stage(1, others())
        await updates.open()
        with pytest.raises(ManifestMismatch):
            await updates.stage(2, {name: tensor for name, tensor in others().items() if "norm" not in name})
        report = await updates.stage(3, others())
        assert (report.nbytes > 0, report.loaded) == (True, 0.0)
        late = await updates.weights.swap(2, "keep", False, None, 60.0)
        assert (late.started, late.error) == (False, "WeightSyncError: version 2 is not what was staged last")

    serve(engine, script)


# -- a service --------------------------------------------------------------------------------------------------------
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(params=["memmap", pytest.param("gloo", marks=pytest.mark.parity)])
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


def test_a_trainer_sends_its_weights_and_a_killed_replica_gets_the_newest(second_engine: AsyncVLLM) -> None:
    def ask(**where: Any) -> Any:
        (completion,) = second_engine.generate([[70, 71, 72]], GREEDY, use_tqdm=False, **where)
        return completion.outputs[0]

    sender = VLLMWeightSyncScheme(mode="abort_resume", verify="canary").create_sender()
    try:
        for seed in (1, 0):  # the last are those that it had
            model = make_tiny_moe("qwen3_moe", seed=seed)
            sender.register_model(model)
            sender.init_all_workers_group(None, vllm_engine=second_engine)
            report = sender.update_weights()
            assert report.failed == {}
            output = ask()
            assert set(output.policy_versions.tolist()) == {report.version}
            with torch.no_grad():
                ids = torch.tensor([[70, 71, 72, *output.token_ids.tolist()]])
                assert model(ids).logits[0, 2:-1].argmax(-1).tolist() == output.token_ids.tolist()
        entry = second_engine.replica_table[1]
        restarts = entry.restarts
        os.kill(entry.replica._child.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        many = second_engine.generate([[70, 71]] * 8, GREEDY, use_tqdm=False)  # none is lost
        assert len(many) == 8
        until(lambda: entry.restarts > restarts and entry.state.name == "SERVING", SECONDS)
        assert set(ask(actor_index=1).policy_versions.tolist()) == {report.version}
    finally:
        sender.shutdown()


# -- what it refuses --------------------------------------------------------------------------------------------------
def test_what_it_does_not_serve_is_refused_by_name_and_it_continues(second_engine: AsyncVLLM) -> None:
    with pytest.raises(ValueError, match="sleep: engine='transformers' keeps its model"):
        second_engine.sleep()
    with pytest.raises(ValueError, match="torchrl_moe_save_params: engine='transformers' has no workers"):
        second_engine.save_model_params()
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


# -- one process from the inside --------------------------------------------------------------------------------------
class Inbox:
    """The driver's messages: it says nothing, and the process ends itself by one."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[link.Message] = asyncio.Queue()
        self.put = self.messages.put_nowait


def test_a_probe_says_whether_a_step_ends_in_time(plain: Loaded) -> None:
    async def main() -> None:
        process = EngineProcess(plain, Inbox(), lambda message: None)  # type: ignore[arg-type]
        idle = await process.probe(60.0)
        async with process.step_lock:
            late = await process.probe(0.01)
        again = await process.probe(60.0)
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
        serving = asyncio.create_task(process._serve())
        process.start(ids_request("a", [70]))
        await asyncio.wait_for(serving, 60.0)
        process.close()

    asyncio.run(main())
    assert [message for message in sent if message[0] != "stats"] == [
        ("died", "", "its engine failed: RuntimeError: out of memory")
    ]
