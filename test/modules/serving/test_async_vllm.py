"""AsyncVLLM: how the service is built and started, and what a real vLLM engine does behind it.

The first half starts scripted replicas in place of processes. The second half runs vLLM; its tests share one engine of
one replica, then one of two, and those that start engines of their own come last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from support.completions import cut
from support.engines import EngineShelf, start_engine
from support.reference import TOLERANCE, Reference
from support.replicas import ScriptedReplica
from support.waiting import until
from torchrl_moe.data import RoutedExperts
from torchrl_moe.errors import EngineError, GenerationTimeout, ReplicaDiedError
from torchrl_moe.modules import AsyncVLLM, make_async_vllm_engine
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.serving.candidates import FaultPolicy

ROOT = Path(__file__).parents[3]


# -- built and started, with scripted replicas in place of processes --------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``made``: the replicas, with the arguments of a local one; ``script``: what being ready is, by index."""
    scripted = SimpleNamespace(made=[], script={})

    def make(
        index: int, kind: Any, arguments: dict[str, Any], environment: dict[str, str], log_folder: Any
    ) -> ScriptedReplica:
        ready = {"ready": scripted.script[index]} if index in scripted.script else {}
        replica = ScriptedReplica(index, script=ready)
        vars(replica).update(arguments=arguments, environment=environment, log_folder=log_folder)
        scripted.made.append(replica)
        return replica

    monkeypatch.setattr("torchrl_moe.modules.backends.process.process_replica.LocalReplica", make)
    monkeypatch.delenv("TORCHRL_VLLM_TIMEOUT_SECONDS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return scripted


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model from outside."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_replicas_compute_where_they_are_told_to_and_not_where_the_trainer_does(
    scripted: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for choice, expected in [({}, ["0", "2"]), ({"devices": [[2], "cuda:1"]}, ["2", "1"])]:
        scripted.made.clear()
        with AsyncVLLM.from_pretrained(model, num_replicas=2, **choice):
            assert [replica.environment["CUDA_VISIBLE_DEVICES"] for replica in scripted.made] == expected
    with pytest.raises(ValueError, match=r"3 replicas .* the trainer computes on 1\."):
        AsyncVLLM({"model": "m"}, 3)
    with pytest.raises(ValueError, match="Ray chooses devices"):
        AsyncVLLM.launch({"model": "m"}, 1, backend="ray", devices=[[0]])


def test_replicas_start_together_and_serve_when_all_are_ready(scripted: Any) -> None:
    order: list[str] = []
    scripted.script = {0: lambda: order.extend(replica.life[0] for replica in scripted.made)}
    with AsyncVLLM({"model": "m"}, 3) as engine:
        assert not engine.is_running
        assert [replica.life for replica in scripted.made] == [[], [], []]
        assert engine.start() is engine
        assert order == ["start"] * 3  # all before the first was waited for
        assert engine.is_running
        assert [entry.state.name for entry in engine.replica_table] == ["SERVING"] * 3
        assert repr(engine).startswith("AsyncVLLM('fake', 3 replicas)\n  #0 SERVING, v0, 0 in flight")
        assert engine.generate("hi", {"max_tokens": 2}, use_tqdm=False).prompt == "hi"
    assert [replica.life for replica in scripted.made] == [["start", "ready", "shutdown"]] * 3


def test_launching_twice_warns_and_does_nothing(scripted: Any) -> None:
    with AsyncVLLM.launch({"model": "m"}) as engine:
        with pytest.warns(UserWarning, match=r"the service is already running; start\(\) does nothing") as caught:
            assert engine.start() is engine
        assert caught[0].filename == __file__
        assert scripted.made[0].life == ["start", "ready"]


def test_a_service_that_was_shut_down_does_not_start_again(scripted: Any) -> None:
    engine = AsyncVLLM.launch({"model": "m"})
    engine.shutdown()
    with pytest.raises(RuntimeError, match=r"start: the service was shut down\. Make a new one"):
        engine.start()
    never = AsyncVLLM({"model": "m"})
    never.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        never.start()


@pytest.mark.parametrize("error", [ReplicaDiedError("no memory"), KeyboardInterrupt(), ZeroDivisionError()], ids=repr)
def test_a_start_that_fails_ends_every_replica_and_passes_the_error_on(scripted: Any, error: BaseException) -> None:
    scripted.script = {1: error}
    engine = AsyncVLLM({"model": "m"}, 3)
    with pytest.raises(type(error)) as caught:
        engine.start()
    assert caught.value is error
    assert [replica.life[-1] for replica in scripted.made] == ["shutdown"] * 3
    assert not engine.is_running
    with pytest.raises(RuntimeError, match="shut down"):
        engine.start()


def test_a_start_that_takes_too_long_names_the_limit_and_its_variable(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.script = {0: EngineError("replica 0 was not ready")}
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "2.5")
    words = r"(?s)replica 0 was not ready.*had 2\.5 s: raise timeout_seconds, or the .*TORCHRL_VLLM_TIMEOUT_SECONDS"
    with pytest.raises(EngineError, match=words):
        AsyncVLLM.launch({"model": "m"})
    assert scripted.made[0].life[-1] == "shutdown"


def test_the_limit_is_for_all_replicas_together(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.script = {0: lambda: time.sleep(0.2)}
    with AsyncVLLM({"model": "m"}, 2).start(timeout_seconds=5.0):
        first, second = (replica.asked("ready")[0] for replica in scripted.made)
        assert 4.0 < first <= 5.0
        assert second <= first - 0.2
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "77")
    with AsyncVLLM.launch({"model": "m"}):
        assert 70 < scripted.made[-1].asked("ready")[0] <= 77
    monkeypatch.delenv("TORCHRL_VLLM_TIMEOUT_SECONDS")
    with AsyncVLLM.launch({"model": "m"}):
        assert 590 < scripted.made[-1].asked("ready")[0] <= 600


def test_a_limit_that_is_no_number_is_refused_before_anything_starts(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="TIMEOUT_SECONDS must be a positive number of seconds, got 'soon'"):
        AsyncVLLM.launch({"model": "m"})
    assert scripted.made[0].life == []


def test_arguments_reach_every_replica(scripted: Any, model: Path) -> None:
    engine = AsyncVLLM.from_pretrained(model, num_replicas=2, sampling_params={"max_tokens": 3}, seed=7)
    with engine:
        expected = {"model": str(model), "tensor_parallel_size": 1, "seed": 7}
        assert [replica.arguments for replica in scripted.made] == [expected, {**expected, "seed": 8}]
        assert [replica.index for replica in scripted.made] == [0, 1]
        assert engine.sampling_params == {"max_tokens": 3}
        assert engine.engine_args == expected
        assert (engine.engine_args.model, engine.engine_args.seed) == (str(model), 7)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"compile": False}, {"compilation_config": {"mode": 0}}),
        ({"compile": False, "enforce_eager": True}, {"compilation_config": {"mode": 0}, "enforce_eager": True}),
        ({"compile": True}, {}),
        ({"num_devices": 2}, {"tensor_parallel_size": 2}),
        ({"num_devices": 2, "tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ({"tensor_parallel_size": 4}, {"tensor_parallel_size": 4}),
        ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
    ],
    ids=str,
)
def test_torchrls_words_become_vllms(scripted: Any, model: Path, given: Any, expected: Any) -> None:
    with AsyncVLLM.from_pretrained(model, **given):
        assert scripted.made[0].arguments == {"model": str(model), "tensor_parallel_size": 1, **expected}


