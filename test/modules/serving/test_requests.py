"""What users may pass, argument by argument: prompts, requests, routes, scores, completions to resume."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import lazy_stack

from support.completions import cut
from support.values import VALUES
from torchrl_moe.data import KeptTokens, RoutedExperts
from torchrl_moe.errors import EngineError, RouteValueError
from torchrl_moe.modules import AsyncVLLM, LoadBalancer
from torchrl_moe.modules.backends.replica import Completion, KeptIds, Request, Scoring
from torchrl_moe.modules.backends.sampling_fields import FIELDS
from torchrl_moe.modules.serving.replica_table import FaultPolicy
from torchrl_moe.modules.serving.requests import (
    Placement,
    PromptBatch,
    SamplingParameters,
    check_resume,
    integers,
    make_request,
    normalise_prompts,
    placements,
    request_ids_each,
    rows_each,
    scores_of,
    scorings,
    whole,
)
from torchrl_moe.modules.serving.strategies import KVCache, PowerOfTwo, PrefixAware, SessionAffinity, Settings
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import LAYOUT, FakeReplica

THROWN: list[Any] = [*VALUES, 2**70]
REFUSED = (ValueError, TypeError, IndexError)
CALL = ["prompt_token_ids", "resume", "use_tqdm", "lora_request", "prompt_adapter_request", "guided_options_request"]
CALL += ["timeout_seconds", "actor_index", "session_ids", "request_ids", "priority", "group_ids", "request_context"]
CALL += ["return_routed_experts", "routed_experts", "on_resume"]


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
COUNT, POSITIVE = [*NONE, *LARGE], ["inf", *FLOATS, *LARGE]
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
        "timeout_seconds": [*NONE, *POSITIVE],
        **{key: [*NONE, "{}"] for key in ("lora_request", "guided_options_request", "request_context")},
    }
    assert taken(name, call) == expected.get(name, NONE)


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        **dict.fromkeys(("routed_experts", "kept", "actor_index"), NONE),
        "temperature": [*FLOATS, *LARGE],
        "use_tqdm": BOOL,
        "timeout_seconds": [*NONE, *POSITIVE],
        "lora_request": [*NONE, "{}"],
    }.items(),
)
def test_an_argument_of_score(engine: FakeAsyncVLLM, name: str, expected: list[str]) -> None:
    assert taken(name, lambda value: engine.score([1, 2], **{name: value})) == expected


@pytest.mark.parametrize("value", THROWN, ids=shown)
def test_prompts(engine: FakeAsyncVLLM, value: Any) -> None:
    asked = {"prompts": value} if value is not None else {}
    is_taken = outcome("prompt", lambda: engine.generate(**asked, use_tqdm=False))
    assert is_taken == (value == "3")


def test_more_answers_than_a_call_may_ask_for_are_refused_before_any_is_made(engine: FakeAsyncVLLM) -> None:
    with pytest.raises(ValueError, match="n must be an integer from 1 to 16384, got 1099511627776"):
        engine.generate([1], {"n": 2**40}, use_tqdm=False)
    with pytest.raises(ValueError, match=r"n=16384 for 65 prompts makes 1064960 answers, .* at most 1048576"):
        engine.generate([[1]] * 65, {"n": 16384}, use_tqdm=False)
    with pytest.raises(ValueError, match=r"max_tokens=2097152 is more than the engine's max_model_len=1048576"):
        engine.generate([1], {"max_tokens": 1 << 21}, use_tqdm=False)


def balanced(**kwargs: Any) -> None:
    LoadBalancer(["a"], **kwargs).acquire([1, 2])


def acquired(**kwargs: Any) -> None:
    balancer = LoadBalancer(["a"])
    balancer.replica_table.set_version(0, 2**70)
    balancer.acquire(**kwargs)


WHOLE = ("attempts", "max_restarts", "breaker_failures", "breaker_trials")
OTHERS: dict[Callable[..., Any], dict[str, list[str]]] = {
    FaultPolicy: {
        field.name: BOOL if field.name == "restart" else LARGE if field.name in WHOLE else POSITIVE
        for field in fields(FaultPolicy)
    },
    Settings: {"prefix_length": COUNT, "overload_threshold": POSITIVE, "clock": [], "rng": NONE},
    PrefixAware: {"prefix_length": COUNT, "overload_threshold": POSITIVE, "index": NONE},
    SessionAffinity: {"overload_threshold": POSITIVE, "margin": POSITIVE, "idle_seconds": POSITIVE, "clock": []},
    KVCache: {"max_age": POSITIVE, "clock": []},
    PowerOfTwo: {"rng": NONE},
    balanced: {"strategy": NONE, "prefix_length": COUNT, "overload_threshold": POSITIVE, "clock": [], "rng": NONE},
    acquired: {
        "session_id": [*NONE, "'3'"],
        "group_id": [*NONE, "'3'"],
        "min_version": [*NONE, LARGE[0], "-1", LARGE[1]],
    },
}


@pytest.mark.parametrize(("make", "name"), [(make, name) for make, names in OTHERS.items() for name in names])
def test_an_argument_of_a_policy_a_strategy_or_a_balancer(make: Callable[..., Any], name: str) -> None:
    assert taken(name, lambda value: make(**{name: value})) == OTHERS[make][name]


SERVICE = {
    "num_replicas": [],
    "enable_prefix_caching": [*NONE, *BOOL],
    "engine": [],
    "backend": [],
    "sampling_params": [*NONE, "{}"],
    "verbose": BOOL,
    "max_concurrent_requests": COUNT,
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
PRETRAINED = {
    **dict.fromkeys(("num_devices", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), NONE),
    **dict.fromkeys(("compile", "enable_fp32_output", "verbose"), BOOL),
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Services that would have been started."""
    made: list[Any] = []
    monkeypatch.setattr(AsyncVLLM, "start", lambda self, *_: made.append(self) or self)
    return made


