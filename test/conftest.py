"""What the markers of pyproject.toml mean at run time, and the engine that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engines import EngineShelf, EngineSpec
    from torchrl_moe.modules import AsyncVLLM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts engine tests last, those of one engine together, and skips ``gpu`` tests where there is no CUDA device."""
    items.sort(key=_engine_order)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # asked only if such a test was collected

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _engine_order(item: pytest.Item) -> str:
    marker = item.get_closest_marker("engine")
    if marker is None:
        return ""
    # last on an engine: what changes its weights, and so its version
    last = "weight" in item.path.name
    return f"engine {marker.args} {sorted(marker.kwargs.items())} {last}"


def _spec(request: pytest.FixtureRequest) -> EngineSpec:
    from engines import EngineSpec

    marker = request.node.get_closest_marker("engine")
    assert marker is not None, "mark the test: @pytest.mark.engine(family, num_replicas=..., **engine_arguments)"
    return EngineSpec.of(*marker.args, **marker.kwargs)


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
    from engines import EngineShelf

    shelf = EngineShelf(tmp_path_factory.mktemp)
    yield shelf
    shelf.clear()


@pytest.fixture
def engine(request: pytest.FixtureRequest, shelf: EngineShelf) -> AsyncVLLM:
    """The shared engine that the test's ``engine`` marker describes. Leave it as you found it."""
    return shelf.get(_spec(request))


@pytest.fixture
def no_engine(shelf: EngineShelf) -> EngineShelf:
    """For a test that starts engines of its own: no shared one is alive."""
    shelf.clear()
    return shelf