@pytest.mark.parametrize("given", [{}, {"seed": None}, {"seed": 0}], ids=str)
def test_each_replica_draws_noise_of_its_own(scripted: Any, given: Any) -> None:
    AsyncVLLM({"model": "m", **given}, 3)
    first, *others = (replica.arguments for replica in scripted.made)
    assert first == {"model": "m", **given}
    assert others == [{"model": "m", "seed": 1}, {"model": "m", "seed": 2}]


def test_a_replica_that_died_is_made_again_with_noise_of_its_own(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with AsyncVLLM.launch({"model": "m", "seed": 7}, 2, faults=FaultPolicy(first_delay=0.0)) as engine:
        scripted.made[1].die()
        until(lambda: engine.replica_table[1].restarts == 1 and engine.replica_table[1].state.name == "SERVING")
        _, old, new = scripted.made
        assert old.life == ["start", "ready", "shutdown"]
        assert new.life == ["start", "ready"]
        assert (new.index, new.arguments) == (1, {"model": "m", "seed": 9})
        assert new.environment == old.environment
        assert new.environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert new.life[-1] == "shutdown"


def test_without_restarts_a_dead_replica_stays_dead(scripted: Any) -> None:
    with AsyncVLLM.launch({"model": "m"}, 2, faults=FaultPolicy(restart=False)) as engine:
        scripted.made[1].die()
        until(lambda: engine.replica_table[1].state.name == "DEAD")
        time.sleep(0.1)
        assert len(scripted.made) == 2


def test_the_number_of_requests_at_a_time_is_the_users_or_a_thousand_for_each_replica(
    scripted: Any, model: Path
) -> None:
    for given, expected in (
        ({}, 3 * 1024),
        ({"max_concurrent_requests": 5}, 5),
        ({"max_concurrent_requests": None}, None),
    ):
        with AsyncVLLM.from_pretrained(model, num_replicas=3, **given) as engine:
            assert engine.admission.limit == expected
    with pytest.raises(ValueError, match="max_concurrent_requests must be an integer of at least 1, or None, got 0"):
        AsyncVLLM.from_pretrained(model, max_concurrent_requests=0)


@pytest.mark.parametrize("enabled", [True, False])
def test_prefix_caching_of_the_constructor_wins_over_the_engine_arguments(scripted: Any, enabled: bool) -> None:
    given = {"model": "m", "enable_prefix_caching": not enabled}
    AsyncVLLM(given, enable_prefix_caching=enabled)
    AsyncVLLM(given)
    AsyncVLLM({"model": "m"})
    one, two, three = (replica.arguments for replica in scripted.made)
    assert one["enable_prefix_caching"] is enabled
    assert two["enable_prefix_caching"] is (not enabled)
    assert "enable_prefix_caching" not in three
    assert given == {"model": "m", "enable_prefix_caching": not enabled}


def test_each_replica_has_devices_of_its_own(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    AsyncVLLM({"model": "m", "tensor_parallel_size": 2}, 2)
    assert [replica.environment["CUDA_VISIBLE_DEVICES"] for replica in scripted.made] == ["4,5", "6,7"]
    with pytest.raises(ValueError, match=r"3 replicas of 2 GPU\(s\) need 6, but 4 are visible"):
        AsyncVLLM({"model": "m", "tensor_parallel_size": 2}, 3)


def test_verbose_lets_vllm_log(scripted: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    for verbose in (True, False):
        AsyncVLLM.from_pretrained(model, verbose=verbose).shutdown()
    assert [replica.environment["VLLM_LOGGING_LEVEL"] for replica in scripted.made] == ["INFO", "WARNING"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (None, {"head_dtype": "float32"}),
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 2, "head_dtype": "float32"}),
    ],
)
def test_a_float32_last_layer_is_an_override_of_the_models_config(
    scripted: Any, model: Path, overrides: Any, expected: Any
) -> None:
    given = {} if overrides is None else {"hf_overrides": overrides}
    with AsyncVLLM.from_pretrained(model, enable_fp32_output=True, **given):
        assert scripted.made[0].arguments["hf_overrides"] == expected
    with AsyncVLLM.from_pretrained(model, **given):
        assert scripted.made[1].arguments.get("hf_overrides") == overrides