@pytest.mark.parametrize("name", SERVICE | PRETRAINED)
def test_an_argument_of_a_service(started: list[Any], name: str) -> None:
    assert SERVICE.keys() <= inspect.signature(AsyncVLLM).parameters.keys()
    expected = (SERVICE | PRETRAINED)[name]
    if name in SERVICE:
        assert taken(name, lambda value: AsyncVLLM({"model": "m"}, **{name: value})) == expected
    if name not in ("enable_prefix_caching", "actor_class"):
        assert taken(name, lambda value: AsyncVLLM.from_pretrained("m", **{name: value})) == expected
        assert len(started) == len(expected)


def test_what_limits_the_requests_of_a_service(started: list[AsyncVLLM]) -> None:
    limits = {"max_concurrent_requests": 7}
    made = [AsyncVLLM({"model": "m"}, 2, **limits), AsyncVLLM.from_pretrained("m", num_replicas=2, **limits)]
    assert [service.admission.limit for service in made] == [7, 7]
    assert AsyncVLLM({"model": "m"}, 2, max_concurrent_requests=None).admission.limit is None


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


# -- prompts -----------------------------------------------------------------------------------------------------------


def plain(prompts: Any = None, prompt_token_ids: Any = None) -> Any:
    """One prompt as it is, many as a list; token ids as lists."""
    batch = normalise_prompts(prompts, prompt_token_ids)
    for prompt in batch.prompts:
        assert isinstance(prompt, str) or (isinstance(prompt, np.ndarray) and prompt.dtype == np.int32)
    listed = [prompt if isinstance(prompt, str) else prompt.tolist() for prompt in batch.prompts]
    return listed[0] if batch.single else listed


