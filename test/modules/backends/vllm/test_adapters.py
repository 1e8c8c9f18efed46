"""LoRA adapters: what users pass, when they are loaded, and what a real engine does with them."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.adapters import save_adapted
from support.engines import ADAPTED
from support.llm import FakeLLM
from support.loops import in_loop
from support.reference import TOLERANCE
from support.routes import rows_at_random
from torchrl_moe._compat import vllm_client_errors
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.backends.vllm.adapters import Adapters, build_lora_request
from torchrl_moe.modules.replay.router_replay import RouterReplay

NUMBERS = itertools.count(100)
ADAPTER = {"lora_name": "tiny", "lora_int_id": 1, "lora_path": "/somewhere"}


def test_an_adapter_may_be_vllms_object_or_a_mapping() -> None:
    from vllm.lora.request import LoRARequest

    assert build_lora_request(None) is None
    given = LoRARequest(**ADAPTER)
    assert build_lora_request(given) is given
    assert build_lora_request(ADAPTER) == given


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("tiny", "must be .*LoRARequest or a mapping, got str"),
        ({"lora_name": "tiny", "lora_int_id": 1}, "names no lora_path"),
        ({**ADAPTER, "lora_path": ""}, "names no lora_path"),
        ({**ADAPTER, "rank": 8}, "rank"),
        ({**ADAPTER, "lora_int_id": 0}, "id must be > 0, got 0"),
    ],
)
def test_an_adapter_that_vllm_does_not_know_is_refused(spec: Any, words: str) -> None:
    with pytest.raises(vllm_client_errors(), match=words):
        build_lora_request(spec)


def loads(engine: FakeLLM) -> list[tuple[str, int, str]]:
    return [(step[1]["lora_name"], step[1]["lora_int_id"], step[1]["lora_path"]) for step in engine.log]


@in_loop
async def test_an_adapter_is_loaded_once_however_many_requests_name_it_under_a_number_and_name_of_its_own() -> None:
    engine = FakeLLM()
    adapters = Adapters(engine)
    assert await adapters.load(None) is None
    loaded = await asyncio.gather(*(adapters.load({**ADAPTER, "lora_int_id": 2**62}) for _ in range(5)))
    assert {(lora.lora_name, lora.lora_int_id) for lora in loaded} == {("tiny-1", 1)}
    assert (await adapters.load({**ADAPTER, "lora_path": "/elsewhere"})).lora_name == "tiny-2"
    assert loads(engine) == [("tiny-1", 1, "/somewhere"), ("tiny-2", 2, "/elsewhere")]


@in_loop
async def test_an_id_stands_for_one_adapter_until_it_is_replaced_on_purpose() -> None:
    engine = FakeLLM()
    other = {**ADAPTER, "lora_path": "/elsewhere"}
    adapters = Adapters(engine)
    await adapters.load(ADAPTER)
    with pytest.raises(ValueError, match="lora_int_id=1 is the adapter of '/somewhere', not of '/elsewhere'"):
        await adapters.load(other)
    engine.fail["load_adapter"] = Exception("bad")
    with pytest.raises(ValueError, match="cannot be loaded: bad"):
        await adapters.load({**other, "load_inplace": True})
    engine.fail.clear()
    assert (await adapters.load(ADAPTER)).lora_name == "tiny-1"
    await adapters.load({**other, "load_inplace": True})
    assert not (await adapters.load(other)).load_inplace
    assert [path for *_, path in loads(engine)] == ["/somewhere", "/elsewhere", "/elsewhere"]


@in_loop
async def test_an_adapter_serves_until_what_replaces_it_is_loaded() -> None:
    engine = FakeLLM()
    adapters = Adapters(engine)
    await adapters.load(ADAPTER)
    engine.fail["load_adapter"] = Exception("bad")
    bad = [{**ADAPTER, "lora_path": path, "load_inplace": True} for path in ("/a", "/b")]
    *errors, served = await asyncio.gather(*map(adapters.load, (*bad, ADAPTER)), return_exceptions=True)
    assert [type(error) for error in errors] == [ValueError] * 2
    assert (served.lora_name, (await adapters.load(ADAPTER)).lora_name) == ("tiny-1", "tiny-1")
    engine.fail.clear()
    # of two that are loaded at the same time, the one that was asked for later stays
    await asyncio.gather(*map(adapters.load, bad))
    assert (await adapters.load({**ADAPTER, "lora_path": "/b"})).lora_path == "/b"


@in_loop
async def test_an_adapter_that_cannot_be_loaded_refuses_all_that_wait_and_may_be_tried_again() -> None:
    engine = FakeLLM()
    engine.fail["load_adapter"] = Exception("Worker failed")  # of no narrower type, as vLLM's
    bad = {**ADAPTER, "lora_path": "/broken"}
    adapters = Adapters(engine)
    waiting = [asyncio.create_task(adapters.load(bad)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # its request is aborted; those of the others are not
    _, *errors = await asyncio.gather(*waiting, return_exceptions=True)
    words = "adapter 'tiny' of '/broken' cannot be loaded: Worker failed"
    assert [(type(error), str(error)) for error in errors] == [(ValueError, words)] * 2
    engine.fail.clear()
    assert (await adapters.load(bad)).lora_path == "/broken"
    assert len(loads(engine)) == 2


# -- what a real engine does with them --------------------------------------------------------------------------------
GREEDY = {"max_tokens": 6, "logprobs": 0, "temperature": 0.0, "ignore_eos": True}
IDS = [72, 105, 44, 32, 119, 111, 114, 108, 100]
ON_ENGINE = pytest.mark.engine("qwen3_moe", **ADAPTED)  # a sequence at a time
Tuned = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """The model of the engine with an adapter on its attention, and the fields of a request for the adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    return save_adapted("qwen3_moe", folder), {**ADAPTER, "lora_path": str(folder)}


