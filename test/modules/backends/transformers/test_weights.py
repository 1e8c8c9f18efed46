"""New weights: exchanged between two steps, proved before a token is made with them, or put back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.plain import TOLERANCE, Bench, loaded, serve
from torchrl_moe.errors import ManifestMismatch, WeightSyncError
from torchrl_moe.modules.backends.replica import Scoring
from torchrl_moe.modules.backends.transformers.engine_process import EngineWeights, exchange
from torchrl_moe.modules.backends.transformers.loading import Loaded
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing.tiny_moe import make_tiny_moe
from torchrl_moe.weight_update.store import WeightStoreWriter

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
    names, old = set(map(id, model.parameters())), state(model)
    before = exchange(model, source, {})
    assert same(state(model), state(wanted))
    assert same(before, old)
    assert set(map(id, model.parameters())) == names
    for tensor in source.values():  # nothing of the model lies in what was given
        if tensor.is_floating_point():
            tensor.fill_(7)
    assert same(state(model), state(wanted))


def test_weights_are_cast_to_what_the_model_computes_in() -> None:
    model = make_tiny_moe("qwen3_moe", dtype=torch.bfloat16)
    exchange(model, others(), {})
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}


def test_weights_of_another_model_change_nothing() -> None:
    model = make_tiny_moe("qwen3_moe")
    before, source = state(model), others()
    del source["model.norm.weight"]
    with pytest.raises(WeightSyncError, match=r"cannot take these weights: missing_keys model\.norm\.weight"):
        exchange(model, source, {})
    assert same(state(model), before)
    exchange(model, source, {"missing_keys": {"model.norm.weight"}})  # the checkpoint lacked it, too


# -- a version on its way ---------------------------------------------------------------------------------------------


class Updates:
    """A store, and an engine's weights behind it."""

    def __init__(self, bench: Bench, engine: Loaded, folder: Path) -> None:
        self.writer = WeightStoreWriter(folder)
        self.folder = folder
        self.weights = EngineWeights(engine.decoder.model, engine.info.model, bench.requests, engine.report)

    async def stage(self, version: int, tensors: Mapping[str, Tensor], **how: Any) -> Any:
        self.writer.publish(tensors.items(), version)
        options = {"verify": "digest", "threads": 1, "manifest": None, **how}
        return await self.weights.stage(version, **options)

    async def bring(self, version: int, tensors: Mapping[str, Tensor], pause: Any = "keep", **how: Any) -> Any:
        if self.weights._receiver is None:
            await self.weights.init("memmap", {"folder": str(self.folder)})
        await self.stage(version, tensors)
        clear, canary = how.get("clear_cache", False), how.get("canary")
        return await self.weights.swap(version, pause, clear, canary, 60.0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store"


def test_an_update_changes_the_answers_and_their_versions(engine: Loaded, folder: Path) -> None:
    async def script(bench: Bench) -> None:
        updates = Updates(bench, engine, folder)
        bench.start("before", IDS, params=LONG)
        await bench.until(lambda: bench.sent)
        report = await updates.bring(3, others())
        assert (report.started, report.error, report.unproved) == (True, None, "")
        assert 0 < report.loading_seconds <= report.paused_seconds
        bench.start("after", IDS, params=LONG)
        await bench.until(lambda: len(bench.sent) == 2)
        updates.weights.close()
        updates.weights.close()

    bench = serve(engine, script)
    before, after = bench.sent["before"].outputs[0], bench.sent["after"].outputs[0]
    assert set(before.policy_versions.tolist()) == {0}
    assert set(after.policy_versions.tolist()) == {3}
    assert before.token_ids.tolist() != after.token_ids.tolist()
    with torch.no_grad():
        ids = torch.tensor([[*IDS, *after.token_ids.tolist()]])
        logits = make_tiny_moe("qwen3_moe", seed=1)(ids).logits[0].log_softmax(-1)[len(IDS) - 1 : -1]
    expected = logits.gather(-1, torch.from_numpy(after.token_ids)[:, None])[:, 0].numpy()
    assert after.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("pause", "clear", "resume"), [("keep", False, "none"), ("keep", True, "forced"), ("abort", False, "forced")]
)
def test_an_answer_continues_with_new_weights(
    engine: Loaded, folder: Path, pause: str, clear: bool, resume: str
) -> None:
    async def script(bench: Bench) -> None:
        updates = Updates(bench, engine, folder)
        bench.start("a", IDS, params=LONG)
        await bench.tokens("a", 3)
        await updates.bring(1, others(), pause, clear_cache=clear)
        await bench.until(lambda: bench.sent)

    (output,) = serve(engine, script).sent["a"].outputs
    versions = output.policy_versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert (len(versions), output.finish_reason, output.resume) == (24, "length", resume)
    assert output.routed_experts is not None
    assert output.logprobs is not None
    assert (len(output.routed_experts), len(output.logprobs)) == (len(IDS) + 23, 24)
    if not clear and pause == "keep":
        return
    cut = versions.index(1)  # what was read again follows the first part's experts; then each token routes itself
    whole = np.concatenate([output.routed_experts, np.zeros((1, 4, 4))]).astype(np.int16)[None]
    whole[0, :, 0], whole[0, len(IDS) + cut - 1 :] = -1, -1
    model = make_tiny_moe("qwen3_moe", seed=1)
    with torch.no_grad(), RouterReplay(model).replay(torch.from_numpy(whole)):
        logits = model(torch.tensor([[*IDS, *output.token_ids.tolist()]])).logits[0].log_softmax(-1)
    expected = logits[len(IDS) - 1 : -1].gather(-1, torch.from_numpy(output.token_ids)[:, None])[:, 0].numpy()
    assert output.logprobs[cut:] == pytest.approx(expected[cut:], abs=TOLERANCE)