def test_a_float32_last_layer_and_an_override_that_is_a_function_are_too_much(scripted: Any, model: Path) -> None:
    with pytest.raises(ValueError, match="have yours set head_dtype='float32'"):
        AsyncVLLM.from_pretrained(model, enable_fp32_output=True, hf_overrides=lambda config: config)
    assert scripted.made == []


def test_metrics_and_the_folder_for_logs_are_the_services(scripted: Any, model: Path) -> None:
    with AsyncVLLM.from_pretrained(model, metrics=False, log_folder="/logs") as engine:
        assert not engine.metrics.enabled
        assert scripted.made[0].log_folder == "/logs"
    with make_async_vllm_engine(model_name=model) as engine:
        assert engine.metrics.enabled
        assert scripted.made[1].log_folder is None


def test_make_async_vllm_engine_is_from_pretrained_under_torchrls_name(scripted: Any, model: Path) -> None:
    with make_async_vllm_engine(
        model_name=model,
        num_devices=1,
        num_replicas=2,
        verbose=True,
        compile=False,
        enable_fp32_output=True,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_prefix_caching=False,
        seed=3,
    ) as engine:
        assert isinstance(engine, AsyncVLLM)
        assert engine.num_replicas == 2
        assert scripted.made[1].arguments == {
            "model": str(model),
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "compilation_config": {"mode": 0},
            "enable_prefix_caching": False,
            "hf_overrides": {"head_dtype": "float32"},
            "seed": 4,
        }


