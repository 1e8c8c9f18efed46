"""What users may pass to a service, argument by argument: every value is taken with a meaning, or refused by its name.

Nothing is started, sent or loaded for what is refused, and everything else goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from support.values import VALUES
from torchrl_moe.modules import AsyncVLLM, LoadBalancer
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.backends.sampling_fields import FIELDS
from torchrl_moe.modules.serving import launch
from torchrl_moe.modules.serving.candidates import FaultPolicy
from torchrl_moe.modules.serving.strategies import KVCache, PowerOfTwo, PrefixAware, SessionAffinity, Settings
from torchrl_moe.testing import FakeAsyncVLLM

THROWN: list[Any] = [*VALUES, 2**70]
REFUSED = (ValueError, TypeError, IndexError)
CALL = ["prompt_token_ids", "resume", "use_tqdm", "lora_request", "prompt_adapter_request", "guided_options_request"]
CALL += ["timeout_seconds", "actor_index", "session_ids", "request_ids", "priority", "group_ids", "request_context"]
CALL += ["return_routed_experts", "routed_experts", "on_resume"]
SCORE = ["routed_experts", "temperature", "kept", "lora_request", "actor_index", "timeout_seconds", "use_tqdm"]


def shown(value: Any) -> str:
    return repr(value)[:12]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(2, forced_routing_unavailable_reason="fake") as made:
        yield made


def outcome(name: str, call: Callable[[], Any]) -> bool:
    """Whether a value was taken; what was refused was refused by its name."""
    try:
        call()
    except REFUSED as error:
        said = str(error).replace("actor index", "actor_index")
        assert name in said, f"{type(error).__name__}: {said}"
        return False
    return True


def taken(name: str, call: Callable[[Any], Any]) -> list[str]:
    return [shown(value) for value in THROWN if outcome(name, lambda value=value: call(value))]  # type: ignore[misc]


# Of those thrown, what has a meaning; nothing else has.
FLOATS, NONE, BOOL = ["1.5"], ["None"], ["True"]
LARGE = ["109951162777", "118059162071"]
SAMPLED = {
    **dict.fromkeys(FIELDS, NONE),
    **{key: [*FLOATS, "-1"] for key in ("presence_penalty", "frequency_penalty")},
    "repetition_penalty": FLOATS,
    "temperature": [*FLOATS, *LARGE],
    **{
        key: []
        for key in ("top_p", "min_p", "n", "min_tokens", "routed_experts_prompt_start", "output_text_buffer_length")
    },
    **{key: [*NONE, "-1"] for key in ("logprobs", "prompt_logprobs", "thinking_token_budget")},
    "top_k": ["-1"],
    "seed": [*NONE, "109951162777", "-1"],
    **dict.fromkeys(("ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens", "skip_clone"), BOOL),
    **dict.fromkeys(("spaces_between_special_tokens", "include_stop_str_in_output"), BOOL),
    **{key: [*NONE, *BOOL] for key in ("watermarking", "skip_reading_prefix_cache")},
    "stop": [*NONE, "'3'", "[]"],
    **{key: [*NONE, "[]"] for key in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "bad_words")},
    "trace_decode_token_ids": [*NONE, "[]"],
    **{key: [*NONE, "{}"] for key in ("logit_bias", "extra_args", "structured_outputs", "repetition_detection")},
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_sampling_parameter(engine: FakeAsyncVLLM, field: str) -> None:
    sent = sum(len(replica.submitted) for replica in engine.replicas)
    found = taken(field, lambda value: engine.generate([1, 2], {field: value}, use_tqdm=False))
    assert found == SAMPLED[field]
    assert sum(len(replica.submitted) for replica in engine.replicas) == sent + len(found)


@pytest.mark.parametrize("value", [*THROWN, object()], ids=shown)
def test_sampling_parameters_as_a_whole(engine: FakeAsyncVLLM, value: Any) -> None:
    is_taken = outcome("sampling_params", lambda: engine.generate([1, 2], value, use_tqdm=False))
    assert is_taken == (value in (None, {}))
    assert is_taken == outcome("sampling_params", lambda: FakeAsyncVLLM(sampling_params=value).shutdown())


@pytest.mark.parametrize("name", CALL)
def test_an_argument_of_generate(engine: FakeAsyncVLLM, name: str) -> None:
    def call(value: Any) -> None:
        prompts = None if name in ("prompt_token_ids", "resume") and value is not None else [1, 2]
        given = {"use_tqdm": False, name: value}
        engine.generate(prompts, {"max_tokens": 2}, **given)
        one = {"session_ids": "session_id", "request_ids": "request_id", "group_ids": "group_id"}.get(name, name)
        if name not in ("use_tqdm", "prompt_adapter_request"):
            asyncio.run(engine.agenerate(prompts, {"max_tokens": 2}, **{one: value}))

    expected = {
        **{key: [*NONE, "'3'", LARGE[0], "-1", LARGE[1]] for key in ("session_ids", "group_ids")},
        "use_tqdm": BOOL,
        "return_routed_experts": BOOL,
        "request_ids": [*NONE, "'3'"],
        "priority": ["-1"],
        "timeout_seconds": [*NONE, "inf", *FLOATS, *LARGE],
        **{key: [*NONE, "{}"] for key in ("lora_request", "guided_options_request", "request_context")},
    }
    assert taken(name, call) == expected.get(name, NONE)


@pytest.mark.parametrize("name", SCORE)
def test_an_argument_of_score(engine: FakeAsyncVLLM, name: str) -> None:
    expected = {
        "temperature": [*FLOATS, *LARGE],
        "use_tqdm": BOOL,
        "timeout_seconds": [*NONE, "inf", *FLOATS, *LARGE],
        "lora_request": [*NONE, "{}"],
    }
    found = taken(name, lambda value: engine.score([1, 2], **{name: value}))
    assert found == expected.get(name, NONE)


@pytest.mark.parametrize("value", THROWN, ids=shown)
def test_prompts(engine: FakeAsyncVLLM, value: Any) -> None:
    asked = {"prompts": value} if value is not None else {}
    is_taken = outcome("prompt", lambda: engine.generate(**asked, use_tqdm=False))
    assert is_taken == (value == "3")


@pytest.mark.parametrize("ids", [[1, True], [True, 1], [[1, 2], [3, False]]], ids=str)
def test_a_bool_is_no_token(engine: FakeAsyncVLLM, ids: Any) -> None:
    with pytest.raises(TypeError, match=r"integer token ids, got (True|False) at [01]"):
        engine.generate(ids, use_tqdm=False)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda output: {"token_ids": output.token_ids * 0 + 2**40}, "answer 0 holds the token id 1099511627776"),
        (lambda output: {"token_ids": output.token_ids * 0 - 1}, "answer 0 holds the negative token id -1"),
        (lambda output: {"finish_reason": None}, "answer 0: finish_reason must be one of abort, length, .*got None"),
        (lambda output: {"routed_experts": output.routed_experts * 0}, "layer . holds .* all zeros"),
        (lambda output: {"routed_experts": output.routed_experts * 0 + 3}, "layer . holds expert 3 twice"),
    ],
)
def test_what_is_resumed_is_checked_like_a_prompt(engine: FakeAsyncVLLM, edit: Any, words: str) -> None:
    params = {"max_tokens": 8, "logprobs": 0}
    whole = engine.generate([1, 2], params, use_tqdm=False)
    assert isinstance(whole, Completion)
    (output,) = whole.outputs
    cut = replace(
        output,
        finish_reason="abort",
        token_ids=output.token_ids[:3],
        logprobs=output.logprobs[:3],
        policy_versions=output.policy_versions[:3],
        routed_experts=output.routed_experts[:4],
    )
    engine.generate(resume=replace(whole, outputs=[cut]), sampling_params=params, use_tqdm=False)
    with pytest.raises(ValueError, match=rf"resume\[0\], {'.*' if 'layer' in words else ''}{words}"):
        engine.generate(
            resume=replace(whole, outputs=[replace(cut, **edit(cut))]), sampling_params=params, use_tqdm=False
        )


def test_more_answers_than_a_call_may_ask_for_are_refused_before_any_is_made(engine: FakeAsyncVLLM) -> None:
    with pytest.raises(ValueError, match="n must be an integer from 1 to 16384, got 1099511627776"):
        engine.generate([1], {"n": 2**40}, use_tqdm=False)
    with pytest.raises(ValueError, match=r"n=16384 for 65 prompts makes 1064960 answers, .* at most 1048576"):
        engine.generate([[1]] * 65, {"n": 16384}, use_tqdm=False)
    with pytest.raises(ValueError, match=r"max_tokens=2097152 is more than the engine's max_model_len=1048576"):
        engine.generate([1], {"max_tokens": 1 << 21}, use_tqdm=False)


def test_a_fault_policy() -> None:
    for field in fields(FaultPolicy):
        whole = field.name in ("attempts", "max_restarts", "breaker_failures", "breaker_trials")
        seconds = ["inf", *FLOATS, *LARGE]
        expected = BOOL if field.name == "restart" else seconds[2:] if whole else seconds
        assert taken(field.name, lambda value, name=field.name: FaultPolicy(**{name: value})) == expected


OF_STRATEGIES: list[tuple[Callable[..., Any], str, list[str]]] = [
    *((make, "prefix_length", [*NONE, *LARGE]) for make in (Settings, PrefixAware)),
    *((make, "overload_threshold", ["inf", *FLOATS, *LARGE]) for make in (Settings, PrefixAware, SessionAffinity)),
    *((SessionAffinity, name, ["inf", *FLOATS, *LARGE]) for name in ("margin", "idle_seconds")),
    (KVCache, "max_age", ["inf", *FLOATS, *LARGE]),
    *((make, "clock", []) for make in (Settings, KVCache, SessionAffinity)),
    *((make, "rng", NONE) for make in (Settings, PowerOfTwo)),
    (PrefixAware, "index", NONE),
]


@pytest.mark.parametrize(("make", "name", "expected"), OF_STRATEGIES)
def test_an_argument_of_a_strategy(make: Callable[..., Any], name: str, expected: list[str]) -> None:
    assert taken(name, lambda value: make(**{name: value})) == expected


@pytest.mark.parametrize("name", ["strategy", "prefix_length", "overload_threshold", "clock", "rng"])
def test_an_argument_of_the_balancer(name: str) -> None:
    expected = {
        "strategy": NONE,
        "prefix_length": [*NONE, *LARGE],
        "overload_threshold": ["inf", *FLOATS, *LARGE],
        "rng": NONE,
    }
    found = taken(name, lambda value: LoadBalancer(["a"], **{name: value}).acquire([1, 2]))
    assert found == expected.get(name, [])
    assert LoadBalancer(["a"], rng=random.Random(0)).acquire().index == 0


SERVICE = {
    "num_replicas": [],
    "enable_prefix_caching": [*NONE, *BOOL],
    "engine": [],
    "backend": [],
    "sampling_params": [*NONE, "{}"],
    "verbose": BOOL,
    "max_concurrent_requests": [*NONE, *LARGE],
    "faults": NONE,
    "metrics": BOOL,
    "log_folder": [*NONE, "'3'"],
    "name": NONE,
    "namespace": NONE,
    "resources": NONE,
    "devices": NONE,
    "actor_class": NONE,
}
"""By default; what else ``backend="ray"`` takes is refused here by name."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Services that would have been started."""
    made: list[Any] = []
    monkeypatch.setattr(AsyncVLLM, "start", lambda self, *_: made.append(self) or self)
    monkeypatch.setattr(launch, "_checked", lambda path: path)
    return made


