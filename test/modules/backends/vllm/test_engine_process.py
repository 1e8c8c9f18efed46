"""One engine process from the inside, over the toy engine."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support import toy_engine
from support.llm import FakeLLM
from support.loops import in_loop
from support.processes import ids_request
from support.waiting import until
from torchrl_moe.errors import EngineError, WeightSyncError
from torchrl_moe.modules.backends.checkpoint import load_tokenizer
from torchrl_moe.modules.backends.process import engine_program, link
from torchrl_moe.modules.backends.process.engine_program import Load
from torchrl_moe.modules.backends.replica import (
    ProbeReport,
    ReplicaInfo,
    ReplicaStats,
    Request,
    SwapReport,
)
from torchrl_moe.modules.backends.vllm import engine_requests
from torchrl_moe.modules.backends.vllm.engine_process import EngineProbe, EngineProcess, EngineSleep, load_logger
from torchrl_moe.modules.backends.vllm.weights import EngineWeights

# -- the stat logger ---------------------------------------------------------------------------------------------------


def test_the_last_step_says_what_is_and_all_steps_are_counted() -> None:
    from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

    load = Load()
    logger = load_logger(load)

    def record(tokens: int, preempted: int, at: float, cache: PrefixCacheStats, **scheduler: Any) -> None:
        step = IterationStats()
        step.num_generation_tokens, step.num_preempted_reqs, step.iteration_timestamp = tokens, preempted, at
        logger.record(SchedulerStats(prefix_cache_stats=cache, **scheduler), step, mm_cache_stats=None, engine_idx=0)

    first = {"num_running_reqs": 3, "num_waiting_reqs": 2, "kv_cache_usage": 0.25}
    record(5, 1, 1000.0, PrefixCacheStats(queries=10, hits=4), **first)
    expected = {"running": 3, "waiting": 2, "cache_usage": 0.25, "tokens": 5, "cache_queries": 10, "cache_hits": 4}
    assert load == Load(**expected, preemptions=1, steps=1, step_at=1000.0)
    record(2, 0, 1001.0, PrefixCacheStats(queries=6), num_running_reqs=1, kv_cache_usage=0.125)
    assert load == Load(1, 0, 0.125, 7, 16, 4, 1, 2, 1001.0)


# -- the probe ---------------------------------------------------------------------------------------------------------


SPIN = "while True: pass"


class Core:
    """Answers a ping when it is let; counts them."""

    def __init__(self) -> None:
        self.pings = 0
        self.free = asyncio.Event()
        self.error: Exception | None = None

    async def is_paused(self) -> bool:
        self.pings += 1
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return False


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    """A busy process, taken for that of the engine."""
    process = subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@in_loop
async def test_a_core_that_answers_is_well_and_one_that_does_not_is_pinged_once_until_it_does() -> None:
    core = Core()
    signs = EngineProbe(core)
    assert [(await signs.read(0.01)).core_answered for _ in range(3)] == [False] * 3
    assert core.pings == 1
    core.free.set()
    assert (await signs.read(5.0)).core_answered
    core.error = RuntimeError("no such call")  # an answer, too
    assert (await signs.read(5.0)).core_answered
    assert core.pings == 2


def test_what_the_group_computes_and_whether_it_is_stopped(leader: subprocess.Popen[bytes]) -> None:
    async def read() -> ProbeReport:
        core = Core()
        core.free.set()
        return await EngineProbe(core).read(5.0)

    first = asyncio.run(read())
    until(lambda: asyncio.run(read()).cpu_seconds >= first.cpu_seconds + 0.1)
    assert not asyncio.run(read()).stopped
    leader.send_signal(signal.SIGSTOP)
    until(lambda: asyncio.run(read()).stopped)
    # it stands still as soon as the kernel has booked its last moments
    until(lambda: asyncio.run(read()).cpu_seconds == asyncio.run(read()).cpu_seconds)
    leader.send_signal(signal.SIGCONT)
    until(lambda: not asyncio.run(read()).stopped)


# -- sleep -------------------------------------------------------------------------------------------------------------


PAUSE = ("pause", "wait", True)


class Sleeper:
    """A sleeper over a fake engine that knows whether it is paused."""

    def __init__(self) -> None:
        self.engine = SleepyLLM()
        self.weights = EngineWeights(self.engine, dict)
        self.sleeping = EngineSleep(self.engine, self.weights)

    async def swap(self, version: int = 7) -> SwapReport:
        return await self.sleeping.swap(version, "keep", False, None, math.inf)

    @property
    def log(self) -> list[Any]:
        seen, self.engine.log = self.engine.log, []
        return seen


class SleepyLLM(FakeLLM):
    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await super().pause_generation(mode=mode, clear_cache=clear_cache)
        self.is_paused = True

    async def resume_generation(self) -> None:
        await super().resume_generation()
        self.is_paused = False


@in_loop
async def test_requests_that_come_while_it_sleeps_wait_until_all_of_it_is_awake() -> None:
    bench = Sleeper()
    await bench.sleeping.sleep(1, "wait")
    assert bench.log == [PAUSE, ("sleep", 1, "keep")]
    coming = asyncio.ensure_future(bench.weights.salt())
    await bench.sleeping.wake_up(["weights"])
    await bench.sleeping.wake_up(["weights"])  # it is awake
    await asyncio.sleep(0)
    assert not coming.done()
    await bench.sleeping.wake_up(None)
    assert await coming == {}
    assert bench.log == [("wake_up", ["weights"]), ("wake_up", ["kv_cache"]), "resume"]
    await bench.sleeping.wake_up(None)
    assert bench.log == []


@in_loop
async def test_one_that_was_paused_is_paused_afterwards() -> None:
    bench = Sleeper()
    await bench.sleeping.pause("keep", False)
    await bench.sleeping.sleep(1, "wait")
    await bench.sleeping.wake_up(None)
    assert bench.log == [
        ("pause", "keep", False),
        PAUSE,
        ("sleep", 1, "keep"),
        ("wake_up", ["kv_cache", "weights"]),
        ("pause", "keep", False),
    ]
    await bench.weights.salt()  # it comes in, and waits in vLLM
    await bench.sleeping.resume()
    assert bench.log == ["resume"]


@in_loop
async def test_one_that_is_to_sleep_in_a_swap_does_not_take_its_pause_for_the_users() -> None:
    bench = Sleeper()
    begun, go_on = asyncio.Event(), asyncio.Event()
    load = bench.weights._load

    async def slowly(version: int) -> None:
        begun.set()
        await go_on.wait()
        await load(version)

    bench.weights._load = slowly  # type: ignore[method-assign]
    swap = asyncio.ensure_future(bench.swap())
    await begun.wait()
    sleep = asyncio.ensure_future(bench.sleeping.sleep(1, "wait"))
    await asyncio.sleep(0)
    go_on.set()
    assert (await swap).error is None
    await sleep
    await bench.sleeping.wake_up(None)
    assert not bench.engine.is_paused


@in_loop
async def test_an_update_wakes_the_weights_alone_and_leaves_it_paused() -> None:
    bench = Sleeper()
    await bench.sleeping.sleep(1, "wait")
    report = await bench.swap()
    assert (report.error, report.unproved) == (None, "the engine is paused")
    slept, woken, *load = bench.log[1:]
    assert (slept, woken) == (("sleep", 1, "keep"), ("wake_up", ["weights"]))
    assert load == [("pause", "keep", False), "start", ("update", {"version": 7}), ("finish", "7")]
    await bench.swap(8)
    assert "wake_up" not in [step[0] for step in bench.log]
    await bench.sleeping.wake_up(None)
    assert bench.log == [("wake_up", ["kv_cache"]), "resume"]
    assert await bench.weights.salt() == {"cache_salt": "swap-2"}


@in_loop
async def test_weights_that_were_dropped_are_updated_before_it_serves() -> None:
    bench = Sleeper()
    await bench.sleeping.sleep(2, "abort")
    for tags in (None, ["kv_cache"]):
        with pytest.raises(WeightSyncError, match="level 2 has dropped the weights"):
            await bench.sleeping.wake_up(tags)
    bench.engine.fail["update"] = RuntimeError("out of memory")
    bench.engine.whole = [False]
    assert (await bench.swap()).error == "RuntimeError: out of memory"
    with pytest.raises(WeightSyncError, match="update them first"):
        await bench.sleeping.wake_up(None)
    bench.engine.fail.clear()
    assert (await bench.swap()).error is None
    await bench.sleeping.wake_up(None)
    await bench.weights.salt()


@pytest.mark.parametrize("what", ["pause", "resume", "sleep deeper", "sleep half awake"])
@in_loop
async def test_what_would_run_on_memory_that_is_gone_is_refused(what: str) -> None:
    bench = Sleeper()
    await bench.sleeping.sleep(1, "wait")
    await bench.sleeping.sleep(1, "wait")  # nothing to do
    assert bench.log == [PAUSE, ("sleep", 1, "keep")]
    if what == "sleep half awake":
        await bench.sleeping.wake_up(["weights"])
    asked = {
        "pause": lambda: bench.sleeping.pause("keep", False),
        "resume": bench.sleeping.resume,
        "sleep deeper": lambda: bench.sleeping.sleep(2, "wait"),
        "sleep half awake": lambda: bench.sleeping.sleep(1, "wait"),
    }[what]
    with pytest.raises(EngineError, match=rf"{what.split()[0]}: the engine sleeps; wake_up\(\) first"):
        await asked()


@in_loop
async def test_one_that_could_not_sleep_serves_on() -> None:
    bench = Sleeper()
    bench.engine.fail["sleep"] = RuntimeError("memory usage increased")
    with pytest.raises(RuntimeError, match="memory usage increased"):
        await bench.sleeping.sleep(1, "wait")
    assert bench.log == [PAUSE, ("sleep", 1, "keep"), "resume"]
    await bench.weights.salt()


@in_loop
async def test_one_that_is_woken_before_its_requests_have_finished_never_sleeps() -> None:
    bench, finished = Sleeper(), asyncio.Event()
    pause = bench.engine.pause_generation

    async def wait(*, mode: str, clear_cache: bool) -> None:
        await finished.wait()
        await pause(mode=mode, clear_cache=clear_cache)

    bench.engine.pause_generation = wait  # type: ignore[method-assign]
    falling = asyncio.ensure_future(bench.sleeping.sleep(1, "wait"))
    await asyncio.sleep(0)
    await bench.sleeping.wake_up(None)
    finished.set()
    with pytest.raises(EngineError, match="was woken before its requests had finished"):
        await falling
    assert "sleep" not in [step[0] for step in bench.log]


@in_loop
async def test_a_level_or_a_tag_that_vllm_does_not_have_and_an_engine_without_sleep_mode_are_refused() -> None:
    bench = Sleeper()
    with pytest.raises(ValueError, match=r"level must be 1 .* or 2 .*, got 0"):
        await bench.sleeping.sleep(0, "wait")
    with pytest.raises(ValueError, match="tags must be of 'weights' and 'kv_cache', got \\['scheduling'\\]"):
        await bench.sleeping.wake_up(["scheduling"])
    bench.engine.model_config = SimpleNamespace(enable_sleep_mode=False)
    with pytest.raises(ValueError, match="start the engine with enable_sleep_mode=True; vLLM has it on GPUs only"):
        await bench.sleeping.sleep(1, "wait")
    assert bench.log == []


# -- the process -------------------------------------------------------------------------------------------------------


class Inbox:
    """The driver's messages, put by hand."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[link.Message] = asyncio.Queue()

    def put(self, message: link.Message) -> None:
        self.messages.put_nowait(message)