def ask(engine: AsyncVLLM, adapter: Any = None, ids: Any = IDS, rows: Any = None, max_tokens: int = 6) -> Any:
    params = {**GREEDY, "max_tokens": max_tokens}
    more = {} if rows is None else {"routed_experts": [rows]}
    return engine.generate([ids], params, use_tqdm=False, lora_request=adapter, **more)[0]


def check(model: Any, completion: Completion, rows: Any = None) -> None:
    """Log-probs and routes are those of a forward pass over the answer, which follows the rows where there are any."""
    (output,) = completion.outputs
    full = torch.tensor([[*IDS, *output.token_ids.tolist()]])
    routes = torch.full((1, full.shape[1], 4, 4), -1)
    if rows is not None:
        routes[0, : len(IDS)] = torch.from_numpy(rows)
    replay = RouterReplay(model)
    with torch.no_grad(), replay.record() if rows is None else replay.replay(routes) as recording:
        log_probs = model(full).logits.log_softmax(-1)[0, len(IDS) - 1 : -1]
    replay.remove()
    expected = log_probs.gather(-1, full[0, len(IDS) :, None])[:, 0].numpy()
    np.testing.assert_allclose(output.logprobs, expected, rtol=0, atol=TOLERANCE)
    assert output.routed_experts is not None
    if rows is None:
        used = recording.routed_experts[0, :-1, 1:].sort(-1).values  # layer 0 is dense
        assert np.array_equal(np.sort(output.routed_experts[:, 1:], -1), used.numpy())
    else:
        known = rows[:, 1, 0] >= 0
        assert np.array_equal(output.routed_experts[: len(IDS)][known][:, 1:], rows[known][:, 1:])


@pytest.mark.engine("qwen3_moe", **{**ADAPTED, "max_num_seqs": 4})
@pytest.mark.usefixtures("one_thread")
def test_requests_with_an_adapter_and_without_one_share_a_batch(engine: AsyncVLLM, tuned: Tuned) -> None:
    model, fields = tuned

    async def at_once() -> list[Completion]:
        long = {**GREEDY, "max_tokens": 24}
        return await asyncio.gather(*(engine.agenerate(IDS, long, lora_request=one) for one in (None, fields, None)))

    ask(engine, fields)  # it is loaded: none waits for that
    first, adapted, last = asyncio.run(at_once())
    check(model, adapted)
    with model.disable_adapter():
        check(model, first)
        check(model, last)
    assert adapted.outputs[0].token_ids.tolist() != first.outputs[0].token_ids.tolist()


@ON_ENGINE
@pytest.mark.usefixtures("one_thread")
def test_the_adapted_model_follows_recorded_experts_as_does_the_other(engine: AsyncVLLM, tuned: Tuned) -> None:
    model, fields = tuned
    assert engine.routing_layout is not None
    rows = rows_at_random(engine.routing_layout, len(IDS))
    rows[2] = -1
    adapted, plain = ask(engine, fields, rows=rows), ask(engine, rows=rows)  # with a shared cache
    check(model, adapted, rows)
    with model.disable_adapter():
        check(model, plain, rows)
    assert adapted.outputs[0].token_ids.tolist() != plain.outputs[0].token_ids.tolist()