@pytest.mark.parametrize("name", SERVICE)
def test_an_argument_of_a_service(started: list[Any], name: str) -> None:
    assert SERVICE.keys() <= inspect.signature(AsyncVLLM).parameters.keys()
    assert taken(name, lambda value: AsyncVLLM({"model": "m"}, **{name: value})) == SERVICE[name]
    if name not in ("enable_prefix_caching", "actor_class"):
        assert taken(name, lambda value: AsyncVLLM.from_pretrained("m", **{name: value})) == SERVICE[name]
        assert len(started) == len(SERVICE[name])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("num_devices", NONE),
        ("tensor_parallel_size", NONE),
        ("pipeline_parallel_size", NONE),
        ("data_parallel_size", NONE),
        ("compile", BOOL),
        ("enable_fp32_output", BOOL),
        ("verbose", BOOL),
    ],
)
def test_an_argument_of_from_pretrained(started: list[Any], name: str, expected: list[str]) -> None:
    assert taken(name, lambda value: AsyncVLLM.from_pretrained("m", **{name: value})) == expected
    assert len(started) == len(expected)


COMMANDS: list[tuple[str, str, list[str]]] = [
    ("add_replicas", "count", []),
    ("add_replicas", "timeout_seconds", [*NONE, "1.5"]),
    ("remove_replica", "index", []),
    ("pause", "mode", []),
    ("pause", "clear_cache", BOOL),
    ("pause", "timeout_seconds", FLOATS),
    ("sleep", "level", []),
    ("sleep", "mode", []),
    ("wake_up", "tags", NONE),
    ("set_seed", "seed", []),
    ("stats", "timeout_seconds", FLOATS),
    ("get_num_unfinished_requests", "actor_index", NONE),
    ("get_cache_usage", "actor_index", NONE),
    ("update_weights", "weights", ["[]", "{}"]),
]


@pytest.mark.filterwarnings("ignore:update_weights. no weights were given")
@pytest.mark.parametrize(("command", "name", "expected"), COMMANDS)
def test_an_argument_of_a_command(command: str, name: str, expected: list[str]) -> None:
    with FakeAsyncVLLM(2) as engine:
        assert taken(name, lambda value: getattr(engine, command)(**{name: value})) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("min_version", ["-1"]), ("session_id", ["'3'"]), ("group_id", ["'3'"])]
)
def test_what_is_asked_of_the_balancer(name: str, expected: list[str]) -> None:
    balancer = LoadBalancer(["a"])
    found = [one for one in THROWN if name != "min_version" or type(one) is not int or one < 0]
    assert [shown(v) for v in found if outcome(name, lambda v=v: balancer.acquire(**{name: v}))] == [*NONE, *expected]