A, AB = torch.tensor([1, 2]), torch.tensor([[1, 2], [3, 4]])
PROMPTS: list[tuple[Any, list[Any]]] = [
    ("hi", ["hi", {"prompt": "hi"}, {"prompt_token_ids": None, "prompt": "hi"}]),
    ([1, 2], [[1, 2], (1, 2), [np.int64(1), np.int64(2)], A.numpy(), np.array([1, 2], np.uint8), A, A.to(torch.int32)]),
    ([1, 2], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": A}, {"prompt_token_ids": [1, 2], "prompt": "hi"}]),
    ([7], [[7], np.array([7])]),
    ([0, 1, 2], [range(3)]),
    ([2**31 - 1], [[2**31 - 1]]),
    (["a"], [["a"], [{"prompt": "a"}]]),  # many, of which there is one
    ([[1, 2]], [[[1, 2]], torch.tensor([[1, 2]])]),
    (["a", "b"], [["a", "b"]]),
    ([[1, 2], [3]], [[[1, 2], [3]], ((1, 2), (3,)), [A.numpy(), np.array([3])], [A, torch.tensor([3])]]),
    ([[1, 2], [3, 4]], [AB, AB.numpy()]),
    (["a", [1, 2], "b"], [["a", [1, 2], {"prompt": "b"}], ["a", {"prompt_token_ids": [1, 2]}, "b"]]),
]


@pytest.mark.parametrize(("expected", "given"), [(expected, one) for expected, given in PROMPTS for one in given])
def test_one_prompt_or_many_in_their_order(expected: Any, given: Any) -> None:
    assert plain(given) == expected


def test_token_ids_may_come_under_their_own_name() -> None:
    for given, expected in (([1, 2], [1, 2]), ([[1, 2], [3]], [[1, 2], [3]]), (AB, [[1, 2], [3, 4]])):
        assert plain(prompt_token_ids=given) == expected


EMPTY, FLAT, TEXT = "is an empty prompt", "must be a flat list of integer token ids", "must be text or token ids, got"
NO_PROMPTS: list[tuple[type[Exception], str, list[Any]]] = [
    (ValueError, f"^prompts {EMPTY}", ["", np.array([], int), torch.tensor([], dtype=torch.long)]),
    (ValueError, rf"^prompts\[1\] {EMPTY}", [["a", ""], [[1], []]]),
    (ValueError, rf"^prompts\[0\] {EMPTY}", [torch.zeros((2, 0), dtype=torch.long)]),
    (ValueError, rf"^prompts\['prompt'\] {EMPTY}", [{"prompt": ""}]),
    (ValueError, rf"^prompts\[0\]\['prompt_token_ids'\] {EMPTY}", [[{"prompt_token_ids": []}]]),
    (TypeError, r"^prompts has neither 'prompt_token_ids' nor 'prompt'; its keys are \['text'\]", [{"text": "hi"}]),
    (
        ValueError,
        r"^prompts\[1\] holds the negative token id -1",
        [[[1], [4, -1]], torch.tensor([[1], [-1]]), np.array([[1, 2], [3, -1]])],
    ),
    (
        ValueError,
        r"^prompts holds the token id \d+; the largest",
        [[1, 2**31], A + 2**40, np.array([2**31], np.uint32)],
    ),
    (TypeError, f"^prompts {FLAT}", [[1, 2.5], [1, "a"], [1, [2]], [1, 2**70], b"hi"]),
    (TypeError, f"^prompts {FLAT}", [np.array([1.0]), A.float(), A.bfloat16(), A.bool()]),
    (TypeError, rf"^prompts\[0\] {FLAT}", [[[1, [2]]], [[[1]]], np.zeros((2, 2, 2), int), [A[0], A[1]]]),
    (TypeError, r"^prompts must .* integer token ids, got True at 0", [[True, False], [True, 1]]),
    (TypeError, r"^prompts\[1\] must .* integer token ids, got False at 1", [[[1, 2], [3, False]]]),
    (TypeError, r"^prompts must be text, token ids or a list of them, got \w+$", [3, 2.5, object(), {1, 2}, iter([1])]),
    (TypeError, r"^prompts must be text, token ids or a list of them, got \w+$", [np.array(3), torch.tensor(3)]),
    (TypeError, rf"^prompts\[0\] {TEXT} (float|NoneType)$", [[1.0, 2.0], [None]]),
    (TypeError, rf"^prompts\[1\] {TEXT} int$", [["a", 1]]),
]


@pytest.mark.parametrize(
    ("given", "error", "words"), [(given, error, words) for error, words, row in NO_PROMPTS for given in row]
)
def test_what_is_no_prompt_is_refused_by_its_place(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        normalise_prompts(given)


@pytest.mark.parametrize("name", ["prompts", "prompt_token_ids"])
def test_prompts_come_one_way_and_there_is_at_least_one(name: str) -> None:
    for empty in ([], (), np.zeros((0, 3), int), torch.zeros((0, 3), dtype=torch.long)):
        with pytest.raises(ValueError, match=f"^{name} cannot be empty"):
            normalise_prompts(**{name: empty})
    with pytest.raises(ValueError, match="must specify either prompts or prompt_token_ids"):
        normalise_prompts()
    for given in ("hi", "", []):
        with pytest.raises(ValueError, match="cannot specify both prompts and prompt_token_ids"):
            normalise_prompts(given, [1])
    with pytest.raises(ValueError, match=f"cannot specify both {name} and resume"):
        normalise_prompts(**{name: [1], "resume": answer()})


# -- completions to resume --------------------------------------------------------------------------------------------


PARAMS = {"max_tokens": 8, "logprobs": 0, "n": 2}


def answer(prompt: Any = "hi") -> Completion:
    """Two answers of eight tokens."""
    ids = None if isinstance(prompt, str) else np.array(prompt, np.int32)
    text = prompt if ids is None else None
    asked = Request(request_id="r", sampling_params=PARAMS, prompt=text, prompt_token_ids=ids)
    return FakeReplica().submit([asked])[0].result()


def changed(completion: Completion, **fields: Any) -> Completion:
    first, second = completion.outputs
    return replace(completion, outputs=[replace(first, **fields), second])


def resuming(completion: Completion, **fields: Any) -> Request:
    return make_request(completion, Request(**{"request_id": "new", "sampling_params": PARAMS, **fields}))


def test_a_request_has_the_prompts_ids_and_what_there_is() -> None:
    partial = cut(answer(), 3, None)
    request = resuming(partial, priority=4)
    assert request.resume is partial
    assert (request.request_id, request.prompt, request.priority) == ("new", None, 4)
    assert request.prompt_token_ids is not None
    assert (request.prompt_token_ids.tolist(), request.prompt_token_ids.dtype) == ([104, 105], np.int32)
    assert whole(request) is None
    without = changed(partial, routed_experts=None)  # routes that are not asked for may be missing
    check_resume(resuming(without, return_routed_experts=False), 0, LAYOUT)
    check_resume(resuming(without), 0, None)
    check_resume(resuming(without), 0, LAYOUT)  # as of a stream whose replica died: the engine reads its tokens again
    with pytest.raises(ValueError, match="it has no routes"):
        check_resume(resuming(without, on_resume="forced"), 0, LAYOUT)
    for prompt in ("hi", [104, 105]):  # what had no token begins with its own prompt
        begun = resuming(cut(answer(prompt), 0, 0))
        assert (begun.resume, whole(begun), begun.prompt) == (None, None, prompt if prompt == "hi" else None)
        assert (begun.prompt_token_ids is None) is (prompt == "hi")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_ids": np.full(3, 2**40)}, "holds the token id 1099511627776"),
        ({"token_ids": np.full(3, -1)}, "holds the negative token id -1"),
        ({"finish_reason": None}, "finish_reason must be one of abort, length, .*got None"),
        ({"text": None}, r"Expected `str`, got `null` - at `\$\.outputs\[0\]\.text`"),
        ({"logprobs": [-0.5]}, r"at `\$\.outputs\[0\]\.logprobs`"),
        ({"resume": None}, r"at `\$\.outputs\[0\]\.resume`"),
        ({"policy_versions": np.zeros(2, np.int32)}, "2 prompt tokens, 3 tokens, lengths .*'policy_versions': 2"),
        ({"logprobs": np.zeros(4, np.float32)}, "2 prompt tokens, 3 tokens, lengths .*'logprobs': 4"),
        (
            {"kept": KeptIds(np.zeros(1, np.int32), np.array([1, 0], np.int32))},
            "2 prompt tokens, 3 tokens, lengths .*'kept': 2",
        ),
        (
            {"kept": KeptIds(np.zeros(2, np.int32), np.array([1, 0, -2], np.int32))},
            "it has 2 kept ids, and their sizes say 3",
        ),
        ({"logprobs": None}, "it has no log-probs, which sampling_params ask for"),
        ({"routed_experts": np.zeros((4, 5, 2), np.uint8)}, r"shape \[4, 5, 2\], but this engine gives \[4, 4, 2\]"),
        ({"routed_experts": np.zeros((5, 4, 2), np.uint8)}, r"shape \[5, 4, 2\], but this engine gives \[4, 4, 2\]"),
        ({"routed_experts": np.full((4, 4, 2), 200, np.uint8)}, r"200\.\.200 of uint8, .* has experts 0\.\.7"),
        ({"routed_experts": np.full((4, 4, 2), -1, np.int8)}, r"its routes are -1\.\.-1 of int8"),
        ({"routed_experts": np.zeros((4, 4, 2), np.float32)}, r"its routes are 0\.0\.\.0\.0 of float32"),
        ({"routed_experts": np.zeros((4, 4, 2), np.uint8)}, "layer . holds .* all zeros"),
        ({"routed_experts": np.full((4, 4, 2), 3, np.uint8)}, "layer . holds expert 3 twice"),
    ],
)
def test_what_is_no_part_of_an_answer_is_not_resumed(engine: FakeAsyncVLLM, fields: dict[str, Any], words: str) -> None:
    partial = cut(answer(), 3, None)
    engine.generate(resume=partial, sampling_params=PARAMS, use_tqdm=False)
    place = r"^resume\[1\]: .*" if "`" in words else r"^resume\[1\], answer 0[: ].*"
    with pytest.raises(ValueError, match=place + words):
        engine.generate(resume=[partial, changed(partial, **fields)], sampling_params=PARAMS, use_tqdm=False)


