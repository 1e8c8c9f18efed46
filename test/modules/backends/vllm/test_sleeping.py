"""An engine that sleeps: what is asked of vLLM, in which order, and who waits. vLLM needs a GPU for that: a fake."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from support.llm import FakeLLM
from torchrl_moe.errors import EngineError, WeightSyncError
from torchrl_moe.modules.backends.replica import SwapReport
from torchrl_moe.modules.backends.vllm.engine_process import EngineSleep
from torchrl_moe.modules.backends.vllm.weights import EngineWeights

PAUSE = ("pause", "wait", True)


class Bench:
    """A sleeper over a fake engine that knows whether it is paused."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.weights = EngineWeights(self.engine, dict)
        self.sleeping = EngineSleep(self.engine, self.weights)

    async def swap(self, version: int = 7) -> SwapReport:
        return await self.sleeping.swap(version, "keep", False, None, math.inf)

    @property
    def log(self) -> list[Any]:
        seen, self.engine.log = self.engine.log, []
        return seen


class Engine(FakeLLM):
    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await super().pause_generation(mode=mode, clear_cache=clear_cache)
        self.is_paused = True

    async def resume_generation(self) -> None:
        await super().resume_generation()
        self.is_paused = False


def test_requests_that_come_while_it_sleeps_wait_until_all_of_it_is_awake() -> None:
    async def run() -> None:
        bench = Bench()
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

    asyncio.run(run())


def test_one_that_was_paused_is_paused_afterwards() -> None:
    async def run() -> None:
        bench = Bench()
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

    asyncio.run(run())


def test_one_that_is_to_sleep_in_a_swap_does_not_take_its_pause_for_the_users() -> None:
    async def run() -> None:
        bench = Bench()
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

    asyncio.run(run())


def test_an_update_wakes_the_weights_alone_and_leaves_it_paused() -> None:
    async def run() -> None:
        bench = Bench()
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

    asyncio.run(run())


def test_weights_that_were_dropped_are_updated_before_it_serves() -> None:
    async def run() -> None:
        bench = Bench()
        await bench.sleeping.sleep(2, "abort")
        for tags in (None, ["kv_cache"]):
            with pytest.raises(WeightSyncError, match="level 2 has dropped the weights; update them first"):
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

    asyncio.run(run())


@pytest.mark.parametrize("what", ["pause", "resume", "sleep deeper", "sleep half awake"])
def test_what_would_run_on_memory_that_is_gone_is_refused(what: str) -> None:
    async def run() -> None:
        bench = Bench()
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

    asyncio.run(run())


def test_one_that_could_not_sleep_serves_on() -> None:
    async def run() -> None:
        bench = Bench()
        bench.engine.fail["sleep"] = RuntimeError("memory usage increased")
        with pytest.raises(RuntimeError, match="memory usage increased"):
            await bench.sleeping.sleep(1, "wait")
        assert bench.log == [PAUSE, ("sleep", 1, "keep"), "resume"]
        await bench.weights.salt()

    asyncio.run(run())


def test_one_that_is_woken_before_its_requests_have_finished_never_sleeps() -> None:
    async def run() -> None:
        bench, finished = Bench(), asyncio.Event()
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

    asyncio.run(run())


def test_a_level_or_a_tag_that_vllm_does_not_have_and_an_engine_without_sleep_mode_are_refused() -> None:
    async def run() -> None:
        bench = Bench()
        with pytest.raises(ValueError, match=r"level must be 1 .* or 2 .*, got 0"):
            await bench.sleeping.sleep(0, "wait")
        with pytest.raises(ValueError, match="tags must be of 'weights' and 'kv_cache', got \\['scheduling'\\]"):
            await bench.sleeping.wake_up(["scheduling"])
        bench.engine.model_config = SimpleNamespace(enable_sleep_mode=False)
        with pytest.raises(ValueError, match="start the engine with enable_sleep_mode=True; vLLM has it on GPUs only"):
            await bench.sleeping.sleep(1, "wait")
        assert bench.log == []

    asyncio.run(run())
