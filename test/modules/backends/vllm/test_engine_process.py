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
    Request,
    SwapReport,
)
from torchrl_moe.modules.backends.vllm import engine_requests
from torchrl_moe.modules.backends.vllm.engine_process import EngineProbe, EngineProcess, load_logger
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
    assert load == Load(3, 2, 0.25, 5, 10, 4, 1, 1, 1000.0)
    record(2, 0, 1001.0, PrefixCacheStats(queries=6), num_running_reqs=1, kv_cache_usage=0.125)
    assert load == Load(1, 0, 0.125, 7, 16, 4, 1, 2, 1001.0)


# -- the probe ---------------------------------------------------------------------------------------------------------
class Core:
    """Answers a ping when it is let; counts them."""

    def __init__(self, free: bool = False) -> None:
        self.pings = 0
        self.free = asyncio.Event()
        self.error: Exception | None = None
        if free:
            self.free.set()

    async def is_paused(self) -> bool:
        self.pings += 1
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return False


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    """A busy process, taken for that of the engine."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
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
    def read() -> ProbeReport:
        return asyncio.run(EngineProbe(Core(free=True)).read(5.0))

    first = read()
    until(lambda: read().cpu_seconds >= first.cpu_seconds + 0.1)
    assert not read().stopped
    leader.send_signal(signal.SIGSTOP)
    until(lambda: read().stopped)
    # it stands still as soon as the kernel has booked its last moments
    until(lambda: read().cpu_seconds == read().cpu_seconds)
    leader.send_signal(signal.SIGCONT)
    until(lambda: not read().stopped)


# -- sleep -------------------------------------------------------------------------------------------------------------
PAUSE, SLEEP, KEEP = ("pause", "wait", True), ("sleep", 1, "keep"), ("pause", "keep", False)


class Sleeper(EngineWeights):
    """A sleeper over a fake engine."""

    def __init__(self) -> None:
        super().__init__(FakeLLM(), dict)

    async def update(self, version: int = 7) -> SwapReport:
        return await self.swap(version, "keep", False, None, math.inf)

    @property
    def log(self) -> list[Any]:
        seen, self.engine.log = self.engine.log, []
        return seen


@in_loop
async def test_requests_that_come_while_it_sleeps_wait_until_all_of_it_is_awake() -> None:
    sleeper = Sleeper()
    for _ in range(2):  # nothing to do the second time
        await sleeper.sleep(1, "wait")
    assert sleeper.log == [PAUSE, SLEEP]
    coming = asyncio.ensure_future(sleeper.salt())
    # what would run on memory that is gone is refused
    for word, ask in (("pause", lambda: sleeper.pause("keep", False)), ("resume", sleeper.resume)):
        with pytest.raises(EngineError, match=rf"{word}: the engine sleeps; wake_up\(\) first"):
            await ask()
    for level in (2, 1):  # deeper; or again, half awake
        with pytest.raises(EngineError, match=r"sleep: the engine sleeps; wake_up\(\) first"):
            await sleeper.sleep(level, "wait")
        await sleeper.wake_up(["weights"])
    await asyncio.sleep(0)
    assert not coming.done()
    await sleeper.wake_up(None)
    assert await coming == {}
    assert sleeper.log == [("wake_up", ["weights"]), ("wake_up", ["kv_cache"]), "resume"]
    await sleeper.wake_up(None)
    assert sleeper.log == []


@in_loop
async def test_one_that_was_paused_is_paused_afterwards() -> None:
    sleeper = Sleeper()
    await sleeper.pause("keep", False)
    await sleeper.sleep(1, "wait")
    await sleeper.wake_up(None)
    assert sleeper.log == [KEEP, PAUSE, SLEEP, ("wake_up", ["kv_cache", "weights"]), KEEP]
    await sleeper.salt()  # it comes in, and waits in vLLM
    await sleeper.resume()
    assert sleeper.log == ["resume"]


@in_loop
async def test_one_that_is_to_sleep_in_a_swap_does_not_take_its_pause_for_the_users() -> None:
    sleeper, begun, go_on = Sleeper(), asyncio.Event(), asyncio.Event()
    load = sleeper._load

    async def slowly(version: int) -> None:
        begun.set()
        await go_on.wait()
        await load(version)

    sleeper._load = slowly  # type: ignore[method-assign]
    swap = asyncio.ensure_future(sleeper.update())
    await begun.wait()
    sleep = asyncio.ensure_future(sleeper.sleep(1, "wait"))
    await asyncio.sleep(0)
    go_on.set()
    assert (await swap).error is None
    await sleep
    await sleeper.wake_up(None)
    assert sleeper.log[-3:] == [SLEEP, ("wake_up", ["kv_cache", "weights"]), "resume"]


@in_loop
async def test_an_update_wakes_the_weights_alone_and_leaves_it_paused() -> None:
    sleeper = Sleeper()
    await sleeper.sleep(1, "wait")
    report = await sleeper.update()
    assert (report.error, report.unproved) == (None, "the engine is paused")
    load = [KEEP, "start", ("update", {"version": 7}), ("finish", "7")]
    assert sleeper.log == [PAUSE, SLEEP, ("wake_up", ["weights"]), *load]
    await sleeper.update(8)
    assert "wake_up" not in [step[0] for step in sleeper.log]
    await sleeper.wake_up(None)
    assert sleeper.log == [("wake_up", ["kv_cache"]), "resume"]
    assert await sleeper.salt() == {"cache_salt": "swap-2"}


@in_loop
async def test_weights_that_were_dropped_are_updated_before_it_serves() -> None:
    sleeper = Sleeper()
    await sleeper.sleep(2, "abort")
    for tags in (None, ["kv_cache"]):
        with pytest.raises(WeightSyncError, match="level 2 has dropped the weights"):
            await sleeper.wake_up(tags)
    sleeper.engine.fail["update"], sleeper.engine.whole = RuntimeError("out of memory"), [False]
    assert (await sleeper.update()).error == "RuntimeError: out of memory"
    with pytest.raises(WeightSyncError, match="update them first"):
        await sleeper.wake_up(None)
    sleeper.engine.fail.clear()
    assert (await sleeper.update()).error is None
    await sleeper.wake_up(None)
    await sleeper.salt()


@in_loop
async def test_one_that_could_not_sleep_serves_on() -> None:
    sleeper = Sleeper()
    sleeper.engine.fail["sleep"] = RuntimeError("memory usage increased")
    with pytest.raises(RuntimeError, match="memory usage increased"):
        await sleeper.sleep(1, "wait")
    assert sleeper.log == [PAUSE, SLEEP, "resume"]
    await sleeper.salt()


@in_loop
async def test_one_that_is_woken_before_its_requests_have_finished_never_sleeps() -> None:
    sleeper, finished = Sleeper(), asyncio.Event()
    pause = sleeper.engine.pause_generation

    async def wait(*, mode: str, clear_cache: bool) -> None:
        await finished.wait()
        await pause(mode=mode, clear_cache=clear_cache)

    sleeper.engine.pause_generation = wait  # type: ignore[method-assign]
    falling = asyncio.ensure_future(sleeper.sleep(1, "wait"))
    await asyncio.sleep(0)
    await sleeper.wake_up(None)
    finished.set()
    with pytest.raises(EngineError, match="was woken before its requests had finished"):
        await falling
    assert "sleep" not in [step[0] for step in sleeper.log]


@in_loop
async def test_a_level_or_a_tag_that_vllm_does_not_have_and_an_engine_without_sleep_mode_are_refused() -> None:
    sleeper = Sleeper()
    with pytest.raises(ValueError, match=r"level must be 1 .* or 2 .*, got 0"):
        await sleeper.sleep(0, "wait")
    with pytest.raises(ValueError, match="tags must be of 'weights' and 'kv_cache', got \\['scheduling'\\]"):
        await sleeper.wake_up(["scheduling"])
    sleeper.engine.model_config = SimpleNamespace(enable_sleep_mode=False)
    with pytest.raises(ValueError, match="start the engine with enable_sleep_mode=True; vLLM has it on GPUs only"):
        await sleeper.sleep(1, "wait")
    assert sleeper.log == []


# -- the process -------------------------------------------------------------------------------------------------------
class Bench:
    """An engine process around a toy engine, and what it sent."""

    def __init__(self) -> None:
        self.engine = toy_engine.ToyEngine()
        self.messages: asyncio.Queue[link.Message] = asyncio.Queue()
        self.sent: list[tuple[Any, ...]] = []
        info = ReplicaInfo(model="toy", layout=None, max_model_len=8)
        self.process = EngineProcess(self.engine, info, Load(3, 2, 0.5), self, self._send)  # type: ignore[arg-type]

    def put(self, message: link.Message) -> None:
        self.messages.put_nowait(message)

    def _send(self, message: tuple[Any, ...]) -> None:
        kind, driver, body = message
        assert driver == ""
        if kind == "encoded":
            self.sent.append(("result", link.decode(body[1:])))
        elif kind != "stats":  # these come by themselves
            self.sent.append((kind, body))

    def generate(self, *requests: Request) -> None:
        self.put(("generate", "", requests))

    def call(self, number: int, verb: str, **kwargs: Any) -> None:
        self.put(("call", "", (number, verb, (), kwargs)))

    async def until_sent(self, count: int) -> list[tuple[Any, ...]]:
        async with asyncio.timeout(60.0):
            while len(self.sent) < count:
                await asyncio.sleep(0.001)
        return self.sent


Script = Callable[[Bench], Awaitable[None]]
Serve = Callable[[Script], Bench]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run a script against a serving process, then shut it down."""
    toy_engine.without_vllm(monkeypatch.setattr)
    monkeypatch.setattr(engine_program, "WATCH_SECONDS", 0.01)

    async def main(script: Script) -> Bench:
        bench = Bench()
        serving = asyncio.create_task(bench.process._serve())
        await script(bench)
        bench.put(engine_program.SHUTDOWN)
        await asyncio.wait_for(serving, 60.0)
        return bench

    return lambda script: asyncio.run(main(script))