def test_other_completions_that_no_engine_gave_are_not_resumed(engine: FakeAsyncVLLM) -> None:
    one, odd = answer(), iter([])
    nothing: Any = None
    for given, error, words in (
        ("hi", TypeError, "resume must be a Completion or a list of them, .*got str"),
        ([object()], TypeError, "got a list with object at 0"),
        ({}, TypeError, "got dict"),
        (odd, TypeError, "got list_iterator"),
        ([], ValueError, "resume cannot be empty"),
        ([one, replace(one, outputs=[])], ValueError, r"resume\[1\] has no answer"),
        (
            [one, replace(one, prompt=None, prompt_token_ids=np.empty(0, np.int64))],
            ValueError,
            r"resume\[1\] has no prompt",
        ),
        (replace(one, num_cached_tokens=nothing), ValueError, r"resume\[0\]: .* at `\$\.num_cached_tokens`"),
        (
            replace(one, metrics=replace(one.metrics, queue_seconds=nothing)),
            ValueError,
            r"resume\[0\]: .* at `\$\.metrics\.queue_seconds`",
        ),
    ):
        with pytest.raises(error, match=words):
            normalise_prompts(resume=given)
    for params in ({"n": 3}, {}, {"n": 1}):
        words = rf"resume\[1\] has 2 answers, but sampling_params ask for n={params.get('n', 1)}"
        with pytest.raises(ValueError, match=words):
            engine.generate(resume=[one, cut(one, 3, None)], sampling_params=params, use_tqdm=False)


