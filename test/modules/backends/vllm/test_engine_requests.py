"""Requests across weight swaps, over an engine made by hand: each of its tokens says which weights made it, and where.

What only the real engine can show is in ``test/weight_update/test_weights_on_vllm.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import RetryableRequestError
from vllm.sampling_params import StructuredOutputsParams

from support.loops import in_loop
from support.processes import ids_request
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import Completion, CompletionMetrics, CompletionOutput, Request, nothing_yet
from torchrl_moe.modules.backends.vllm import engine_requests, weights
from torchrl_moe.modules.backends.vllm.engine_requests import (
    EngineRequests,
    Forced,
    attach,
    completion_from_vllm,
    forced_in,
    forced_of,
)
from torchrl_moe.modules.backends.vllm.weights import EngineWeights, WeightCheck

# -- vLLM's outputs, by hand-made objects of their shape ---------------------------------------------------------------
RECORDED = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2)


def request(**fields: Any) -> Request:
    return Request(request_id="ours", sampling_params=None, prompt="hi", **fields)


def answer(index: int = 0, **fields: Any) -> SimpleNamespace:
    empty = {"stop_reason": None, "logprobs": None, "sampling_mask": None}
    given = {"token_ids": [7, 8], "text": "ab", "finish_reason": "stop", "routed_experts": RECORDED}
    return SimpleNamespace(**{"index": index, **empty, **given, **fields})


def output(*answers: SimpleNamespace, metrics: Any = None) -> SimpleNamespace:
    ids = {"request_id": "vllm's", "prompt": "hi", "prompt_token_ids": [104, 105, 33], "num_cached_tokens": 2}
    return SimpleNamespace(**ids, outputs=list(answers), metrics=metrics, prompt_token_id_logprobs=None)


def test_fields_are_taken_over_under_our_request_id() -> None:
    from vllm.logprobs import FlatLogprobs, Logprob

    logprobs = FlatLogprobs()
    logprobs.extend([{7: Logprob(-2.0), 9: Logprob(-0.1)}, {8: Logprob(-0.5)}])
    completion = completion_from_vllm(output(answer(logprobs=logprobs, stop_reason=258)), request(), 5)
    assert (completion.request_id, completion.prompt, completion.num_cached_tokens) == ("ours", "hi", 2)
    (only,) = completion.outputs
    assert (only.text, only.finish_reason, only.stop_reason) == ("ab", "stop", 258)
    assert only.logprobs is not None and only.logprobs.tolist() == [-2.0, -0.5]
    for got, dtype, expected in (
        (completion.prompt_token_ids, np.int64, [104, 105, 33]),
        (only.token_ids, np.int64, [7, 8]),
        (only.policy_versions, np.int32, [5, 5]),
    ):
        assert (got.dtype, got.tolist()) == (dtype, expected)
    assert only.routed_experts is RECORDED  # 3 + 2 - 1 rows, as the engine gave them


def test_words_that_were_left_out_are_taken_over() -> None:
    """Of the first token words 4 and 9 were kept, of the second all but word 3."""
    mask = SimpleNamespace(token_ids=[[4, 9], [~3]])  # vLLM's ``SamplingMask``
    (only,) = completion_from_vllm(output(answer(sampling_mask=mask)), request(), 0).outputs
    assert only.kept is not None
    assert (only.kept.ids.tolist(), only.kept.sizes.tolist()) == ([4, 9, 3], [2, -1])
    mask.token_ids.pop()
    with pytest.raises(EngineError, match="the kept tokens of 1 tokens, of an answer of 2"):
        completion_from_vllm(output(answer(sampling_mask=mask)), request(), 0)


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        (None, (0.0, 0.0, 0.0)),
        ((100.5, 100.75, 103.0), (0.5, 0.75, 3.0)),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),  # cut before it was scheduled
        ((101.0, 0.0, 0.0), (1.0, 0.0, 0.0)),  # cut before its first token
    ],
)
def test_times_are_differences_of_stamps_and_0_where_a_stage_was_not_reached(stamps: Any, expected: Any) -> None:
    names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    metrics = None if stamps is None else SimpleNamespace(**dict(zip(names, (100.0, *stamps), strict=True)))
    found = completion_from_vllm(output(answer(), metrics=metrics), request(), 0).metrics
    queue, first, total = expected
    assert found == CompletionMetrics(queue_seconds=queue, first_token_seconds=first, total_seconds=total)


# -- rows to follow, on their way to the workers -----------------------------------------------------------------------
ROWS = np.full((4, 3, 2), -1, np.int16)
ROWS[:3, 1:] = [[[0, 299], [7, 8]]] * 3


def test_rows_cross_to_the_core_and_from_there_to_the_workers() -> None:
    """As msgpack, which the core reads into the class again, and pickled."""
    asked = SamplingParams(max_tokens=3, extra_args={"mine": [1]})
    made = attach(asked, Forced(rows=ROWS))
    core = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=type(made))
    for one in (made, core, pickle.loads(pickle.dumps(core))):
        forced = forced_in(one)
        assert forced.rows is not None
        assert forced.rows.dtype == np.int16
        assert (forced.rows == ROWS).all()
        assert (forced.is_live, one.extra_args["mine"], one.max_tokens) == (False, [1], 3)
    assert asked.extra_args == {"mine": [1]}
    scheduled = SimpleNamespace(sampling_params=made)
    assert (forced_of(scheduled).rows == ROWS).all()
    assert forced_of(scheduled) is forced_of(scheduled)  # looked into once
    assert forced_of(SimpleNamespace(sampling_params=None)).rows is None  # of a pooling model


# -- requests across swaps ---------------------------------------------------------------------------------------------
PROMPT = [7, 8, 9]
GRAMMAR = StructuredOutputsParams(regex="a")


@dataclass
class State:
    """One answer in the making."""

    external_req_id: str
    request_index: int
    context: list[int]
    params: SamplingParams
    salt: str
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    reason: str | None = None
    parent_req: None = None
    prompt: None = None
    stats: None = None
    num_cached_tokens: int = 11

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.context[: len(self.context) - len(self.tokens)]

    @property
    def text(self) -> str:
        return "".join(map(chr, self.tokens))

    @property
    def logprobs(self) -> list[Any]:
        return [{0: SimpleNamespace(logprob=-float(token))} for token in self.tokens]

    @property
    def routes(self) -> Any:
        return np.array(self.rows, np.int64).reshape(-1, 1, 1)

    @property
    def detokenizer(self) -> Any:
        return SimpleNamespace(
            num_output_tokens=lambda: len(self.tokens),
            output_token_ids=self.tokens,
            get_next_output_text=lambda finished, delta: self.text,
        )

    @property
    def logprobs_processor(self) -> Any:
        return SimpleNamespace(prompt_logprobs=None, logprobs=self.logprobs)

    @property
    def sampling_mask_chunks(self) -> list[Any]:
        return [SimpleNamespace(to_nested_list=lambda token=token: [[token, 200]]) for token in self.tokens]

    @property
    def routed_experts_chunks(self) -> list[Any]:
        return [self.routes] if self.tokens else []

    def output(self) -> SimpleNamespace:
        return SimpleNamespace(
            index=self.request_index,
            token_ids=self.tokens,
            text=self.text if self.params.detokenize else "",
            finish_reason=self.reason,
            stop_reason=None,
            logprobs=self.logprobs,
            routed_experts=self.routes if self.tokens else None,
            sampling_mask=SimpleNamespace(token_ids=[[token, 200] for token in self.tokens]),
        )


class HandEngine:
    """Makes a token per request and :meth:`step`: 100 times its version, plus the place. A row says the same.

    Its prefix cache is a set of versions for each salt: those whose weights made what is cached.
    """

    def __init__(self) -> None:
        self.version = 0
        self.states: dict[str, State] = {}
        self.paused = False
        self.asked: list[str] = []
        self.salts: dict[str, set[int]] = {}
        self.changed = asyncio.Condition()
        self.reading: asyncio.Event | None = None  # if set, a request is not known before
        self.refuses = False  # new requests, as later releases do in a pause that keeps none
        self.refused = 0
        self.room = 99  # how many answers run at a time
        self.canary: Exception | None = None
        self.errored = False
        self.dead_error = EngineError("the core is dead")
        self.adapters: dict[str, Any] = {}
        self.priorities: dict[str, int] = {}

    @property
    def output_processor(self) -> Any:
        return SimpleNamespace(request_states=self.states)

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)))

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        if self.refuses:
            self.refused += 1
            raise RetryableRequestError("paused")
        self.asked.append(request_id)
        self.adapters[request_id], self.priorities[request_id] = lora_request, priority
        if self.reading is not None:
            await self.reading.wait()
        ids, salt = prompt["prompt_token_ids"], prompt.get("cache_salt", "")
        mine = [State(request_id, index, list(ids), params, salt) for index in range(params.n)]
        for state in mine:
            self.states[f"{state.request_index}_{request_id}_{len(self.asked)}"] = state
        async with self.changed:
            await self.changed.wait_for(lambda: all(state.reason for state in mine))
        outputs = [state.output() for state in mine]
        yield SimpleNamespace(prompt=None, prompt_token_ids=ids, num_cached_tokens=11, outputs=outputs, metrics=None)

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            assert not self.paused
            for state in list(self.states.values())[: self.room]:
                self._advance(state)
            await self._settle()

    def _advance(self, state: State) -> None:
        if not state.tokens:
            first = state.params.routed_experts_prompt_start
            state.rows = [self.version * 100 + place for place in range(first, len(state.context))]
            self.salts.setdefault(state.salt, set()).add(self.version)
        else:
            state.rows.append(self.version * 100 + len(state.context) - 1)
        token = self.version * 100 + len(state.context)
        state.tokens.append(token)
        state.context.append(token)
        if len(state.tokens) == state.params.max_tokens:
            state.reason = "length"

    async def _settle(self) -> None:
        for name in [name for name, state in self.states.items() if state.reason]:
            del self.states[name]
        async with self.changed:
            self.changed.notify_all()
        await asyncio.sleep(0)

    async def abort(self, names: list[str], internal: bool = False) -> None:
        for name, state in self.states.items():
            if (name if internal else state.external_req_id) in names:
                state.reason = "abort"
        await self._settle()

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        if mode == "abort":
            await self.abort(list(self.states), internal=True)
        await asyncio.sleep(0.005)

    async def resume_generation(self) -> None:
        self.paused = self.refuses = False


class Weights(EngineWeights):
    """The real bookkeeping, around a load that only counts."""

    async def _load(self, version: int) -> None:
        await asyncio.sleep(0.002)
        self.engine.version = version

    async def _whole(self) -> bool:
        return True


class Bench:
    def __init__(self) -> None:
        self.engine = HandEngine()
        self.weights = Weights(self.engine, dict)
        self.done: dict[str, Completion] = {}
        self.refused: dict[str, BaseException] = {}
        self.requests = EngineRequests(
            self.engine, self.weights, lambda c: self.done.update({c.request_id: c}), self.refused.__setitem__
        )
        self.weights.in_flight = self.requests
        self.own: object = None  # the adapter that requests bring
        self.requests._adapters = SimpleNamespace(load=self._load)  # type: ignore[assignment]

    async def _load(self, lora_request: Any) -> Any:
        return self.own

    async def start(self, name: str = "r", resume: Completion | None = None, **params: Any) -> None:
        ids = np.array(PROMPT, np.int32)
        fields = {"prompt_token_ids": ids, "resume": resume, "priority": len(name)}
        given = SamplingParams(**{"max_tokens": 6, **params})
        self.requests.start(Request(request_id=name, sampling_params=given, **fields))
        await asyncio.sleep(0.002)

    async def swap(self, version: int, mode: Any = "abort", clear_cache: bool = False) -> None:
        report = await self.weights.swap(version, mode, clear_cache)
        assert (report.error is None) is (self.engine.canary is None)
        await asyncio.sleep(0.03)

    async def finish(self) -> None:
        async with asyncio.timeout(60.0):
            while len(self.requests):
                await self.engine.step()
                await asyncio.sleep(0.001)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    async def ask(canary: WeightCheck, seconds: float) -> str:
        engine: HandEngine = canary._engine
        await engine.step()  # what it froze makes tokens meanwhile
        if engine.canary is not None:
            raise engine.canary
        return ""

    async def send(canary: WeightCheck) -> None:
        pass

    monkeypatch.setattr(engine_requests, "SamplingParamsBuilder", lambda *how: lambda spec, guided_options: spec)
    monkeypatch.setattr(weights.WeightCheck, "ask", ask)
    monkeypatch.setattr(weights.WeightCheck, "send", send)
    return Bench()


def check(output: CompletionOutput, *versions: int) -> None:
    """Tokens at their places, of these versions; and everything else that belongs to them."""
    tokens = [version * 100 + len(PROMPT) + place for place, version in enumerate(versions)]
    assert output.token_ids.tolist() == tokens
    assert output.policy_versions.tolist() == list(versions)
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [-token for token in tokens]
    assert output.routed_experts is not None
    made_by = [*versions[:1] * (len(PROMPT) - 1), *versions]
    assert output.routed_experts[:, 0, 0].tolist() == [100 * version + row for row, version in enumerate(made_by)]


@pytest.mark.parametrize("seed", range(8))
@in_loop
async def test_whatever_comes_between_each_token_knows_its_weights_and_its_place(bench: Bench, seed: int) -> None:
    """Requests of several answers, resumed ones, swaps of each mode, weights that fail, aborts and snapshots."""
    rng, names, failed, aborted = random.Random(seed), itertools.count(), set[int](), set[str]()
    versions, dropped, asked = itertools.count(1), False, dict[str, int]()

    def check_all(completions: Iterable[Completion]) -> None:
        for completion in completions:
            assert len(completion.outputs) == asked[completion.request_id]
            for output in completion.outputs:
                made_by = output.policy_versions.tolist()
                assert made_by == sorted(made_by) and not failed.intersection(made_by)
                if made_by:
                    check(output, *made_by)

    async def start(bench: Bench) -> None:
        name, n = f"r{next(names)}", rng.randint(1, 3)
        asked[name] = n
        guided = {"structured_outputs": GRAMMAR} if rng.random() < 0.3 else {}  # cannot continue: starts again
        resume = had(*(rng.randint(0, 4) for _ in range(n))) if rng.random() < 0.4 else None
        if rng.random() < 0.2 and bench.engine.reading is None:
            bench.engine.reading = asyncio.Event()  # vLLM still takes it in during what comes next
        await bench.start(name, resume, n=n, max_tokens=6, **guided)

    async def swap(bench: Bench) -> None:
        nonlocal dropped
        mode, clear_cache, version = rng.choice(["keep", "abort"]), rng.random() < 0.3, next(versions)
        dropped |= clear_cache
        if rng.random() < 0.25:
            bench.engine.canary = ValueError("no good")
            failed.add(version)
            await bench.swap(version, mode, clear_cache)
            bench.engine.canary, version = None, next(versions)
        swapping = asyncio.ensure_future(bench.swap(version, mode, clear_cache))
        await asyncio.sleep(0.001)
        if rng.random() < 0.3:
            cut = [f"r{rng.randrange(9)}"]
            aborted.update(cut)
            bench.requests.abort(cut)
        await swapping

    for _ in range(14):
        action = rng.choice([start, start, swap, None])
        if action is not None:
            await action(bench)
        if action is not start and bench.engine.reading is not None:
            bench.engine.reading.set()
            bench.engine.reading = None
            await asyncio.sleep(0.03)
        bench.engine.room = rng.choice([1, 2, 99])
        await bench.engine.step(rng.randint(0, 2))
        check_all(await bench.requests.snapshot())
    if bench.engine.reading is not None:
        bench.engine.reading.set()
    bench.engine.room = 99
    await bench.finish()
    assert dropped or all(len(made_by) == 1 for made_by in bench.engine.salts.values())
    assert (bench.refused, len(bench.done)) == ({}, next(names))
    check_all(bench.done.values())
    for name, completion in bench.done.items():
        for output in completion.outputs:
            assert name in aborted or (output.finish_reason, len(output.token_ids)) == ("length", 6)


@pytest.mark.parametrize("steps", [1, 2])
@in_loop
async def test_a_stop_string_across_a_cut_ends_the_answer_though_its_rest_is_cut_too(bench: Bench, steps: int) -> None:
    """The last token of version 0, and the first one of version 1. vLLM does not see it, and continues."""
    await bench.start(stop=chr(4) + chr(105), include_stop_str_in_output=True)
    await bench.engine.step(2)
    await bench.swap(1)
    await bench.engine.step(steps)
    await bench.swap(2)
    await bench.finish()
    (output,) = bench.done["r"].outputs
    check(output, 0, 0, 1)
    assert (output.finish_reason, output.text) == ("stop", "".join(map(chr, [3, 4, 105])))
    assert len(bench.engine.asked) == 2


@pytest.mark.parametrize("dies", [True, False])
@in_loop
async def test_what_a_core_aborts_by_itself_fails_with_it(bench: Bench, dies: bool, monkeypatch: Any) -> None:
    """It aborts all that it has when it is told to end, and is dead a moment later."""
    monkeypatch.setattr(engine_requests, "ENDING_SECONDS", 60.0 if dies else 0.0)
    await bench.start()
    await bench.engine.step(2)
    await bench.engine.abort(["r"])
    if dies:
        await asyncio.sleep(0.02)
        assert (bench.done, bench.refused) == ({}, {})
        bench.engine.errored = True
    while not bench.refused:
        await asyncio.sleep(0.01)
    assert isinstance(bench.refused["r"], EngineError) and bench.done == {}
    assert (bench.refused["r"] is bench.engine.dead_error) is dies


@pytest.mark.parametrize("how", ["by its name", "all"])
@in_loop
async def test_what_a_user_cuts_comes_at_once(bench: Bench, how: str) -> None:
    await bench.start(n=2)
    await bench.engine.step(2)
    if how == "all":  # as a pause or sleep in mode "abort" says before vLLM aborts
        bench.requests.cuts_all = True
        await bench.engine.abort(["r"])
    else:
        bench.requests.abort(["r"])
    while not bench.done:
        await asyncio.sleep(0.001)
    assert [len(output.token_ids) for output in bench.done["r"].outputs] == [2, 2] and not bench.refused


@in_loop
async def test_an_error_while_it_continues_refuses_the_request(bench: Bench) -> None:
    """As does one with which vLLM ends an answer, where no token fits its grammar."""
    await bench.start("error", n=2)
    await bench.engine.step(2)
    next(iter(bench.engine.states.values())).reason = "error"
    await bench.finish()
    await asyncio.sleep(0.01)
    assert isinstance(bench.refused["error"], ValueError)

    await bench.start()
    await bench.engine.step(2)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ValueError("too long now")

    bench.engine.generate = fail  # type: ignore[method-assign]
    await bench.swap(1)
    await asyncio.sleep(0.01)
    assert len(bench.requests) == 0
    assert str(bench.refused["r"]) == "too long now"
    assert bench.done == {}


# -- what a request resumes -------------------------------------------------------------------------------------------
def had(*tokens: int) -> Completion:
    """What there is of answers with so many tokens, made by version 0."""
    outputs = []
    for index, count in enumerate(tokens):
        places = np.arange(len(PROMPT), len(PROMPT) + count)
        output = CompletionOutput(
            index=index,
            token_ids=places.astype(np.int64),
            text="".join(map(chr, places)),
            finish_reason="abort",
            policy_versions=np.zeros(count, np.int32),
            logprobs=-places.astype(np.float32) if count else None,
            routed_experts=np.arange(len(PROMPT) + count - 1).reshape(-1, 1, 1) if count else None,
        )
        outputs.append(output)
    return replace(nothing_yet(ids_request("old", PROMPT)), outputs=outputs)


# -- adapters ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clear_cache", [False, True])
@in_loop
async def test_requests_keep_their_adapter_until_whole_weights_come(bench: Bench, clear_cache: bool) -> None:
    """Also where nothing is aborted: the weights have the trainer's adapter in them. A user's adapter stays."""
    one, two, own = object(), object(), object()
    await bench.start("bare", max_tokens=2)
    await bench.engine.step()
    bench.requests.change_adapter(one, 1)
    await bench.start("old", max_tokens=8)
    bench.own = own
    await bench.start("own", max_tokens=8)
    bench.own = None
    await bench.engine.step(2)
    bench.requests.change_adapter(two, 2)
    await bench.start("new", max_tokens=8)
    await bench.engine.step(2)
    assert bench.requests.uses(one) and bench.requests.uses(two)
    bench.engine.reading = asyncio.Event()
    await bench.start("late", max_tokens=8)  # vLLM does not know it yet
    bench.engine.reading.set()
    bench.requests.adapter = None
    await bench.swap(3, "keep", clear_cache)
    await bench.finish()
    assert not bench.requests.uses(one)
    versions = {name: done.outputs[0].policy_versions.tolist() for name, done in bench.done.items()}
    both = [1] * 4 + [3] * 4
    assert versions == {"bare": [0] * 2, "old": both, "own": both, "new": [2] * 2 + [3] * 6, "late": [3] * 8}
    rest = {name: adapter for name, adapter in bench.engine.adapters.items() if "~" in name}
    assert sorted(name.split("~")[0] for name in rest) == ["late", "new", "old"]
    assert set(rest.values()) == {None}
    assert all(priority == len(name.split("~")[0]) for name, priority in bench.engine.priorities.items())
    first = {name: adapter for name, adapter in bench.engine.adapters.items() if name not in rest}
    assert first == {"bare": None, "old": one, "own": own, "new": two, "late": two}
    assert {output.finish_reason for done in bench.done.values() for output in done.outputs} == {"length"}


# -- a pause in which vLLM refuses requests ---------------------------------------------------------------------------
@pytest.mark.parametrize("swapped", [False, True])
@in_loop
async def test_requests_that_come_in_a_pause_are_asked_for_again_once_it_is_over_or_aborted(
    bench: Bench, swapped: bool
) -> None:
    """In one that takes no requests, which a swap that aborts makes of the user's own."""
    await bench.weights.pause("keep" if swapped else "wait", False)
    if swapped:
        await bench.swap(1)
    bench.engine.refuses = True
    await bench.start(max_tokens=2)
    await bench.start("aborted", n=2, max_tokens=2)
    await asyncio.sleep(0.05)
    assert bench.engine.refused == 2  # they wait, and do not ask time and again
    assert not bench.engine.asked
    bench.requests.abort(["aborted"])
    async with asyncio.timeout(10.0):
        while "aborted" not in bench.done:
            await asyncio.sleep(0.001)
    assert [(one.finish_reason, len(one.token_ids)) for one in bench.done["aborted"].outputs] == [("abort", 0)] * 2
    await bench.weights.resume()
    await bench.finish()
    check(bench.done["r"].outputs[0], *[int(swapped)] * 2)
    assert not bench.refused
