"""The rules of weights that all engines have: whose they are, what was staged, two drivers at the same time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.engine import CALLER, Engine, WeightOwner, compare_log_probs
from torchrl_moe.modules.backends.engine_kind import engine_kind
from torchrl_moe.modules.backends.replica import StageReport, SwapReport, WeightClaim

# -- claims ------------------------------------------------------------------------------------------------------------


def test_a_driver_that_lives_keeps_its_claim() -> None:
    owner = WeightOwner()
    owner.check("a")  # nobody has claimed anything
    assert not owner.holds("a")
    assert owner.claim("a", "first", takeover=False) == WeightClaim(granted=True, owner="first")
    assert owner.claim("b", "second", takeover=False) == WeightClaim(granted=False, owner="first")
    assert owner.claim("a", "first", takeover=False).granted
    owner.check("a")
    assert (owner.holds("a"), owner.holds("b")) == (True, False)
    with pytest.raises(WeightSyncError, match="takes its weights from first now"):
        owner.check("b")


@pytest.mark.parametrize("end", ["given up", "taken over"])
def test_a_claim_ends(end: str) -> None:
    owner = WeightOwner()
    owner.claim("a", "first", takeover=False)
    if end == "given up":
        owner.give_up("a")
        with pytest.raises(WeightSyncError, match="takes its weights from a driver that is gone now"):
            owner.check("b")
    assert owner.claim("b", "second", takeover=end == "taken over").granted
    assert (owner.holds("a"), owner.holds("b")) == (False, True)
    with pytest.raises(WeightSyncError, match="takes its weights from second now"):
        owner.check("a")


# -- an engine's verbs about weights -----------------------------------------------------------------------------------


class Halves(Engine):
    """Weights in two halves, loaded one after the other under a pause; it does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = self
        self.found = 0  # what the store has under any number
        self.halves = (0, 0)
        self.fetched = 0
        self.is_paused = False

    async def open(self, transport: str, options: Any) -> None:
        assert transport == "memmap"

    async def stage(self, version: int, *how: Any) -> StageReport:
        found = self.found
        await asyncio.sleep(0.001)
        self.fetched = found
        return StageReport(seconds=0.0, nbytes=0, digest=f"digest {found}")

    async def swap(self, version: int, *how: Any) -> SwapReport:
        self.is_paused = True
        await asyncio.sleep(0.001)
        self.halves = (self.fetched, self.halves[1])
        await asyncio.sleep(0.001)
        self.halves = (self.halves[0], self.fetched)
        await asyncio.sleep(0.001)
        self.is_paused = False
        return SwapReport()


Halves.__abstractmethods__ = frozenset()


def stage(engine: Halves, version: int = 5) -> Coroutine[Any, Any, StageReport]:
    return engine.stage_weights(version, "digest", 1, None)


def swap(engine: Halves, digest: str, version: int = 5) -> Coroutine[Any, Any, SwapReport]:
    return engine.swap_weights(version, digest, "keep", False, None)


def test_a_version_is_known_by_its_bytes_and_not_by_its_number() -> None:
    async def run() -> None:
        engine = Halves()
        for digest in ("", "digest 1"):
            refused = await swap(engine, digest)  # nothing was staged
            assert (refused.started, refused.error) == (False, "version 5 is not what was staged last")
        engine.found = 1
        mine = (await stage(engine)).digest
        engine.found = 2
        await stage(engine)  # the same number, by another driver
        assert (await swap(engine, mine)).error == "version 5 is not what was staged last"
        assert engine.halves == (0, 0)

    asyncio.run(run())


def test_of_two_that_stage_at_the_same_time_the_first_hears_of_it() -> None:
    async def run() -> list[Any]:
        engine = Halves()
        return await asyncio.gather(stage(engine), stage(engine), return_exceptions=True)

    first, second = asyncio.run(run())
    assert isinstance(first, WeightSyncError) and "another version was staged meanwhile" in str(first)
    assert second.digest == "digest 0"


def test_a_driver_that_is_not_the_owner_changes_nothing() -> None:
    async def run() -> None:
        engine = Halves()
        CALLER.set("owner")
        assert (await engine.claim_weights("the owner", False)).granted
        digest = (await stage(engine)).digest
        CALLER.set("other")
        assert not await engine.owns_weights()
        await engine.give_up_weights()  # of a claim that it has not
        for refused in (stage(engine), engine.init_weights("memmap", {})):
            with pytest.raises(WeightSyncError, match="takes its weights from the owner now"):
                await refused
        report = await swap(engine, digest)
        assert (report.started, engine.halves) == (False, (0, 0))
        assert "takes its weights from the owner now" in str(report.error)
        CALLER.set("owner")
        assert await engine.owns_weights()
        assert (await swap(engine, digest)).error is None

    asyncio.run(run())