# -- placements and routes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [torch.tensor([3, -4]), np.array([3, -4], np.int8), [3, -4], (3, np.int16(-4))])
def test_numbers_come_in_whatever_holds_them_and_those_of_groups_are_names(values: Any) -> None:
    assert placements(2, group_ids=values) == [Placement(group_id="3"), Placement(group_id="-4")]
    assert integers(values, 2, "priority") == [3, -4]
    assert [where.min_version for where in placements(2, min_version=values)] == [3, -4]
    assert [where.group_id for where in placements(3, group_ids=[values[0], "3", None])] == ["3", "3", None]


@pytest.mark.parametrize("value", [5, np.int64(5), torch.tensor(5)])
def test_one_value_is_for_all_prompts(value: Any) -> None:
    assert integers(value, 3, "priority") == [5, 5, 5]
    expected = Placement(min_version=5, request_context={"k": 1}, actor_index=1)
    assert placements(2, min_version=value, request_context={"k": 1}, actor_index=1) == [expected] * 2


@pytest.mark.parametrize("name", ["session_ids", "group_ids", "min_version", "request_context"])
def test_a_list_has_one_entry_per_prompt(name: str) -> None:
    for values in ([None], [None] * 3):
        words = f"{name} must have one entry per prompt: got {len(values)} for 2"
        with pytest.raises(ValueError, match=words):
            placements(2, **{name: values})
    for names, words in ((["s"], "have one entry per prompt"), (["s", "s"], "differ from each other")):
        with pytest.raises(ValueError, match=f"request_ids must {words}"):
            request_ids_each(names, 2)