def edited(fields: dict[str, Any], to: Path, edit: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """Return the fields of a copy of an adapter whose tensors are edited, all under one name."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(fields["lora_path"], to)
    tensors = load_file(to / "adapter_model.safetensors")
    done = {key: edit(key, tensor).contiguous() for key, tensor in tensors.items()}
    save_file({key: tensor for key, tensor in done.items() if len(tensor)}, to / "adapter_model.safetensors")
    return {"lora_name": "same", "lora_int_id": next(NUMBERS), "lora_path": str(to)}


@ON_ENGINE
@pytest.mark.usefixtures("one_thread")
def test_an_adapter_that_is_not_finite_is_refused_and_what_overflows_leaves_nothing_behind(
    engine: AsyncVLLM, tuned: Tuned, tmp_path: Path
) -> None:
    model, fields = tuned
    for value in (float("nan"), float("inf")):
        filled = edited(fields, tmp_path / str(value), lambda _, tensor, value=value: torch.full_like(tensor, value))
        with pytest.raises(ValueError, match=r"adapter 'same' of .* cannot be loaded: .*NaN or infinite in torch"):
            ask(engine, filled)
    huge = edited(fields, tmp_path / "huge", lambda _, tensor: torch.full_like(tensor, 1e38))
    assert not np.isfinite(ask(engine, huge).outputs[0].logprobs).all()
    with model.disable_adapter():
        for _ in range(3):
            check(model, ask(engine))
    check(model, ask(engine, fields))


@ON_ENGINE
@pytest.mark.usefixtures("one_thread")
def test_adapters_of_a_name_share_no_cache_and_need_no_folder(engine: AsyncVLLM, tuned: Tuned, tmp_path: Path) -> None:
    model, fields = tuned
    long = IDS * 30  # more than a block of the cache
    first = edited(fields, tmp_path / "first", lambda _, tensor: tensor)
    other = edited(fields, tmp_path / "other", lambda key, tensor: -tensor if "lora_B" in key else tensor)
    with torch.no_grad():
        expected = model(torch.tensor([long])).logits.log_softmax(-1)[0, :-1]
    expected = expected.gather(-1, torch.tensor(long)[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(engine.score(long, lora_request=first)[1:], expected, atol=1e-4)
    one, two = (ask(engine, adapter, long, max_tokens=1).outputs[0] for adapter in (first, other))
    assert abs(float(one.logprobs[0] - two.logprobs[0])) > 1e-3 or one.token_ids[0] != two.token_ids[0]
    alone = {**other, "lora_int_id": 2**62, "lora_name": "alone"}
    np.testing.assert_allclose(two.logprobs, ask(engine, alone, long, max_tokens=1).outputs[0].logprobs, atol=1e-4)
    shutil.rmtree(first["lora_path"])  # with room for one adapter, it has been evicted
    np.testing.assert_allclose(one.logprobs, ask(engine, first, long, max_tokens=1).outputs[0].logprobs, atol=1e-4)
    assert engine.stats()[0]["restarts"] == 0


@ON_ENGINE
def test_an_adapter_of_another_size_or_of_no_folder_is_refused(engine: AsyncVLLM, tuned: Tuned, tmp_path: Path) -> None:
    edits: dict[str, Callable[[str, Tensor], Tensor]] = {
        "inputs": lambda key, tensor: tensor[:, :5] if "lora_A" in key else tensor,
        "outputs": lambda key, tensor: tensor[:5] if "lora_B" in key else tensor,
        "its configuration says rank 8": lambda key, tensor: tensor[:2] if "lora_A" in key else tensor,
        "has no lora_A": lambda key, tensor: tensor[:0] if "q_proj.lora_A" in key else tensor,
    }
    bad = {words: edited(tuned[1], tmp_path / words, edit) for words, edit in edits.items()}
    bad["missing"] = {"lora_name": "none", "lora_int_id": next(NUMBERS), "lora_path": str(tmp_path / "missing")}
    for words, fields in bad.items():
        for _ in range(2):
            with pytest.raises(ValueError, match=f"cannot be loaded: .*{words}"):
                ask(engine, fields)
    assert ask(engine).outputs[0].finish_reason == "length"


@ON_ENGINE
def test_a_request_of_lower_priority_value_is_served_first(engine: AsyncVLLM) -> None:
    async def attempt() -> list[str]:
        finished: list[str] = []

        async def ask(name: str, priority: int, max_tokens: int) -> None:
            params = {"max_tokens": max_tokens, "ignore_eos": True}
            await engine.agenerate(IDS, params, priority=priority, request_id=name)
            finished.append(name)

        blocker = asyncio.create_task(ask("running", 0, 400))  # the only one that the engine runs at a time
        while not engine.stats()[0]["running"] and not blocker.done():
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(ask(f"priority {priority}", priority, 2)) for priority in (7, 3, 5)]
        while engine.stats()[0]["waiting"] < 3 and not blocker.done():
            await asyncio.sleep(0.01)
        in_time = not blocker.done()
        engine.abort("running")
        await asyncio.gather(blocker, *waiting)
        return finished if in_time else []

    for _ in range(8):  # on a busy machine the blocker may be done before the others have arrived
        if finished := asyncio.run(attempt()):
            assert finished == ["running", "priority 3", "priority 5", "priority 7"]
            return
    pytest.fail("the blocker was always done before the others had arrived")
