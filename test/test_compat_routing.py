"""Which engines follow recorded experts, and how their prefix cache tells blocks apart."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchrl_moe import _compat_routing
from torchrl_moe._compat_routing import SCHEDULERS


def test_importing_imports_no_vllm() -> None:
    code = "import sys, torchrl_moe._compat_routing; print('vllm' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def config_of(**fields: Any) -> SimpleNamespace:
    def part(**defaults: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: fields.get(name, value) for name, value in defaults.items()})

    return SimpleNamespace(
        scheduler_config=part(scheduler_cls=None, async_scheduling=True),
        model_config=part(enable_return_routed_experts=True, enforce_eager=True),
        parallel_config=part(data_parallel_size=1, use_ubatching=False),
        **vars(part(speculative_config=None, use_v2_model_runner=False)),
    )


@pytest.mark.parametrize(("asynchronous", "name"), [(True, "AsyncMoEScheduler"), (False, "MoEScheduler")])
def test_an_engine_gets_a_scheduler_of_ours(asynchronous: bool, name: str) -> None:
    config = config_of(async_scheduling=asynchronous)
    assert not _compat_routing.has_scheduler(config)
    _compat_routing.take_scheduler(config)
    assert config.scheduler_config.scheduler_cls == f"{SCHEDULERS}.{name}"
    assert _compat_routing.has_scheduler(config)
    assert _compat_routing.why_live(config) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"scheduler_cls": "mine.Scheduler"}, "a scheduler of your own, mine.Scheduler"),
        ({"use_v2_model_runner": True}, "Model Runner V2"),
    ],
)
def test_other_engines_keep_their_scheduler_and_route_live(fields: dict[str, Any], words: str) -> None:
    config = config_of(**fields)
    _compat_routing.take_scheduler(config)
    assert config.scheduler_config.scheduler_cls == fields.get("scheduler_cls")
    assert words in _compat_routing.why_live(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enable_return_routed_experts": False}, "captures no routes"),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"use_ubatching": True}, "enable_dbo"),
        ({"enforce_eager": False}, "enforce_eager=True turns both off"),
    ],
)
def test_what_an_engine_is_says_why_it_routes_live(
    fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    config = config_of(**fields)
    _compat_routing.take_scheduler(config)
    assert words in _compat_routing.why_live(config)


def test_a_release_that_keeps_rows_elsewhere_routes_live(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer

    config = config_of()
    _compat_routing.take_scheduler(config)
    monkeypatch.delattr(routed_experts_capturer, "RoutedExpertsManager")
    assert "keeps recorded rows elsewhere" in _compat_routing.why_live(config)


def test_steps_that_are_not_compiled_need_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    config = config_of(enforce_eager=False)
    _compat_routing.take_scheduler(config)
    assert _compat_routing.why_live(config) == ""


# -- the prefix cache -------------------------------------------------------------------------------------------------

ROWS = np.arange(5 * 2 * 2).reshape(5, 2, 2) % 8


def keys_of(rows: Any, start: int, stop: int, monkeypatch: pytest.MonkeyPatch, salt: str | None = None) -> Any:
    """The extra keys of one block of a request of vLLM's, which follows these rows."""
    from vllm.v1.core import block_pool, kv_cache_utils

    for module in (block_pool, kv_cache_utils):
        monkeypatch.setattr(module, "generate_block_hash_extra_keys", PLAIN)
    _compat_routing.key_blocks_by_rows(lambda request: request.rows)
    ours = kv_cache_utils.generate_block_hash_extra_keys
    assert ours is block_pool.generate_block_hash_extra_keys is not PLAIN
    _compat_routing.key_blocks_by_rows(lambda request: None)
    assert kv_cache_utils.generate_block_hash_extra_keys is ours  # once is enough
    request = SimpleNamespace(rows=rows, lora_request=None, mm_features=[], cache_salt=salt, prompt_embeds=None)
    return ours(request, start, stop, 0)[0]


def plain() -> Any:
    from vllm.v1.core import kv_cache_utils

    return kv_cache_utils.generate_block_hash_extra_keys


PLAIN = plain()


def test_a_block_is_named_by_the_rows_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = keys_of(ROWS, 0, 4, monkeypatch)
    assert len(first) == 1 and first == keys_of(ROWS.astype(np.int8), 0, 4, monkeypatch)
    other = ROWS.copy()
    other[2, 1] = other[2, 1, ::-1]
    assert keys_of(other, 0, 4, monkeypatch) != first
    assert keys_of(ROWS, 4, 8, monkeypatch) not in (None, first)  # a row of four


@pytest.mark.parametrize(("rows", "start"), [(None, 0), (ROWS, 8), (np.full((5, 2, 2), -1), 0)])
def test_a_block_that_follows_nothing_is_anybodys(rows: Any, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_of(rows, start, start + 4, monkeypatch) is None
    assert keys_of(rows, 0 if start == 0 else start, start + 4, monkeypatch, "salt") == (None if start else ("salt",))


def test_a_salt_stays_beside_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_of(ROWS, 0, 4, monkeypatch, "salt") == ("salt", *keys_of(ROWS, 0, 4, monkeypatch))


# -- the routers of a model -------------------------------------------------------------------------------------------


def model_of(monolithic: bool = False, **attributes: Any) -> Any:
    """A model with an expert layer that is decoder layer 2."""
    from torch import nn
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    class Runner(MoERunner):
        _quant_method: Any = SimpleNamespace(is_monolithic=monolithic)
        layer_id = 2

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.router = CPURouter(top_k=2, global_num_experts=4)
            vars(self).update(attributes)

    return nn.ModuleDict({"experts": Runner()})


def test_routers_are_found_by_their_layers() -> None:
    model = model_of()
    assert _compat_routing.routers_of(model) == {2: model["experts"].router}


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"monolithic": True}, "experts: SimpleNamespace routes inside its kernel"),
        ({"_moe_state": object()}, "experts: Runner takes experts that transformers' code has chosen"),
        ({"router": "none"}, "experts: str is no router that vLLM records"),
    ],
)
def test_a_layer_whose_experts_are_chosen_elsewhere_is_named(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _compat_routing.routers_of(model_of(**attributes))