def test_the_positions_are_torchrls(scripted: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    with AsyncVLLM.from_pretrained(model, 2, 3, True, False, True) as engine:
        assert engine.num_replicas == 3
        assert scripted.made[0].arguments == {
            "model": str(model),
            "tensor_parallel_size": 2,
            "compilation_config": {"mode": 0},
            "hf_overrides": {"head_dtype": "float32"},
        }
        assert scripted.made[0].environment["VLLM_LOGGING_LEVEL"] == "INFO"
    with AsyncVLLM({"model": "m"}, 2, None, False) as engine:
        assert engine.num_replicas == 2
        assert engine.engine_args == {"model": "m", "enable_prefix_caching": False}
    with pytest.raises(ValueError, match="actor_class must be None: a replica is a process with an engine"):
        AsyncVLLM({"model": "m"}, 2, object)  # type: ignore[arg-type]


def test_engine_arguments_of_vllm_are_taken(scripted: Any) -> None:
    vllm = pytest.importorskip("vllm")
    with AsyncVLLM.launch(vllm.AsyncEngineArgs(model="m", seed=5), 2, sampling_params={"n": 2}) as engine:
        assert engine.num_replicas == 2
        assert [replica.arguments for replica in scripted.made] == [{"model": "m", "seed": seed} for seed in (5, 6)]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: AsyncVLLM({"model": "m"}, 0), ValueError, "num_replicas must be an integer from 1 to 65536, got 0"),
        (lambda: AsyncVLLM({"model": "m"}, -2), ValueError, "num_replicas must be an integer from 1 to 65536, got -2"),
        (lambda: AsyncVLLM({"model": "m"}, backend="slurm"), ValueError, "backend must be .*, got 'slurm'"),
        (
            lambda: AsyncVLLM({"model": "m"}, name="s"),
            ValueError,
            "name given with backend='local': only backend='ray'",
        ),
        (
            lambda: AsyncVLLM({"model": "m"}, namespace="n", resources={"CPU": 1}),
            ValueError,
            "namespace, resources given with backend='local'",
        ),
        (lambda: AsyncVLLM({}), ValueError, "engine_args names no model"),
        (lambda: AsyncVLLM("m"), TypeError, "engine_args must be a mapping or vllm.AsyncEngineArgs, got str"),
        (lambda: AsyncVLLM.launch({"model": "m"}, 0), ValueError, "num_replicas must be an integer from 1"),
    ],
)
def test_a_bad_service_is_refused(scripted: Any, call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
    assert scripted.made == []


def test_two_words_for_the_devices_must_agree(scripted: Any, model: Path) -> None:
    with pytest.raises(ValueError, match="num_devices=2 and tensor_parallel_size=4 differ: pass one"):
        AsyncVLLM.from_pretrained(model, num_devices=2, tensor_parallel_size=4)
    assert scripted.made == []


def test_a_folder_without_a_model_is_refused_before_any_process(scripted: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model at .*: the folder has no config\.json\. Save one with model\.save"):
        AsyncVLLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no model at .*: the folder does not exist"):
        AsyncVLLM.from_pretrained(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no model at '\./missing': the folder does not exist"):
        make_async_vllm_engine(model_name="./missing")
    assert scripted.made == []


def test_a_hub_name_is_vllms_business(scripted: Any) -> None:
    with AsyncVLLM.from_pretrained("someone/some-model"):
        assert scripted.made[0].arguments["model"] == "someone/some-model"


# -- one real replica -------------------------------------------------------------------------------------------------

IDS = [72, 105, 44, 32, 119, 111, 114, 108, 100]


def generate(engine: AsyncVLLM, prompts: Any, max_tokens: int = 4, **kwargs: Any) -> Any:
    params = {"max_tokens": max_tokens, "logprobs": 0, "temperature": 1.0, "ignore_eos": True}
    params |= kwargs.pop("params", {})
    return engine.generate(prompts, params, use_tqdm=False, **kwargs)


def until_caught(attempt: Callable[[], bool]) -> None:
    """Try something that must meet a request while it runs; on a busy machine it may have finished before."""
    assert any(attempt() for _ in range(8))


def counts(engine: AsyncVLLM) -> dict[str, Any]:
    """What moves while tokens are made, one replica's."""
    (row,) = engine.stats()
    return {name: row[name] for name in ("running", "waiting", "cache_usage", "requests", "generated_tokens")}


def until_idle(engine: AsyncVLLM) -> None:
    until(lambda: all(row["running"] + row["waiting"] + row["inflight"] == 0 for row in engine.stats()))


@pytest.mark.engine("qwen3_moe")
def test_text_and_ids_give_tokens_log_probs_and_routes(engine: AsyncVLLM) -> None:
    by_text, by_ids = generate(engine, "Hi, world", 6), generate(engine, torch.tensor(IDS), 6)
    layout = engine.routing_layout
    assert layout is not None
    assert (layout.num_layers, layout.moe_layers, layout.top_k, layout.num_experts) == (4, (1, 2, 3), 4, 16)
    assert by_text.prompt == "Hi, world"
    for completion in (by_text, by_ids):
        assert completion.prompt_token_ids.tolist() == IDS
        (output,) = completion.outputs
        assert (output.token_ids.shape, output.finish_reason) == ((6,), "length")
        assert (output.logprobs.shape, output.logprobs.dtype) == ((6,), np.float32)
        assert (output.logprobs <= 0).all()
        assert output.routed_experts.shape == (9 + 6 - 1, 4, 4)
        assert output.policy_versions.tolist() == [0] * 6
        RoutedExperts.from_vllm(output.routed_experts, num_tokens=15, layout=layout).validate(layout)
        assert completion.metrics.replica == 0
        assert completion.metrics.total_seconds > 0
    assert np.array_equal(by_text.outputs[0].routed_experts[:9], by_ids.outputs[0].routed_experts[:9])


@pytest.mark.engine("qwen3_moe")
def test_a_greedy_answer_is_the_same_each_time(engine: AsyncVLLM) -> None:
    one, two = (generate(engine, IDS, 8, params={"temperature": 0.0}).outputs[0] for _ in range(2))
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert np.allclose(one.logprobs, two.logprobs, atol=1e-5)


@pytest.mark.engine("qwen3_moe")
def test_a_seed_repeats_what_is_sampled(engine: AsyncVLLM) -> None:
    def sample(seed: int) -> list[int]:
        assert engine.set_seed(seed) == seed + 1
        answer = generate(engine, IDS, 24, params={"temperature": 1.0, "ignore_eos": True})
        return answer.outputs[0].token_ids.tolist()

    first = sample(3)
    assert sample(4) != first
    assert sample(3) == first


@pytest.mark.engine("qwen3_moe")
def test_many_prompts_with_many_answers_each_keep_their_order(engine: AsyncVLLM) -> None:
    prompts = [[65 + i] * (1 + i % 5) for i in range(40)]
    completions = generate(engine, prompts, 3, params={"n": 3})
    assert [completion.prompt_token_ids.tolist() for completion in completions] == prompts
    assert {tuple(output.index for output in completion.outputs) for completion in completions} == {(0, 1, 2)}
    assert {len(output.token_ids) for completion in completions for output in completion.outputs} == {3}
    shapes = [completion.outputs[2].routed_experts.shape[0] for completion in completions]
    assert shapes == [len(prompt) + 2 for prompt in prompts]


@pytest.mark.engine("qwen3_moe")
def test_eight_threads_at_once(engine: AsyncVLLM) -> None:
    def work(thread: int) -> bool:
        prompts = [[65 + thread, 65 + i] for i in range(6)]
        return [completion.prompt_token_ids.tolist() for completion in generate(engine, prompts)] == prompts

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [True] * 8
    assert engine.get_num_unfinished_requests() == [0]


@pytest.mark.engine("qwen3_moe")
def test_log_probs_and_routes_come_only_if_wanted(engine: AsyncVLLM) -> None:
    output = engine.generate(IDS, {"max_tokens": 2}, use_tqdm=False, return_routed_experts=False).outputs[0]
    assert (output.logprobs, output.routed_experts) == (None, None)
    assert engine.generate(IDS, use_tqdm=False).outputs[0].logprobs is not None  # by default


@pytest.mark.engine("qwen3_moe")
def test_a_structure_is_kept_to(engine: AsyncVLLM) -> None:
    completion = generate(
        engine, IDS, 8, guided_options_request={"choice": ["yes", "no"]}, params={"ignore_eos": False}
    )
    assert completion.outputs[0].text in ("yes", "no")
    assert completion.outputs[0].finish_reason == "stop"


@pytest.mark.engine("qwen3_moe")
def test_a_cached_prefix_is_counted_until_the_cache_is_reset(engine: AsyncVLLM) -> None:
    prompt = list(range(33, 33 + 200))
    assert engine.reset_prefix_cache() is True
    cached = [generate(engine, prompt).num_cached_tokens for _ in range(2)]
    assert cached[0] == 0
    assert 100 <= cached[1] < 200
    assert engine.reset_prefix_cache() is True
    assert generate(engine, prompt).num_cached_tokens == 0


@pytest.mark.engine("qwen3_moe")
@pytest.mark.parametrize(
    ("bad", "kwargs", "words"),
    [
        ([65] * 600, {}, r"request 1 was refused: .*512"),
        ([65], {"params": {"temperature": -1.0}}, "sampling_params: temperature must be a finite number of at least 0"),
        ([65], {"params": {"no_such_parameter": 1}}, r"request [01] was refused: .*no_such_parameter"),
        ([100_000], {}, r"request 1 was refused: .*vocab"),
    ],
    ids=["too long", "bad value", "unknown parameter", "no such token"],
)
def test_a_refused_request_is_named_and_the_rest_is_released(
    engine: AsyncVLLM, bad: list[int], kwargs: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?s){words}"):
        generate(engine, [IDS, bad, IDS], 40, **kwargs)
    assert engine.get_num_unfinished_requests() == [0]
    until_idle(engine)
    assert len(generate(engine, IDS).outputs[0].token_ids) == 4


@pytest.mark.engine("qwen3_moe")
def test_a_timeout_aborts_what_is_late_and_keeps_what_is_finished(engine: AsyncVLLM) -> None:
    async def both() -> list[Any]:
        short = engine.agenerate(IDS, {"max_tokens": 1, "ignore_eos": True})
        long = engine.agenerate(IDS, {"max_tokens": 500, "ignore_eos": True}, timeout_seconds=0.1)
        return await asyncio.gather(short, long, return_exceptions=True)

    def attempt() -> bool:
        short, long = asyncio.run(both())
        assert len(short.outputs[0].token_ids) == 1
        return isinstance(long, GenerationTimeout)

    until_caught(attempt)
    engine.pause()  # now nothing can finish in time
    with pytest.raises(GenerationTimeout, match=r"2 of 2 requests were not finished within 0\.2 s") as caught:
        generate(engine, [IDS, IDS], timeout_seconds=0.2)
    engine.resume()
    assert [completion.aborted for completion in caught.value.partial] == [True, True]
    assert engine.get_num_unfinished_requests() == [0]
    until_idle(engine)


@pytest.mark.engine("qwen3_moe")
def test_an_aborted_request_returns_its_rows(engine: AsyncVLLM) -> None:
    params = {"max_tokens": 500, "logprobs": 0, "ignore_eos": True}

    async def main() -> Any:
        task = asyncio.create_task(engine.agenerate(IDS, params, request_id="mine"))
        await asyncio.sleep(0.3)
        engine.abort("mine")
        return await task

    def attempt() -> bool:
        (output,) = asyncio.run(main()).outputs
        if not 0 < (tokens := len(output.token_ids)) < 500:
            return False
        assert output.finish_reason == "abort"
        assert output.logprobs.shape == (tokens,)
        assert output.routed_experts.shape == (9 + tokens - 1, 4, 4)
        return True

    until_caught(attempt)
    until_idle(engine)


LETTERS = {"allowed_token_ids": list(range(97, 123))}
GREEDY = {"temperature": 0.0, "max_tokens": 150, "logprobs": 0, "ignore_eos": True}


def resume(engine: AsyncVLLM, partial: Any, params: dict[str, Any]) -> Any:
    return engine.generate(resume=partial, sampling_params=params, use_tqdm=False)


def assert_goes_on(first: CompletionOutput, done: CompletionOutput) -> None:
    """What there was is in the answer as it was, bit by bit."""
    for name in ("token_ids", "policy_versions", "logprobs", "routed_experts"):
        known = getattr(first, name)
        assert known is None or np.array_equal(getattr(done, name)[: len(known)], known)


def assert_as_if_never_cut(done: Completion, whole: Completion) -> None:
    for got, expected in zip(done.outputs, whole.outputs, strict=True):
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert (got.text, got.finish_reason, got.stop_reason) == (
            expected.text,
            expected.finish_reason,
            expected.stop_reason,
        )
        assert np.abs(got.logprobs - expected.logprobs).max() <= TOLERANCE
        assert got.routed_experts.shape == (len(whole.prompt_token_ids) + len(got.token_ids) - 1, 4, 4)
        assert np.array_equal(np.sort(got.routed_experts), np.sort(expected.routed_experts))
        assert got.policy_versions.tolist() == [0] * len(got.token_ids)
    assert (done.prompt, done.prompt_token_ids.tolist()) == (whole.prompt, whole.prompt_token_ids.tolist())


@pytest.mark.engine("qwen3_moe")
def test_greedy_answers_that_a_timeout_cut_continue_exactly(engine: AsyncVLLM) -> None:
    prompts = ["Hi, world", *([65 + i] * (3 + i) for i in range(4))]
    whole = engine.generate(prompts, GREEDY, use_tqdm=False)

    def attempt() -> bool:
        try:
            partial = engine.generate(prompts, GREEDY, use_tqdm=False, timeout_seconds=0.15)
        except GenerationTimeout as error:
            partial = error.partial
        done = resume(engine, partial, GREEDY)
        for got, had, expected in zip(done, partial, whole, strict=True):
            assert_as_if_never_cut(got, expected)
            assert_goes_on(had.outputs[0], got.outputs[0])
            assert got.metrics.first_token_seconds <= got.metrics.total_seconds
        return all(0 < len(had.outputs[0].token_ids) < 150 for had in partial)

    until_caught(attempt)
    until_idle(engine)


@pytest.mark.engine("qwen3_moe")
def test_each_of_several_answers_continues_and_every_token_is_exact(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    params = {**GREEDY, "temperature": 1.0, "n": 3, "max_tokens": 40}
    (whole,) = engine.generate([IDS], params, use_tqdm=False)
    partial = cut(whole, 7, None, 30, decode=engine.get_tokenizer().decode)
    done = resume(engine, partial, params)
    reference = Reference(shelf.folder("qwen3_moe"))
    for got, had in zip(done.outputs, partial.outputs, strict=True):
        assert (len(got.token_ids), got.finish_reason) == (40, "length")
        assert_goes_on(had, got)
        ids = torch.from_numpy(np.concatenate([IDS, got.token_ids]))
        routes = torch.from_numpy(got.routed_experts.astype(np.int64))
        log_probs, chosen = reference(ids, routes=routes)
        assert (torch.from_numpy(got.logprobs.copy()) - log_probs[len(IDS) :]).abs().max() <= TOLERANCE
        for layer, expected in chosen.items():
            assert routes[:, layer].sort(-1).values.equal(expected[:-1].sort(-1).values)


@pytest.mark.engine("qwen3_moe")
def test_a_stop_string_across_the_cut_ends_the_answer_where_it_would_have(engine: AsyncVLLM) -> None:
    params = {**GREEDY, **LETTERS, "max_tokens": 60}
    (whole,) = engine.generate([IDS], params, use_tqdm=False)
    text = whole.outputs[0].text
    place = max(k for k in range(1, len(text)) if text.find(text[k - 1 : k + 1]) == k - 1)
    params["stop"] = text[place - 1 : place + 1]
    (stopped,) = engine.generate([IDS], params, use_tqdm=False)
    assert (len(stopped.outputs[0].token_ids), stopped.outputs[0].finish_reason) == (place + 1, "stop")
    assert_as_if_never_cut(resume(engine, cut(whole, place), params), stopped)


@pytest.mark.engine("qwen3_moe")
def test_what_a_grammar_had_begins_again_and_what_had_no_token_too(engine: AsyncVLLM) -> None:
    guided = {"choice": ["yes", "no"]}
    params = {"max_tokens": 8, "logprobs": 0}
    (whole,) = engine.generate(["Hi"], params, use_tqdm=False, guided_options_request=guided)
    marked = cut(whole, 1)
    marked.outputs[0].policy_versions = np.array([-5], np.int32)
    done = engine.generate(
        resume=[marked, cut(whole, 0)], sampling_params=params, use_tqdm=False, guided_options_request=guided
    )
    for completion in done:
        assert completion.prompt == "Hi"
        (output,) = completion.outputs
        assert output.text in ("yes", "no")
        assert set(output.policy_versions.tolist()) == {0}
        assert output.routed_experts.shape[0] == 2 + len(output.token_ids) - 1


@pytest.mark.engine("qwen3_moe")
def test_a_task_cancelled_at_once_leaves_no_request_in_the_engine(engine: AsyncVLLM) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(engine.agenerate(IDS, {"max_tokens": 500, "ignore_eos": True})) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    (before,) = engine.stats()
    asyncio.run(main())
    until_idle(engine)
    (after,) = engine.stats()
    assert after["generated_tokens"] - before["generated_tokens"] < 20 * 500 / 2


@pytest.mark.engine("qwen3_moe")
def test_many_tasks_at_once(engine: AsyncVLLM) -> None:
    async def main() -> list[Any]:
        params = {"max_tokens": 3, "ignore_eos": True}
        return await asyncio.gather(*(engine.agenerate([65, 65 + i], params) for i in range(60)))

    completions = asyncio.run(main())
    assert [completion.prompt_token_ids.tolist() for completion in completions] == [[65, 65 + i] for i in range(60)]


@pytest.mark.engine("qwen3_moe")
@pytest.mark.parametrize("clear_cache", [False, True])
def test_pause_keep_freezes_requests_and_resume_finishes_them(engine: AsyncVLLM, clear_cache: bool) -> None:
    def attempt() -> bool:
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(generate, engine, [IDS] * 8, 200)
            time.sleep(0.2)
            engine.pause("keep", clear_cache=clear_cache)
            first = counts(engine)
            time.sleep(0.4)
            frozen = not call.done() and counts(engine) == first
            engine.resume()
            completions = call.result(60.0)
        for (output,) in (completion.outputs for completion in completions):
            assert (len(output.token_ids), output.finish_reason) == (200, "length")
            assert output.routed_experts.shape == (9 + 200 - 1, 4, 4)
        return frozen

    until_caught(attempt)


@pytest.mark.engine("qwen3_moe")
def test_pause_wait_lets_requests_finish_and_holds_new_ones(engine: AsyncVLLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(generate, engine, [IDS] * 8, 200)
        # what the engine does not have yet is held
        until(lambda: call.done() or engine.stats()[0]["running"] == 8)
        engine.pause("wait")
        try:
            completions = call.result(60.0)
        except TimeoutError:
            engine.resume()  # or the call would never end
            raise
        assert {completion.outputs[0].finish_reason for completion in completions} == {"length"}
    with pytest.raises(GenerationTimeout):
        generate(engine, IDS, timeout_seconds=0.3)
    engine.resume()
    assert len(generate(engine, IDS).outputs[0].token_ids) == 4


@pytest.mark.engine("qwen3_moe")
def test_pause_abort_cuts_requests_short(engine: AsyncVLLM) -> None:
    def attempt() -> bool:
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(generate, engine, [IDS] * 8, 400)
            time.sleep(0.2)
            engine.pause("abort")
            engine.resume()
            return all(completion.aborted for completion in call.result(60.0))

    until_caught(attempt)
    assert len(generate(engine, IDS).outputs[0].token_ids) == 4


@pytest.mark.engine("qwen3_moe")
def test_ctrl_c_while_generating_aborts_the_requests(engine: AsyncVLLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT])
    engine.pause()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(engine, [IDS, IDS], 400)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
        engine.resume()
    assert engine.get_num_unfinished_requests() == [0]
    until_idle(engine)


@pytest.mark.engine("qwen3_moe")
def test_stats_are_the_engines_own(engine: AsyncVLLM) -> None:
    until_idle(engine)
    assert engine.get_cache_usage() == [0.0]

    def attempt() -> bool:
        (before,) = engine.stats()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(generate, engine, [IDS] * 4, 150)
            time.sleep(0.2)
            engine.pause()
            during, usage = engine.to_pandas().iloc[0], engine.get_cache_usage(0)
            unfinished = engine.get_num_unfinished_requests()
            engine.resume()
            call.result(60.0)
        (after,) = engine.stats()
        assert {name: after[name] - before[name] for name in ("requests", "prompt_tokens", "generated_tokens")} == {
            "requests": 4,
            "prompt_tokens": 36,
            "generated_tokens": 600,
        }
        assert after["generation_seconds"] > before["generation_seconds"]
        assert (after["state"], after["version"], after["inflight"]) == ("SERVING", 0, 0)
        return during["running"] == 4 and isinstance(usage, float) and 0.0 < usage < 1.0 and unfinished == [4]

    until_caught(attempt)


@pytest.mark.engine("qwen3_moe")
def test_stats_are_pushed_while_requests_run_and_say_when_they_are_over(engine: AsyncVLLM) -> None:
    (entry,) = engine.replica_table
    before = engine.stats()[0]
    engine.reset_prefix_cache()
    prompt = list(range(40, 240))
    seen = []
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: [generate(engine, prompt, 150) for _ in range(2)])
        while not call.done():
            seen.append(entry.replica.last_stats)
            time.sleep(0.05)
        first, second = (completion.num_cached_tokens for completion in call.result())
    assert (first, second > 0) == (0, True)
    busy = [stats for stats in seen if stats is not None and stats.running == 1]
    assert busy  # nobody asked
    assert max(stats.tokens_per_second for stats in busy) > 0
    assert max(stats.cache_usage for stats in busy) > 0
    assert all(stats.waiting == 0 for stats in busy)
    until(lambda: entry.replica.last_stats.requests == before["requests"] + 2)
    until(lambda: entry.replica.last_stats.tokens_per_second == 0)
    last = entry.replica.last_stats
    assert (last.running, last.cache_usage) == (0, 0.0)
    assert last.cache_queries - before["cache_queries"] == 400
    assert last.cache_hits - before["cache_hits"] == second
    assert last.steps - before["steps"] >= 300
    assert abs(last.step_at - time.time()) < 60
    assert last.preemptions == before["preemptions"]


@pytest.mark.engine("qwen3_moe")
def test_times_of_a_request_are_in_order_and_within_the_callers_own(engine: AsyncVLLM) -> None:
    started = time.monotonic()
    completions = generate(engine, [[65 + i] * 20 for i in range(8)], 30)
    elapsed = time.monotonic() - started
    for completion in completions:
        times = completion.metrics
        assert 0 < times.queue_seconds < times.first_token_seconds < times.total_seconds < elapsed
        assert times.replica == 0
    completion = generate(engine, IDS, 1)  # its first token is its last
    assert completion.metrics.first_token_seconds == completion.metrics.total_seconds


@pytest.mark.engine("qwen3_moe")
def test_the_service_counts_what_the_engine_did(engine: AsyncVLLM) -> None:
    before = engine.metrics.summary()
    completions = generate(engine, [IDS, IDS], 5, params={"n": 2})
    after = engine.metrics.summary()
    moved = {name: after[name] - before.get(name, 0) for name in ("requests", "completed", "sequences")}
    assert moved == {"requests": 2, "completed": 2, "sequences": 4}
    assert after["generated_tokens"] - before["generated_tokens"] == 20
    seconds = sum(completion.metrics.total_seconds for completion in completions)
    assert after["generation_seconds"] - before["generation_seconds"] == pytest.approx(seconds)
    assert 0 < after["total_seconds_p50"] <= after["total_seconds_p99"]
    assert 'torchrl_moe_replica_steps_total{replica="0"}' in engine.prometheus()


@pytest.mark.engine("qwen3_moe")
def test_a_log_holds_no_line_for_a_request_and_no_bars(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    (path,) = engine.log_paths()
    assert path is not None
    before = path.read_text()
    engine.generate([IDS, IDS], {"max_tokens": 4}, use_tqdm=True, request_ids=["marked-1", "marked-2"])
    assert path.read_text() == before
    assert "shards" not in before
    assert "%" not in before


@pytest.mark.parity
@pytest.mark.parametrize(
    ("least", "most"),
    [
        pytest.param(
            1e-3, 1e-1, marks=pytest.mark.engine("qwen3_moe", dtype="bfloat16", enable_fp32_output=False), id="as it is"
        ),
        pytest.param(
            0.0, 1e-5, marks=pytest.mark.engine("qwen3_moe", dtype="bfloat16", enable_fp32_output=True), id="float32"
        ),
    ],
)
def test_a_float32_last_layer_rounds_no_logits(engine: AsyncVLLM, least: float, most: float) -> None:
    def error(saved: Any, model: Any) -> float:
        """How far the last layer's logits are from those in float32, for the same hidden states."""
        hidden = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        expected = hidden.float() @ model.lm_head.weight.float().T
        return (model.compute_logits(hidden).float() - expected[:, :259]).abs().max().item()

    assert least <= engine.validate_model_params(error)[0][0] < most
    assert len(generate(engine, IDS).outputs[0].token_ids) == 4


@pytest.mark.engine("qwen3_moe")
def test_workers_answer_by_name_one_list_for_each_replica(engine: AsyncVLLM) -> None:
    assert engine.get_tp_size() == 1
    assert engine.collective_rpc("torchrl_moe_router_layers") == [[[1, 2, 3]]]
    with pytest.raises(EngineError, match="no_such_method"):
        engine.collective_rpc("no_such_method")
    assert len(generate(engine, IDS).outputs[0].token_ids) == 4


@pytest.mark.engine("qwen3_moe")
def test_the_tokenizer_is_the_models(engine: AsyncVLLM) -> None:
    tokenizer = engine.get_tokenizer()
    assert tokenizer.encode("Hi, world") == IDS
    assert type(tokenizer).__module__.startswith("transformers.")


@pytest.mark.engine("qwen3_moe")
def test_a_bar_shows_on_a_terminal(
    engine: AsyncVLLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.generate([IDS, IDS], {"max_tokens": 2})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    engine.generate([IDS, IDS], {"max_tokens": 2})
    assert "2/2" in capsys.readouterr().err
    generate(engine, [IDS, IDS])
    assert capsys.readouterr().err == ""


@pytest.mark.engine("qwen3_moe")
def test_a_running_engine_says_what_it_is(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    title, replica = repr(engine).splitlines()
    assert title == f"AsyncVLLM({str(shelf.folder('qwen3_moe'))!r}, 1 replica)"
    assert replica.startswith("  #0 SERVING, v0, 0 in flight")
    (info,) = engine.infos
    assert (info.max_model_len, info.tensor_parallel_size) == (512, 1)
    assert info.engine_version.startswith("0.")
    with pytest.warns(UserWarning, match="already running"):
        engine.start()


# -- two real replicas ------------------------------------------------------------------------------------------------


def leaders(engine: AsyncVLLM) -> list[psutil.Process]:
    """The process of each replica."""
    return [psutil.Process(entry.replica._child.process.pid) for entry in engine.replica_table]


@pytest.mark.engine("qwen3_moe", num_replicas=2)
def test_each_replica_is_a_process_of_its_own_that_one_child_of_this_one_forked(engine: AsyncVLLM) -> None:
    one, two = leaders(engine)
    assert one.pid != two.pid
    assert one.ppid() == two.ppid()
    assert psutil.Process(one.ppid()).ppid() == os.getpid()
    assert len({os.getpgid(pid) for pid in (os.getpid(), one.ppid(), one.pid, two.pid)}) == 4  # Ctrl-C is the driver's


@pytest.mark.engine("qwen3_moe", num_replicas=2)
def test_requests_spread_over_both_and_come_back_in_order(engine: AsyncVLLM) -> None:
    prompts = [[65 + i] * (1 + i % 3) for i in range(30)]
    completions = generate(engine, prompts)
    assert [completion.prompt_token_ids.tolist() for completion in completions] == prompts
    assert Counter(completion.metrics.replica for completion in completions) == {0: 15, 1: 15}
    assert engine.get_num_unfinished_requests() == [0, 0]


@pytest.mark.engine("qwen3_moe", num_replicas=2)
def test_the_named_replica_answers_and_both_answer_alike(engine: AsyncVLLM) -> None:
    answers = [generate(engine, IDS, 8, actor_index=i, params={"temperature": 0.0}) for i in range(2)]
    assert [answer.metrics.replica for answer in answers] == [0, 1]
    one, two = (answer.outputs[0] for answer in answers)
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert np.array_equal(one.routed_experts, two.routed_experts)
    with pytest.raises(IndexError, match=r"actor index 2 out of range \[0, 2\)"):
        generate(engine, IDS, actor_index=2)


@pytest.mark.engine("qwen3_moe", num_replicas=2)
def test_threads_and_tasks_share_both_replicas(engine: AsyncVLLM) -> None:
    async def tasks() -> list[Any]:
        params = {"max_tokens": 4, "ignore_eos": True}
        return await asyncio.gather(*(engine.agenerate([65 + i], params) for i in range(20)))

    with ThreadPoolExecutor(5) as pool:
        calls = [pool.submit(generate, engine, [[97 + i]] * 8) for i in range(4)]
        asynchronous = pool.submit(lambda: asyncio.run(tasks()))
        for i, call in enumerate(calls):
            assert [completion.prompt_token_ids.tolist() for completion in call.result(60.0)] == [[97 + i]] * 8
        assert [c.prompt_token_ids.tolist() for c in asynchronous.result(60.0)] == [[65 + i] for i in range(20)]
    assert engine.collective_rpc("torchrl_moe_router_layers") == [[[1, 2, 3]], [[1, 2, 3]]]
    assert len(engine.get_cache_usage()) == 2


# -- starts that fail -------------------------------------------------------------------------------------------------


def processes_in(folder: Path) -> set[str]:
    """The names of the processes that work in a folder, but for this one and its fork server, which stays."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended
            stays = process.pid == os.getpid() or (process.ppid() == os.getpid() and "::Fo" in process.name())
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE and not stays:
                found.add(f"{process.pid} {process.name()}")
    return found


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Engine processes that start now are known by the folder they work in, whatever adopts them; none stays."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    until(lambda: processes_in(tmp_path) == set())


@pytest.mark.engine
def test_too_little_memory_is_one_error_in_vllms_words(no_engine: EngineShelf, marked: Path) -> None:
    with pytest.raises(ReplicaDiedError, match=r"(?s)replica 0 did not start: .*(KV cache|memory)") as caught:
        start_engine(no_engine.folder("qwen3_moe"), kv_cache_memory_bytes=1 << 10)
    assert "No available memory" in str(caught.value) or "larger than the available KV cache memory" in str(
        caught.value
    )


@pytest.mark.engine
def test_a_start_that_runs_out_of_time_names_the_variable(
    no_engine: EngineShelf, marked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "0.5")
    words = r"(?s)replica 0 was not ready within .* had 0\.5 s: .*TORCHRL_VLLM_TIMEOUT_SECONDS"
    with pytest.raises(EngineError, match=words) as caught:
        start_engine(no_engine.folder("qwen3_moe"))
    assert not isinstance(caught.value, ReplicaDiedError)


def has_loaded(process: str, library: str, driver: int) -> bool:
    """Whether one of :func:`processes_in`, but for the driver, has a library in its memory; "" is in that of each."""
    pid = int(process.split()[0])
    try:
        return pid != driver and any(library in area.path for area in psutil.Process(pid).memory_maps())
    except psutil.Error:
        return False


INTERRUPTED = """
    import signal, sys
    from torchrl_moe.modules import AsyncVLLM

    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = AsyncVLLM({"model": sys.argv[1], "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26})
    print("starting", flush=True)
    try:
        engine.start()
    except KeyboardInterrupt:
        print("interrupted", engine.replica_table[0].state.name, flush=True)
"""


@pytest.mark.engine
@pytest.mark.parametrize("loaded", ["", "libtorch_cpu"], ids=["at once", "while vLLM loads"])
def test_ctrl_c_while_an_engine_starts_leaves_no_process(no_engine: EngineShelf, marked: Path, loaded: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(no_engine.folder("qwen3_moe"))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "starting\n"
        until(lambda: [one for one in processes_in(marked) if has_loaded(one, loaded, driver.pid)])
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: the driver's group, not the engine's
        assert driver.communicate(timeout=60.0)[0] == "interrupted DEAD\n"
    assert driver.returncode == 0
