"""The fake engine: a replica by the protocol, whose answers are a pure function of seed, version and prefix.

Faults on purpose do what they say; that checks notice them is shown where a run is checked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from support.waiting import until
from torchrl_moe.data import RoutedExperts, RoutingLayout
from torchrl_moe.errors import DigestMismatch, EngineError, ManifestMismatch, NoReplicaError, ReplicaDiedError
from torchrl_moe.modules.backends.checkpoint import load_tokenizer
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion, ProbeReport, Replica, Request
from torchrl_moe.store import WeightStoreWriter
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import LAYOUT, FakeReplica, shift_routes, shuffle_advantages, wrong_ids
from torchrl_moe.testing.fake_weights import FakeWeightReplica

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

PROMPT = [10, 11, 12]


def request(ids: Any = PROMPT, request_id: str = "r", **params: Any) -> Request:
    params = {"max_tokens": 8, "logprobs": 0, **params}
    if isinstance(ids, str):
        return Request(request_id=request_id, sampling_params=params, prompt=ids)
    return Request(request_id=request_id, sampling_params=params, prompt_token_ids=np.array(ids, np.int32))


def ask(replica: FakeReplica, *names: str, **params: Any) -> list[Future[Completion]]:
    return replica.submit([request(request_id=name, **params) for name in names or "r"])


def answer(replica: FakeReplica, ids: Any = PROMPT, **params: Any) -> Any:
    """Tokens, log-probs and routes of the only answer, as lists."""
    (future,) = replica.submit([request(ids, **params)])
    (output,) = future.result(60.0).outputs
    return output.token_ids.tolist(), output.logprobs.tolist(), output.routed_experts.tolist()


def all_died(futures: Iterable[Future[Completion]], why: str) -> None:
    for future in futures:
        with pytest.raises(ReplicaDiedError, match=why):
            future.result(60.0)


# -- the protocol -----------------------------------------------------------------------------------------------------


def test_a_life_in_the_order_of_the_protocol() -> None:
    replica = FakeReplica(3, token_seconds=3600.0)
    assert isinstance(replica, Replica)
    replica.start()
    info = replica.wait_ready(1.0)
    assert (info.model, info.layout, info.tensor_parallel_size) == ("fake", LAYOUT, 1)
    assert replica.is_alive()
    first, second, again = ask(replica, *"abb")
    with pytest.raises(ValueError, match="request id 'b' is in flight already"):
        again.result(60.0)
    replica.abort(["a", "unknown"])
    (output,) = first.result(60.0).outputs
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 0)  # the abort adds no token of its own
    assert first.result().metrics.replica == 3
    assert not second.cancel()  # as a request in an engine cannot be
    replica.shutdown()
    replica.shutdown()
    assert not replica.is_alive()
    all_died([second], "replica 3 died: shut down")


# -- what it makes up -------------------------------------------------------------------------------------------------


def test_an_answer_is_a_function_of_seed_version_and_prefix() -> None:
    assert answer(FakeReplica(0, seed=5)) == answer(FakeReplica(1, seed=5))
    assert answer(FakeReplica(), "1+1=") == answer(FakeReplica(), [49, 43, 49, 61])  # text is bytes
    replica = FakeReplica()
    long, short = answer(replica), answer(replica, max_tokens=2)
    assert long == answer(replica)
    assert short == (long[0][:2], long[1][:2], long[2][:4])
    assert answer(replica, PROMPT + long[0][:3], max_tokens=5) == (long[0][3:], long[1][3:], long[2])  # continued
    newer = FakeReplica()
    newer.version = 1
    answers = [answer(FakeReplica()), answer(FakeReplica(seed=1)), answer(newer), answer(FakeReplica(), [10, 11, 13])]
    for kind in range(3):  # tokens, log-probs, routes
        assert len({repr(one[kind]) for one in answers}) == 4
    assert ask(newer)[0].result().outputs[0].policy_versions.tolist() == [1] * 8
    first, second = ask(FakeReplica(), n=2)[0].result().outputs
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert first.routed_experts[:3].tolist() == second.routed_experts[:3].tolist()


@pytest.mark.parametrize(
    "layout", [LAYOUT, RoutingLayout(num_layers=2, moe_layers=(0, 1), top_k=4, num_experts=1000)], ids=["few", "many"]
)
def test_tokens_are_printable_and_routes_valid_for_the_layout(layout: RoutingLayout) -> None:
    (output,) = ask(FakeReplica(layout=layout), max_tokens=200)[0].result().outputs
    assert all(32 <= token < 127 for token in output.token_ids)
    assert output.text == "".join(map(chr, output.token_ids)) == ByteTokenizer().decode(output.token_ids)
    routes = RoutedExperts.from_vllm(output.routed_experts, num_tokens=203, layout=layout).validate(layout)
    assert routes.coverage(layout) == pytest.approx(202 / 203)
    assert routes.full[:-1, 1:].unique().numel() >= min(layout.num_experts, 500)
    assert output.routed_experts.dtype == (np.uint8 if layout is LAYOUT else np.uint16)


# -- delays -----------------------------------------------------------------------------------------------------------


def test_tokens_take_their_time() -> None:
    replica = FakeReplica(token_seconds=0.02)
    started = time.monotonic()
    (future,) = ask(replica, max_tokens=5)
    assert not future.done()
    assert 0.1 <= future.result(60.0).metrics.total_seconds <= time.monotonic() - started
    replica = FakeReplica(token_seconds=lambda r: 60.0 if r.request_id == "slow" else 0.0)
    slow, fast = ask(replica, "slow", "fast")
    assert (fast.done(), slow.done()) == (True, False)
    replica.shutdown()


# -- failures ---------------------------------------------------------------------------------------------------------


def test_an_injected_refusal_fails_its_request_only() -> None:
    replica = FakeReplica(refuse=lambda r: "too long" if len(r.prompt_token_ids) > 3 else None)
    fine, refused, also_fine = replica.submit([request(), request([1] * 4), request()])
    with pytest.raises(ValueError, match=r"^too long$"):
        refused.result()
    assert fine.result().outputs[0].text == also_fine.result().outputs[0].text
    assert len(replica.submitted) == 3
    assert replica.call(Engine.stats, 1.0).requests == 2


def test_an_injected_death_fails_what_runs_and_all_that_comes() -> None:
    replica = FakeReplica(1, token_seconds=3600.0)
    futures = ask(replica)
    replica.die("out of memory")
    replica.die("something later")
    all_died(futures + ask(replica), "^replica 1 died: out of memory$")
    for use in (
        partial(replica.call, Engine.tokenizer, 1.0),
        replica.ask(Engine.stats).result,
        partial(replica.wait_ready, 1.0),
    ):
        with pytest.raises(ReplicaDiedError, match="out of memory"):
            use()
    assert not replica.is_alive()
    replica = FakeReplica(2, token_seconds=3600.0, die_under=lambda r: r.request_id == "poison")
    all_died(ask(replica, "before", "poison", "after"), "^replica 2 died: under 'poison'$")
    assert not replica.is_alive()


def test_a_stalled_replica_makes_no_token_and_answers_nothing_until_it_dies() -> None:
    replica = FakeReplica(token_seconds=0.001)
    (running,) = ask(replica, "a", max_tokens=1000)
    replica.stall()
    (new,) = ask(replica, "b")
    replica.abort(["a"])
    with pytest.raises(EngineError, match=r"replica 0 did not answer 'stats' within 0\.05 s"):
        replica.call(Engine.stats, 0.05)
    assert (running.done(), new.done(), replica.is_alive()) == (False, False, True)
    timer = threading.Timer(0.05, replica.shutdown)
    timer.start()
    with pytest.raises(ReplicaDiedError):
        replica.call(Engine.tokenizer, 5.0)
    all_died([running, new], "")
    timer.join()


def test_a_start_may_take_its_time_or_fail_and_a_shutdown_ends_it() -> None:
    slow = FakeReplica(start_seconds=0.05)
    with pytest.raises(EngineError, match=r"replica 0 was not ready within 0\.01 s"):
        slow.wait_ready(0.01)
    started = time.monotonic()
    assert slow.wait_ready(5.0).model == "fake"
    assert time.monotonic() - started >= 0.05
    with pytest.raises(ReplicaDiedError, match="replica 0 died: no memory"):
        FakeReplica(fail_start="no memory").wait_ready(1.0)
    replica = FakeReplica(start_seconds=3600.0)
    timer = threading.Timer(0.05, replica.shutdown)
    timer.start()
    with pytest.raises(ReplicaDiedError, match="shut down"):
        replica.wait_ready(90.0)
    timer.join()


# -- pause and commands -----------------------------------------------------------------------------------------------


def test_a_pause_holds_what_comes_and_an_abort_of_it_works() -> None:
    replica = FakeReplica(token_seconds=3600.0)
    ask(replica, "slow")
    with pytest.raises(EngineError, match=r"replica 0 was not idle within 0\.05 s"):
        replica.call(Engine.pause, 0.05, "wait", False)
    replica.token_seconds = 0.0
    new, other = ask(replica, "fast", "cut")
    assert not new.done()
    replica.abort(["cut"])  # a paused request can be aborted
    assert other.result(60.0).aborted
    replica.call(Engine.resume, 1.0)
    assert new.result(60.0).request_id == "fast"
    replica.shutdown()


def test_commands_by_name_are_those_of_the_methods() -> None:
    replica = FakeReplica()
    assert load_tokenizer(replica.call(Engine.tokenizer, 1.0)).encode("a") == [97]
    assert replica.call(Engine.reset_prefix_cache, 1.0) is True
    replica.call(Engine.pause, 1.0, "keep", True)
    (future,) = ask(replica)
    assert replica.call(Engine.stats, 1.0).running == 1
    assert replica.call(Engine.reset_prefix_cache, 1.0) is False
    replica.call(Engine.resume, 1.0)
    future.result(60.0)
    with pytest.raises(EngineError, match="the fake engine has no verb 'metadata'"):
        replica.call(Engine.metadata, 1.0)
    assert replica.ask(Engine.probe, 0.5).result(1.0) == ProbeReport(core_answered=True)
    replica.probe_report = ProbeReport(core_answered=False, stopped=True)
    assert replica.ask(Engine.probe, 0.5).result(1.0) == ProbeReport(core_answered=False, stopped=True)


# -- the engine -------------------------------------------------------------------------------------------------------


def test_an_engine_serves_on_construction_if_it_has_a_replica() -> None:
    engine = FakeAsyncVLLM()
    assert engine.is_running
    assert [entry.state.name for entry in engine.replica_table] == ["SERVING"]
    assert engine.routing_layout == LAYOUT
    engine.shutdown()
    with pytest.raises(RuntimeError, match="the service is not running"):
        engine.generate("hi")
    with FakeAsyncVLLM(layout=None) as dense:
        assert dense.routing_layout is None
        assert dense.generate(PROMPT, use_tqdm=False).outputs[0].routed_experts is None
    with FakeAsyncVLLM(2) as engine:
        engine.replicas[0].die()
        until(lambda: engine.stats()[0]["state"] == "DEAD")
        assert engine.generate("hi", use_tqdm=False).metrics.replica == 1
        engine.replicas[1].die()
        for told in ("injected death", "none will return|no replica"):  # without a policy of faults
            with pytest.raises(NoReplicaError, match=told):
                engine.generate("hi", use_tqdm=False)
    with pytest.raises(ValueError, match="num_replicas must be an integer from 1 to 65536, got 0"):
        FakeAsyncVLLM(0)


def test_every_argument_reaches_every_replica() -> None:
    given: dict[str, Any] = {"token_seconds": 1e-4, "refuse": lambda request: None}
    with FakeAsyncVLLM(3, 7, sampling_params={"max_tokens": 2}, script=lambda prompt: prompt * 2, **given) as engine:
        assert [(replica.index, replica.seed) for replica in engine.replicas] == [(0, 7), (1, 7), (2, 7)]
        assert all({name: getattr(replica, name) for name in given} == given for replica in engine.replicas)
        assert engine.generate("hi", use_tqdm=False).outputs[0].text == "hi"
        assert engine.generate("hi", {"max_tokens": 9}, use_tqdm=False).outputs[0].text == "hihi"


# -- faults on purpose -------------------------------------------------------------------------------------------------


ROUTES = torch.tensor([[[0, 1]], [[2, 3]], [[3, 0]], [[-1, -1]]], dtype=torch.int8)


def batch_of(count: int) -> Any:
    rows = [{"routed_experts": {"full": ROUTES}, "advantage": torch.full((1, 1), float(i))} for i in range(count)]
    return lazy_stack([TensorDict(row) for row in rows])


def spoiled(fault: Any) -> Any:
    trainer = SimpleNamespace(collector=SimpleNamespace(postproc=None))
    fault(trainer)
    return trainer.collector.postproc(batch_of(2))[1]["routed_experts", "full"].tolist()


def test_routes_and_advantages_change_places() -> None:
    assert spoiled(shift_routes) == [[[-1, -1]], [[0, 1]], [[2, 3]], [[3, 0]]]
    assert spoiled(wrong_ids) == [[[1, 2]], [[3, 0]], [[0, 1]], [[-1, -1]]]
    torch.manual_seed(0)
    found: list[Any] = []
    trainer = SimpleNamespace(register_op=lambda stage, hook: found.append((stage, hook)))
    shuffle_advantages(trainer)
    ((stage, hook),) = found
    values = [float(row["advantage"]) for row in hook(batch_of(20)).unbind(0)]
    assert stage == "batch_process"
    assert sorted(values) == list(range(20)) != values


# -- weights: taken as engines do --------------------------------------------------------------------------------------

STAGE: tuple[Any, ...] = ("digest", 1, None)


def test_it_checks_names_and_bytes_and_wants_its_transport_opened(tmp_path: Path) -> None:
    replica = FakeWeightReplica(dtype="bfloat16")
    given = {"a": torch.ones(2, 2), "b": torch.ones(3, dtype=torch.int64)}
    WeightStoreWriter(tmp_path).publish(given.items(), 1)
    with pytest.raises(EngineError, match="the weight transport is not initialised"):
        replica.call(Engine.stage_weights, 1.0, 1, *STAGE)
    with pytest.raises(EngineError, match="the fake engine has no transport 'mpi'"):
        replica.call(Engine.init_weights, 1.0, "mpi", {})
    replica.call(Engine.init_weights, 1.0, "memmap", {"folder": str(tmp_path)})
    file = tmp_path / "v1.safetensors"
    content, start = file.read_bytes(), len(file.read_bytes()) - 40
    file.write_bytes(content[:start] + b"x" + content[start + 1 :])
    with pytest.raises(DigestMismatch, match="bytes of a"):
        replica.call(Engine.stage_weights, 1.0, 1, *STAGE)
    replica.call(Engine.stage_weights, 1.0, 1, "off", 1, None)
    with pytest.raises(ManifestMismatch, match="2 missing"):
        replica._expected = {"x": given["a"], "y": given["b"]}  # type: ignore[assignment]
        replica.call(Engine.stage_weights, 1.0, 1, *STAGE)