IDS = np.array([1, 2, 3], np.int32)
ONE, TWO = PromptBatch([IDS], single=True), PromptBatch([IDS, IDS], single=False)
ROWS = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
"""Two rows of a model of three layers."""


def held(rows: Any) -> list[Any]:
    """Rows in whatever holds them."""
    tensor = torch.from_numpy(rows)
    return [rows, tensor, RoutedExperts(full=tensor, batch_size=rows.shape[:-3])]


HELD = held(ROWS)[2]


def test_routes_come_in_whatever_holds_them_and_beside_what_is_resumed() -> None:
    for value in (*held(ROWS), ROWS.astype(">i4")):
        (rows,) = rows_each(value, ONE)
        assert isinstance(rows, np.ndarray)
        assert (rows.dtype.isnative, rows.tolist()) == (True, ROWS.tolist())
    both, more = np.stack([ROWS, ROWS + 1]), held(ROWS + 1)
    several = [[ROWS, ROWS + 1], (held(ROWS)[1], more[2]), *held(both), lazy_stack([held(ROWS)[2], more[2]])]
    for values in several:
        assert [rows.tolist() for rows in rows_each(values, TWO) if rows is not None] == both.tolist()
    # an answer that has no token yet begins again, and nobody else remembers what it was to follow
    had = completion(IDS.astype(np.int64))
    assert rows_each(None, PromptBatch([had], single=True)) == [None]
    first, second = rows_each([None, ROWS], PromptBatch([had, had], single=False))
    assert first is None
    assert second is not None and (second == ROWS).all()


NO_ARRAYS: list[Any] = ["experts", object(), np.array(["a"]), b"abc", 1.5, True, torch.zeros(2, 4, 2).bfloat16()]
NO_ARRAYS += [torch.zeros(2, 4, 2, dtype=torch.int8, device="meta")]
MASKED, ENDLESS = np.ma.masked_array(ROWS, mask=np.ones_like(ROWS, bool)), np.broadcast_to(ROWS[:1], (2**40, 3, 2))
NO_ROUTES: list[tuple[Any, PromptBatch, type[Exception], str]] = [
    *((value, ONE, RouteValueError, r"\[0\] must be an array of integers") for value in NO_ARRAYS),
    *(([None, value], TWO, RouteValueError, r"\[1\] must be an array of integers") for value in NO_ARRAYS),
    (MASKED, ONE, RouteValueError, r"\[0\] has masked entries"),
    (ENDLESS, ONE, RouteValueError, r"\[0\] has \d+ bytes, 2147483648 at most"),
    *((rows, TWO, ValueError, "one entry per prompt: got 1 for 2 prompts") for rows in ([ROWS], ROWS[None])),
    *((rows, TWO, ValueError, f"got {len(rows)} for 2 prompts") for rows in ([ROWS] * 3, [])),
    *((rows, TWO, TypeError, "a list with an entry per prompt") for rows in ("experts", 3, {"full": ROWS}, HELD)),
]


@pytest.mark.parametrize(("values", "batch", "error", "words"), NO_ROUTES)
def test_what_are_no_routes_is_named(values: Any, batch: PromptBatch, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"routed_experts.*{words}"):
        rows_each(values, batch)


def completion(ids: Any, **fields: Any) -> Completion:
    return Completion(request_id="r", prompt=None, prompt_token_ids=ids, num_cached_tokens=0, outputs=[], **fields)


GIVEN_PARAMS = {"max_tokens": 8, "temperature": 0.7}