def by_ids(request_id: str, **params: Any) -> Request:
    return ids_request(request_id, [1, 2], sampling_params=params)


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


def test_a_claim_that_waited_is_not_kept_by_a_driver_that_has_left(serve: Serve) -> None:
    async def script(bench: Bench) -> None:
        sent: list[Any] = []
        bench.process._send = sent.append
        async with bench.process._swapping:  # a swap of the owner is under way
            bench.put(("call", "guest", (1, "claim_weights", ("the guest", True), {})))
            bench.put(("left", "guest", None))
            await asyncio.sleep(0.01)
            assert sent == []
        async with asyncio.timeout(60.0):
            while not sent:
                await asyncio.sleep(0.001)
        assert not bench.process.owner.holds("guest")
        assert bench.process.owner.claim("maker", "the maker", False).granted

    serve(script)


def test_an_abort_spares_the_next_request_of_the_same_id(serve: Serve) -> None:
    async def script(bench: Bench) -> None:
        bench.generate(by_ids("again", seconds=9))
        await asyncio.sleep(0.05)
        bench.put(("abort", "", ["again"]))
        await bench.until_sent(1)
        bench.generate(by_ids("again", seconds=5 * engine_requests.ABORT_SECONDS))
        await bench.until_sent(2)

    assert [completion.aborted for _, completion in serve(script).sent] == [True, False]


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
        bench.process.updates.sends_adapters = True
        bench.call(0, "sleep", level=1, mode="wait")
        await bench.until_sent(1)
        bench.process.updates.sends_adapters = False
        bench.call(1, "sleep", level=1, mode="wait")
        await bench.until_sent(2)
        bench.generate(by_ids("a"))
        bench.call(2, "resume")
        await bench.until_sent(3)
        bench.call(3, "wake_up", tags=None)
        await bench.until_sent(5)

    bench = serve(script)
    assert [message[0] for message in bench.sent] == ["error", "result", "error", "result", "completions"]
    memory = "sleep: lora='adapter' loads into memory that would be gone: use lora='merged'"
    assert bench.sent[0][1][1:] == ("value", memory)
    assert bench.sent[2][1][1:] == ("engine", "EngineError: resume: the engine sleeps; wake_up() first")
    assert bench.engine.calls == [PAUSE, SLEEP, ("wake_up", ["kv_cache", "weights"]), ("resume",)]


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
