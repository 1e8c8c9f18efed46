"""Versions of an adapter in an engine made by hand: who gets which, and when an old one goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from support.llm import FakeLLM
from torchrl_moe.errors import DigestMismatch, EngineError, ManifestMismatch, WeightSyncError
from torchrl_moe.modules.backends.process.engine_program import FOLDER_VARIABLE
from torchrl_moe.modules.backends.vllm import weights as adapter_versions
from torchrl_moe.modules.backends.vllm.weights import FIRST_NUMBER, AdapterVersions
from torchrl_moe.weight_update.store import VersionsWriter, adapter_tensors


class Requests:
    """The adapters that requests have, and the one for those that come."""

    def __init__(self) -> None:
        self.adapter: Any = None
        self.version = 0
        self.used: list[Any] = []

    def change_adapter(self, adapter: Any, version: int) -> None:
        self.adapter, self.version = adapter, version

    def uses(self, adapter: Any) -> bool:
        return any(used is adapter for used in self.used)


class Bench:
    def __init__(self, folder: Path, lora: bool = True) -> None:
        self.folder, self.copies = folder / "store", folder / "copies"
        self.writer = VersionsWriter(self.folder, keep_versions=2)
        self.engine, self.requests = FakeLLM(lora=lora), Requests()
        self.versions = AdapterVersions(self.engine, self.requests)  # type: ignore[arg-type]

    async def stage(self, version: int) -> Any:
        files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"v%d" % version}
        manifest = self.writer.publish(adapter_tensors(files).items(), version)
        report = await self.versions.stage(version)
        assert (report.digest, report.nbytes) == (manifest.digest, 4)
        return report

    async def update(self, version: int) -> None:
        await self.stage(version)
        assert self.versions.swap(version).error is None

    async def until(self, *there: str) -> None:
        """Wait until these are loaded, and copies of these alone are on the disk."""
        async with asyncio.timeout(60.0):
            loaded = self.engine.adapters
            while sorted(loaded.values()) != list(there) or len(list(self.copies.iterdir())) != len(there):
                await asyncio.sleep(0.001)


Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(adapter_versions, "LEAVE_SECONDS", 0.001)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()

    def play(script: Callable[[Bench], Awaitable[None]]) -> None:
        async def main() -> None:
            bench = Bench(tmp_path)
            bench.versions.init({"folder": str(bench.folder)}, False)
            await script(bench)

        asyncio.run(main())

    return play


def test_new_requests_get_the_new_version_under_a_name_of_its_own(run: Run) -> None:
    async def script(bench: Bench) -> None:
        report = await bench.stage(1)
        assert bench.requests.adapter is None  # loaded, and used by nobody
        assert 0 < report.fetched <= report.seconds
        assert report.fetched + report.loaded == pytest.approx(report.seconds)
        assert bench.versions.swap(1).paused_seconds == 0.0
        first = bench.requests.adapter
        assert (first.lora_int_id, first.lora_name, bench.requests.version) == (
            *(FIRST_NUMBER, f"synced-{FIRST_NUMBER}"),
            1,
        )
        await bench.update(2)
        assert bench.requests.adapter.lora_int_id == FIRST_NUMBER + 1
        assert bench.requests.adapter != first  # vLLM compares names, in its prefix cache too
        await bench.until("v2")

    run(script)


def test_an_old_version_goes_when_no_request_uses_it_and_its_files_outlive_the_store(run: Run) -> None:
    async def script(bench: Bench) -> None:
        await bench.update(1)
        first = bench.requests.adapter
        bench.requests.used.append(first)
        for version in (2, 3, 4):
            await bench.update(version)
        await bench.until("v1", "v4")
        assert not (bench.folder / "adapter-v1").exists()
        assert (Path(first.lora_path) / "adapter_model.safetensors").read_text() == "v1"  # vLLM may read it again
        bench.requests.used.clear()
        await bench.until("v4")

    run(script)


def test_a_version_that_is_staged_and_never_used_is_dropped_by_the_next(run: Run) -> None:
    async def script(bench: Bench) -> None:
        await bench.stage(1)
        await bench.stage(2)
        await bench.until("v2")
        report = bench.versions.swap(1)
        assert (report.started, report.error) == (False, "adapter version 1 is not the one staged last")
        assert bench.versions.swap(2).error is None
        assert not bench.versions.swap(2).started  # nothing is staged now

    run(script)


def test_whole_weights_take_the_adapters_place(run: Run) -> None:
    async def script(bench: Bench) -> None:
        await bench.update(1)
        bench.versions.leave()
        bench.versions.leave()
        await bench.until()

    run(script)


def test_what_cannot_be_loaded_whole_is_refused_and_leaves_nothing(run: Run) -> None:
    async def script(bench: Bench) -> None:
        await bench.update(1)
        bench.engine.fail["load_adapter"] = Exception("LoRA rank 16 is greater than max_lora_rank 8.")
        with pytest.raises(ManifestMismatch, match="cannot load adapter version 2: LoRA rank 16 is greater"):
            await bench.stage(2)
        bench.engine.fail.clear()
        bench.engine.unused = [[f"layers.{n}.mlp.experts" for n in range(6)]]
        with pytest.raises(
            ManifestMismatch, match=r"6 modules that the engine does not adapt \(layers\.0\.mlp\.experts, .*, \.\.\.\)"
        ):
            await bench.stage(3)
        bench.engine.unused = [["a", "b"], ["b", "c"]]  # two pipeline stages
        with pytest.raises(ManifestMismatch, match=r"1 modules that the engine does not adapt \(b\): start it with"):
            await bench.stage(4)
        bench.engine.unused = [["a"], ["b"]]
        await bench.update(5)
        await bench.until("v5")

    run(script)


def test_files_that_are_not_what_was_published_are_not_loaded(run: Run) -> None:
    async def script(bench: Bench) -> None:
        await bench.update(1)
        path = bench.folder / "v1.safetensors"
        path.write_bytes(path.read_bytes().replace(b"v1", b"v9"))
        with pytest.raises(DigestMismatch):
            await bench.versions.stage(1)
        await bench.until("v1")

    run(script)


def test_an_engine_whose_weights_were_replaced_takes_no_adapter(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(ValueError, match="start the engine from the model that the adapter is for"):
        bench.versions.init({"folder": str(bench.folder)}, True)


def test_an_engine_without_lora_says_what_to_pass(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lora=False)
    with pytest.raises(ValueError, match="started without: pass enable_lora=True and max_lora_rank="):
        bench.versions.init({"folder": str(bench.folder)}, False)
    with pytest.raises(WeightSyncError, match="not initialised"):
        asyncio.run(bench.versions.stage(1))


def test_none_is_loaded_into_an_engine_that_sleeps(run: Run) -> None:
    async def script(bench: Bench) -> None:
        def refuse(what: str) -> None:
            raise EngineError(f"{what}: the engine sleeps")

        bench.versions = AdapterVersions(bench.engine, bench.requests, refuse)  # type: ignore[arg-type]
        bench.versions.init({"folder": str(bench.folder)}, False)
        with pytest.raises(EngineError, match="the update of an adapter: the engine sleeps"):
            await bench.stage(1)
        assert bench.engine.adapters == {}

    run(script)