def test_wait_lets_answers_finish_with_the_old_weights(engine: Loaded, folder: Path) -> None:
    async def script(bench: Bench) -> None:
        updates = Updates(bench, engine, folder)
        bench.start("a", IDS, params=LONG)
        await bench.tokens("a", 1)
        bringing = asyncio.create_task(updates.bring(1, others(), "wait"))
        await bringing
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


def test_new_weights_must_answer_the_canary(engine: Loaded, folder: Path) -> None:
    proof: dict[str, Any] = {"token_ids": IDS, "tolerance": 1e-4}

    async def script(bench: Bench) -> None:
        updates = Updates(bench, engine, folder)
        before, scores = state(engine.decoder.model), engine.decoder.score(IDS, Scoring())
        bad = await updates.bring(1, others(), canary={**proof, "log_probs": scores[1:].tolist()})
        assert bad.started is False
        assert bad.error is not None
        assert "differ from the trainer's by up to" in bad.error
        assert same(state(engine.decoder.model), before)
        assert bench.requests.version == 0
        broken = others()
        broken["model.norm.weight"].fill_(3e38)  # which overflows
        unproved = await updates.bring(2, broken)
        assert "a log-prob that is not a number" in unproved.error
        assert same(state(engine.decoder.model), before)
        exchange(engine.decoder.model, others(), {})
        right = engine.decoder.score(IDS, Scoring())[1:].tolist()
        assert (await updates.bring(3, others(), canary={**proof, "log_probs": right})).error is None

    assert serve(engine, script).requests.version == 3


def test_what_does_not_fit_is_refused_before_anything_is_paused(engine: Loaded, folder: Path) -> None:
    async def script(bench: Bench) -> None:
        updates = Updates(bench, engine, folder)
        with pytest.raises(WeightSyncError, match=r"call init_all_workers_group\(\) first"):
            await updates.stage(1, others())
        await updates.weights.init("memmap", {"folder": str(folder)})
        with pytest.raises(ManifestMismatch):
            await updates.stage(2, {name: tensor for name, tensor in others().items() if "norm" not in name})
        report = await updates.stage(3, others())
        assert (report.nbytes > 0, report.loaded) == (True, 0.0)
        late = await updates.weights.swap(2, "keep", False, None, 60.0)
        assert (late.started, late.error) == (False, "WeightSyncError: version 2 is not what was staged last")

    serve(engine, script)


@pytest.mark.parametrize(("transport", "hint"), [("adapter", "use lora='merged'"), ("mpi", "transport='memmap'")])
def test_other_transports_are_refused_by_name(engine: Loaded, transport: str, hint: str) -> None:
    async def script(bench: Bench) -> None:
        weights = EngineWeights(engine.decoder.model, engine.info.model, bench.requests, engine.report)
        with pytest.raises(ValueError, match=f"takes no weights by '{transport}': .*{hint}"):
            await weights.init(transport, {"folder": "here"})

    serve(engine, script)