class Bench:
    """An engine process around a toy engine, and what it sent."""

    def __init__(self) -> None:
        self.engine = toy_engine.ToyEngine()
        self.inbox = Inbox()
        self.sent: list[tuple[Any, ...]] = []
        self.stats: list[ReplicaStats] = []  # these come by themselves
        load = Load(3, 2, 0.5)
        info = ReplicaInfo(model="toy", layout=None, max_model_len=8)
        self.process = EngineProcess(self.engine, info, load, self.inbox, self._send)

    def _send(self, message: tuple[Any, ...]) -> None:
        kind, driver, body = message
        assert driver == ""
        if kind == "stats":
            self.stats.append(body)
        elif kind == "encoded":
            self.sent.append(("result", link.decode(body[1:])))
        else:
            self.sent.append((kind, body))

    def generate(self, *requests: Request) -> None:
        self.inbox.put(("generate", "", requests))

    def call(self, number: int, verb: str, **kwargs: Any) -> None:
        self.inbox.put(("call", "", (number, verb, (), kwargs)))

    async def until_sent(self, count: int) -> list[tuple[Any, ...]]:
        async with asyncio.timeout(60.0):
            while len(self.sent) < count:
                await asyncio.sleep(0.001)
        return self.sent


Script = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], Bench]:
    """Run a script against a serving process, then shut it down."""
    toy_engine.without_vllm(monkeypatch.setattr)
    monkeypatch.setattr(engine_program, "WATCH_SECONDS", 0.01)

    def run(script: Script) -> Bench:
        async def main() -> Bench:
            bench = Bench()
            serving = asyncio.create_task(bench.process._serve())
            await script(bench)
            bench.inbox.put(engine_program.SHUTDOWN)
            await asyncio.wait_for(serving, 60.0)
            return bench

        return asyncio.run(main())

    return run