@pytest.mark.parametrize("offset", range(8))
def test_two_drivers_never_load_halves_of_two_versions(offset: int) -> None:
    """The second takes over at some moment of the first's update; whatever serves then is one version."""

    async def driver(engine: Halves, name: str, version: int, delay: int) -> SwapReport | str:
        CALLER.set(name)  # each of the tasks has its own
        for _ in range(delay):
            await asyncio.sleep(0.0005)
        await engine.claim_weights(name, True)
        try:
            await engine.init_weights("memmap", {})
            engine.found = version
            digest = (await stage(engine)).digest
            assert digest == f"digest {version}"
            return await swap(engine, digest)
        except WeightSyncError as error:
            return str(error)

    async def run() -> tuple[Any, Any, Halves]:
        engine, mixed = Halves(), []

        async def poll() -> None:
            while True:
                if not engine.is_paused and engine.halves[0] != engine.halves[1]:
                    mixed.append(engine.halves)
                await asyncio.sleep(0)

        polling = asyncio.create_task(poll())
        first, second = await asyncio.gather(driver(engine, "a", 1, 0), driver(engine, "b", 2, offset))
        polling.cancel()
        assert mixed == []
        return first, second, engine

    first, second, engine = asyncio.run(run())
    assert second.error is None  # who has the claim is not refused
    assert engine.halves == (2, 2)
    lost = first if isinstance(first, str) else first.error
    assert lost is None or "takes its weights from b now" in lost or "staged" in lost


# -- the comparison of log-probs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([-1.5, -2.25], r"up to 5.0e-01 \(at token 1: -1.5 and -1\)"),
        ([-1.5, math.nan], r"up to nan \(at token 2: nan and -2\)"),
        ([-1.0], "the canary has 2 log-probs for a prompt of 2 tokens"),
        ([math.inf, -2.0], r"up to inf \(at token 1"),
    ],
)
def test_the_largest_difference_is_named(got: list[float], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        compare_log_probs(got, [-1.0, -2.0], 1e-3)


# -- what an engine may leave out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        (Engine.sleep, (1, "keep"), "this engine has no sleep mode"),
        (Engine.wake_up, (None,), "this engine has no sleep mode"),
        (Engine.collective_rpc, ("x", (), None), "this engine has no workers to call"),
        (Engine.tokenizer, (), "this engine has no tokenizer"),
        (Engine.metadata, (), "this engine has no checkpoint"),
        (Engine.init_weights, ("memmap", {}), "this engine has no weights to update"),
        (Engine.stage_weights, (1, "digest", 1, None), "this engine has no weights to update"),
    ],
)
def test_what_an_engine_leaves_out_is_refused(verb: Any, arguments: tuple[Any, ...], message: str) -> None:
    async def run() -> None:
        engine = Halves()
        engine.updates = None
        await verb(engine, *arguments)

    with pytest.raises(ValueError, match=message):
        asyncio.run(run())


# -- which engine ------------------------------------------------------------------------------------------------------


def test_a_module_that_is_no_engine_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_an_engine.py").write_text("def preload(): return ''\n")
    (tmp_path / "own_engine.py").write_text("preload = run = print\ndef seeded(arguments, number): return number\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"engine='half_an_engine' has no function run\(\): docs/engines.md shows"):
        engine_kind("half_an_engine")
    for bad in ("sglang", "a b", "", 3, ["vllm"], None):
        with pytest.raises(ValueError, match="engine must be one of vllm, transformers, or a module of yours, got"):
            engine_kind(bad)  # type: ignore[arg-type]
    kind = engine_kind("own_engine")
    assert (kind.PROGRAM, kind.seeded({}, 7), kind.devices_per_replica({})) == ("own_engine", 7, 1)
    assert kind.arguments_of({"a": 1}) == {"a": 1}
    assert str(tmp_path) in kind.engine_environment()["PYTHONPATH"].split(":")
    with pytest.raises(TypeError, match="engine='own_engine' takes its arguments as a mapping, got 'model'"):
        kind.arguments_of("model")
