"""What the markers of pyproject.toml mean at run time, and the engine that tests share."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pathlib import Path

    from support.clusters import ClusterHolder
    from support.engines import EngineShelf
    from support.versions import Versions
    from torchrl_moe.modules import AsyncVLLM

# on a busy machine, an example and what makes it may take any time
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_collection() -> None:
    """Garbage is not looked for while tests are collected: there is little among a million new objects."""
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests with Ray, then those with an engine last, each engine's together; skips ``gpu`` and ``needs_vllm``.

    Under pytest-xdist, which hands out whole files, those that have such tests come first: they take longest.
    """
    items.sort(key=_engine_order)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _engine_order(item) == "")
    without_vllm, gpu = importlib.util.find_spec("vllm") is None, []
    for item in items:
        if without_vllm and item.get_closest_marker("needs_vllm"):
            item.add_marker(pytest.mark.skip(reason="needs vLLM"))
        gpu += [item] if item.get_closest_marker("gpu") else []
    if gpu:
        import torch  # asked only if such a test was collected

        for item in gpu if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported lives to the end: a million objects, which each full collection would read for a second.

    Python's own end collects all, or extension modules call what is left a leak.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out the tests as ``support.scheduling`` says, if files are asked for, as by ``make test``."""
    if config.getvalue("dist") != "loadfile":
        return None
    from support.scheduling import FileScheduling

    return FileScheduling(config, log)


def _engine_order(item: pytest.Item) -> str:
    marker = item.get_closest_marker("engine")
    if item.get_closest_marker("ray") is not None:
        return f"cluster {marker is not None}"
    if marker is None:
        return ""
    # last on an engine: what changes its weights, and so its version
    last = any(word in str(item.path.relative_to(item.config.rootpath)) for word in ("weight", "trainer"))
    return f"engine {marker.args} {sorted(marker.kwargs.items())} {last}"


@pytest.fixture(autouse=True)
def method_of_processes() -> Iterator[None]:
    """vLLM writes how processes start into this process when it makes a CPU configuration; engines then do not fork."""
    before = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    yield
    if before is None:
        os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two runs of one forward pass add up in the same order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineShelf]:
    """The holder of the shared engine and of the models' folders."""
    from support.engines import EngineShelf

    shelf = EngineShelf(tmp_path_factory.mktemp)
    yield shelf
    shelf.clear()


@pytest.fixture(scope="session")
def second_engine(shelf: EngineShelf) -> Iterator[AsyncVLLM]:
    """Two replicas of plain transformers over a tiny MoE; leave their weights as you found them."""
    from torchrl_moe.modules import AsyncVLLM

    folder = shelf.folder("qwen3_moe")
    arguments: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
    with AsyncVLLM.from_pretrained(folder, num_replicas=2, engine="transformers", **arguments) as engine:
        yield engine


@pytest.fixture(scope="session")
def clusters() -> Iterator[ClusterHolder]:
    """The holder of the Ray cluster that tests share."""
    from support.clusters import ClusterHolder

    holder = ClusterHolder()
    yield holder
    holder.clear()


@pytest.fixture
def ray_cluster(clusters: ClusterHolder, shelf: EngineShelf) -> ClusterHolder:
    """A Ray cluster of two nodes with two CPUs each, which this process is in; no shared engine is alive beside it.

    Mark the test ``ray`` too: then it runs beside the others.
    """
    shelf.clear()
    clusters.start()
    return clusters


@pytest.fixture
def ray_pair(request: pytest.FixtureRequest, ray_cluster: ClusterHolder, shelf: EngineShelf) -> AsyncVLLM:
    """Two real replicas in the cluster, one on each node, under the name "test-pair"."""
    # They fill both nodes: tests that place actors of their own must have run before.
    assert request.node.get_closest_marker("engine") is not None, "mark the test: @pytest.mark.engine"
    return ray_cluster.pair(shelf.folder("qwen3_moe"))


@pytest.fixture
def engine(request: pytest.FixtureRequest, shelf: EngineShelf, clusters: ClusterHolder) -> AsyncVLLM:
    """The shared engine that the test's ``engine`` marker describes. Leave it as you found it."""
    from support.engines import EngineSpec

    marker = request.node.get_closest_marker("engine")
    assert marker is not None, "mark the test: @pytest.mark.engine(family, num_replicas=..., **engine_arguments)"
    clusters.clear()
    return shelf.get(EngineSpec.of(*marker.args, **marker.kwargs))


@pytest.fixture
def versions(engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path) -> Iterator[Versions]:
    """Versions that a test of a ``qwen3_moe`` engine brings to it by hand; its own weights come back afterwards."""
    from support.versions import Versions

    made = Versions(engine, shelf, "qwen3_moe", tmp_path, "memmap")
    yield made
    made.close()


@pytest.fixture
def no_engine(shelf: EngineShelf) -> EngineShelf:
    """For a test that starts engines of its own: no shared one is alive."""
    shelf.clear()
    return shelf