Serve = Callable[[Script], Bench]


def by_ids(request_id: str, *ids: int, **params: Any) -> Request:
    return Request(request_id=request_id, sampling_params=params, prompt_token_ids=np.array(ids or (1, 2), np.int32))


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "kind", "words"),
    [
        ({"refuse": "too long"}, "value", "too long"),
        ({"wrap": ("TypeError", "no such field")}, "value", "no such field"),  # vLLM's wrapper has no words
        ({"wrap": ("KeyError", "x")}, "engine", "KeyError: 'x'"),
        ({"silent": True}, "engine", "RuntimeError: vLLM ended request 'r' without an output"),
    ],
)
def test_a_refusal_says_whose_fault_it_is(serve: Serve, params: dict[str, Any], kind: str, words: str) -> None:
    async def script(bench: Bench) -> None:
        bench.generate(by_ids("r", **params), by_ids("good"))
        await bench.until_sent(2)

    sent = serve(script).sent
    assert ("refused", ("r", kind, words)) in sent
    assert [message[1].request_id for message in sent if message[0] == "completions"] == ["good"]


def test_what_an_engine_raises_as_it_takes_a_request_in_refuses_that_one(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = EngineProcess.start

    def raises(process: EngineProcess, request: Request) -> None:
        if request.request_id.endswith("bad"):
            raise ValueError(f"request {request.request_id!r} is not read from /bad/places")
        start(process, request)

    monkeypatch.setattr(EngineProcess, "start", raises)

    async def script(bench: Bench) -> None:
        bench.generate(by_ids("bad"), by_ids("good"))
        await bench.until_sent(2)

    first, second = serve(script).sent
    assert first == ("refused", ("bad", "value", "request 'bad' is not read from /bad/places"))
    assert (second[0], second[1].request_id) == ("completions", "good")


def test_a_claim_that_waited_is_not_kept_by_a_driver_that_has_left(serve: Serve) -> None:
    async def script(bench: Bench) -> None:
        sent: list[Any] = []
        bench.process._send = sent.append
        async with bench.process._swapping:  # a swap of the owner is under way
            bench.inbox.put(("call", "guest", (1, "claim_weights", ("the guest", True), {})))
            bench.inbox.put(("left", "guest", None))
            await asyncio.sleep(0.01)
            assert sent == []
        async with asyncio.timeout(60.0):
            while not sent:
                await asyncio.sleep(0.001)
        assert not bench.process.owner.holds("guest")
        assert bench.process.owner.claim("maker", "the maker", False).granted

    serve(script)


def test_a_coroutine_that_fails_ends_the_engine_with_its_error(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(EngineProcess, "_background", lambda process: [fails()])

    async def script(bench: Bench) -> None:
        await bench.until_sent(1)

    assert serve(script).sent == [("died", "its engine failed: OSError: the disk is gone")]


def test_an_abort_spares_the_next_request_of_the_same_id(serve: Serve) -> None:
    async def script(bench: Bench) -> None:
        bench.generate(by_ids("again", seconds=9))
        await asyncio.sleep(0.05)
        bench.inbox.put(("abort", "", ["again"]))
        await bench.until_sent(1)
        bench.generate(by_ids("again", seconds=5 * engine_requests.ABORT_SECONDS))
        await bench.until_sent(2)

    first, second = (completion for _, completion in serve(script).sent)
    assert first.aborted
    assert not second.aborted


# -- commands ---------------------------------------------------------------------------------------------------------


def test_commands_reach_the_engine_and_their_values_come_back_in_payloads(serve: Serve) -> None:
    async def script(bench: Bench) -> None:
        bench.call(1, "pause", mode="keep", clear_cache=False)
        bench.call(2, "resume")
        bench.call(3, "reset_prefix_cache")
        bench.call(4, "collective_rpc", method="name", args=(1,), kwargs={"a": 2})
        bench.call(5, "tokenizer")
        bench.call(6, "weights_version")
        await bench.until_sent(6)

    bench = serve(script)
    assert bench.engine.calls == [("pause", "keep", False), ("resume",)]
    values = {number: value for _, (number, _, value) in bench.sent}
    assert load_tokenizer(values.pop(5)).encode("Hi") == [72, 105]
    assert values == {1: None, 2: None, 3: True, 4: [["name", [1], {"a": 2}]], 6: 0}


def test_a_request_that_comes_while_the_engine_sleeps_is_answered_when_it_is_awake(serve: Serve) -> None:
    async def script(bench: Bench) -> None:
        bench.call(1, "sleep", level=1, mode="wait")
        await bench.until_sent(1)
        bench.generate(ids_request("a", [1, 2]))
        bench.call(2, "resume")
        await bench.until_sent(2)
        bench.call(3, "wake_up", tags=None)
        await bench.until_sent(4)

    bench = serve(script)
    assert [message[0] for message in bench.sent] == ["result", "error", "result", "completions"]
    assert bench.sent[1][1][1:] == ("engine", "EngineError: resume: the engine sleeps; wake_up() first")
    assert bench.engine.calls == [
        ("pause", "wait", True),
        ("sleep", 1, "keep"),
        ("wake_up", ["kv_cache", "weights"]),
        ("resume",),
    ]


def test_an_engine_that_gets_adapters_alone_may_not_sleep(serve: Serve) -> None:
    async def script(bench: Bench) -> None:
        bench.process.updates.sends_adapters = True
        bench.call(1, "sleep", level=1, mode="wait")
        await bench.until_sent(1)

    bench = serve(script)
    assert bench.sent[0][1][1:] == (
        "value",
        "sleep: lora='adapter' loads into memory that would be gone: use lora='merged'",
    )
    assert bench.engine.calls == []


@pytest.mark.parametrize(
    ("command", "kwargs", "kind", "words"),
    [
        ("stat", {}, "value", "an engine has no verb 'stat'"),
        ("_stats", {}, "value", "an engine has no verb '_stats'"),
        ("start", {}, "value", "an engine has no verb 'start'"),
        ("pause", {"mod": "keep"}, "value", "mod"),
        ("collective_rpc", {"method": "fail", "args": ("boom",), "kwargs": None}, "engine", "RuntimeError: boom"),
        ("collective_rpc", {"method": "not_plain", "args": (), "kwargs": None}, "value", "function has no plain form"),
        ("metadata", {}, "engine", "LocalEntryNotFoundError"),  # no such folder, no such model in the hub's cache
    ],
)
def test_a_command_that_fails_answers_and_the_process_continues(
    serve: Serve, command: str, kwargs: dict[str, Any], kind: str, words: str
) -> None:
    async def script(bench: Bench) -> None:
        bench.call(1, command, **kwargs)
        await bench.until_sent(1)
        bench.call(2, "stats")
        await bench.until_sent(2)

    (outcome, error), (_, answer) = serve(script).sent
    assert (outcome, *error[:2]) == ("error", 1, kind)
    assert words in error[2]
    assert answer[:2] == [2, "ReplicaStats"]


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_request_that_fails_of_a_death_reports_the_death(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_program, "WATCH_SECONDS", 60)  # nobody else looks

    async def script(bench: Bench) -> None:
        bench.generate(by_ids("a", seconds=0.05))
        bench.call(1, "collective_rpc", method="die", args=(), kwargs=None)
        await bench.until_sent(2)

    kinds = [message[0] for message in serve(script).sent]
    assert kinds == ["result", "died"]