def test_it_is_the_mapping_that_was_given_with_vllms_defaults_as_attributes_and_does_not_change() -> None:
    given = dict(GIVEN_PARAMS)
    params = SamplingParameters(given)
    given["max_tokens"] = 9
    for one in (params, copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert type(one) is SamplingParameters
        assert one == GIVEN_PARAMS
        assert {**one, "n": 2} == {**GIVEN_PARAMS, "n": 2}
        assert (list(one), len(one), one.get("n")) == (["max_tokens", "temperature"], 2, None)
        assert repr(one) == f"SamplingParameters({GIVEN_PARAMS!r})"
        assert (one.max_tokens, one.temperature, one.n, one.top_p, one.stop) == (8, 0.7, 1, 1.0, [])
    with pytest.raises(AttributeError, match="best_of"):
        params.best_of  # noqa: B018  vLLM has no such field any more
    with pytest.raises(AttributeError, match=r"\.temperature = 0 would change nothing: pass temperature="):
        params.temperature = 0


def test_without_vllm_only_what_was_given_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    params = SamplingParameters(GIVEN_PARAMS)
    assert params.max_tokens == 8
    with pytest.raises(AttributeError, match=r"top_p was not given, and vLLM, .* is not installed"):
        params.top_p  # noqa: B018


# -- scores ------------------------------------------------------------------------------------------------------------


SINGLE = normalise_prompts([5, 6, 7])
DOUBLE = normalise_prompts([[5, 6, 7], [8]])
KEPT = KeptTokens(ids=torch.tensor([4, 9, -1]), sizes=torch.tensor([0, 2, 0]))

NO_TEMPERATURES = (0.0, float("nan"), float("inf"), "hot", True, None)


def test_each_sequence_is_scored_at_its_own_temperature_and_over_its_own_ids() -> None:
    assert scorings(SINGLE, 1.0, None) == [Scoring()]
    assert scorings(DOUBLE, 0.5, None) == [Scoring(temperature=0.5)] * 2
    first, second = scorings(DOUBLE, torch.tensor([0.5, 2.0]), [KEPT, None])
    assert (first.temperature, second.temperature, second.kept) == (0.5, 2.0, None)
    assert isinstance(first.kept, KeptIds)
    assert (first.kept.ids.tolist(), first.kept.sizes.tolist()) == ([4, 9], [0, 2, 0])  # what pads held is gone
    assert first.kept.ids.dtype == first.kept.sizes.dtype == np.int32


@pytest.mark.parametrize(
    ("batch", "temperature", "kept", "words"),
    [
        (normalise_prompts("text"), 1.0, None, "takes token ids"),
        *((SINGLE, bad, None, f"temperature must be a finite number above 0, got {bad!r}") for bad in NO_TEMPERATURES),
        (SINGLE, 1.0, 5, r"kept\[0\] must be the KeptTokens of one sequence, or None, got 5"),
        (DOUBLE, 1.0, 5, "kept must be a list with KeptTokens or None for each sequence, got 5"),
        (DOUBLE, 1.0, KEPT, "kept must be a list with KeptTokens or None for each sequence"),
        (SINGLE, 1e-40, None, "temperature must be a finite number of at least 1e-20, got 1e-40"),
        (DOUBLE, [1.0], None, "temperature must have one entry per sequence: got 1 for 2"),
        (DOUBLE, [[1.0, 1.0]], None, r"one per sequence, got shape \[1, 2\]"),
        (DOUBLE, [1.0, 1.0, 1.0], None, "temperature must have one entry per sequence: got 3 for 2"),
        (DOUBLE, 1.0, [KEPT], "kept must have one entry per sequence: got 1 for 2"),
        (SINGLE, 1.0, KeptTokens(ids=torch.tensor([4]), sizes=torch.tensor([0, 2, 0])), "1 ids, and its sizes say 2"),
        (DOUBLE, 1.0, [None, KEPT], r"kept\[1\] is for 3 tokens, and there are 1"),
    ],
)
def test_bad_arguments_are_named(batch: Any, temperature: Any, kept: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scorings(batch, temperature, kept)


def test_a_request_that_was_aborted_has_no_scores() -> None:
    ids = np.arange(2)
    done = completion(ids, prompt_logprobs=np.array([np.nan, -1], np.float32))
    assert scores_of([done])[0][1] == -1
    with pytest.raises(EngineError, match="'r' was aborted"):
        scores_of([done, completion(ids)])
