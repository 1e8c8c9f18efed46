"""Which engines follow recorded experts, and how their prefix cache tells blocks apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
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


# -- a worker's steps -------------------------------------------------------------------------------------------------


class Router:
    def _compute_routing(self, logits: str) -> str:
        return f"live {logits}"


class Runner:
    """What a step of vLLM's model runner is, and how deep in calls its routers are asked."""

    def __init__(self) -> None:
        self.routers = {layer: Router() for layer in (1, 3)}
        self.input_batch = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens_cpu=np.array([4, 0, 0]))
        self.routed_experts_capturer = SimpleNamespace(get_device_buffer=lambda: "recorded")
        self.log: list[Any] = []
        self.depth = 0

    def execute_model(self, scheduler_output: Any) -> list[str]:
        self._update_states(scheduler_output)
        if not scheduler_output.tokens:
            return []
        self._prepare_inputs(scheduler_output, np.array(scheduler_output.tokens))
        return self._model_forward(input_ids="ids")

    def _update_states(self, scheduler_output: Any) -> None:
        self.log.append("update")

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> str:
        self.log.append("prepare")
        return "prepared"

    def _model_forward(self, *, input_ids: str) -> list[str]:
        frame, self.depth = sys._getframe(), 0
        while frame is not None:
            frame, self.depth = frame.f_back, self.depth + 1  # type: ignore[assignment]
        return [router._compute_routing(f"{input_ids} {layer}") for layer, router in self.routers.items()]


class Follower:
    """Follows in layer 3, and writes down what it hears."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.follows = log, True
        self.rows: dict[str, Any] = {}

    def take(self, rows: Any, params: Any, ended: Any) -> None:
        self.log.append(("take", dict(rows), params, set(ended)))
        self.rows.update(rows)
        for name in ended:
            self.rows.pop(name, None)

    def begin(self, spans: Any) -> bool:
        self.log.append(("begin", spans))
        return self.follows

    def route(self, layer: int, live: Callable[[], Any]) -> Any:
        return "followed" if layer == 3 else live()

    def end(self, captured: Any) -> None:
        self.log.append(("end", captured))


def scheduled(*tokens: int, rows: Any = None, new: Any = (), ended: Any = ()) -> Any:
    output = SimpleNamespace(tokens=tokens, scheduled_new_reqs=list(new), finished_req_ids=set(ended))
    if rows is not None:
        setattr(output, _compat_routing.ROWS, rows)
    return output


@pytest.fixture
def driven() -> tuple[Runner, Follower, Callable[[bool], None]]:
    runner = Runner()
    follower = Follower(runner.log)
    return runner, follower, _compat_routing.drive_routers(runner, runner.routers, follower)


LIVE = ["live ids 1", "live ids 3"]


def test_a_step_that_follows_nothing_runs_the_model_as_if_nothing_were_in_place(driven: Any) -> None:
    """One more call around the model costs a step 5 %, where Python's stack of frames then ends in its hottest call."""
    runner, _, drive = driven
    assert runner.execute_model(scheduled(1, 1)) == LIVE
    before = runner.depth
    drive(True)
    runner.log.clear()
    assert runner.execute_model(scheduled(1, 1)) == LIVE
    assert runner.depth == before
    assert runner.log == ["update", "prepare"]
    assert all(not vars(router) for router in runner.routers.values())


def test_a_step_that_follows_asks_and_hears_what_was_recorded(driven: Any) -> None:
    runner, follower, drive = driven
    drive(True)
    new = SimpleNamespace(req_id="b", sampling_params="of b")
    assert runner.execute_model(scheduled(1, 3, rows={"a": "rows"}, new=[new])) == ["live ids 1", "followed"]
    assert runner.log == [
        ("take", {"a": "rows"}, {"b": "of b"}, set()),
        "update",
        "prepare",
        ("begin", [("a", 4, 1), ("b", 0, 3)]),
        ("end", "recorded"),
    ]
    follower.follows = False
    runner.log.clear()
    assert runner.execute_model(scheduled(1, 1)) == LIVE
    assert [one if isinstance(one, str) else one[0] for one in runner.log] == ["take", "update", "prepare", "begin"]


def test_requests_end_also_in_a_step_without_tokens(driven: Any) -> None:
    runner, follower, drive = driven
    drive(True)
    runner.execute_model(scheduled(1, 1, rows={"a": "rows"}))
    assert runner.execute_model(scheduled(ended=["a"])) == []
    assert follower.rows == {}
    runner.log.clear()
    assert runner.execute_model(scheduled(1, 1)) == LIVE
    assert runner.log == ["update", "prepare"]


def test_a_worker_can_be_told_to_route_live(driven: Any) -> None:
    runner, _, drive = driven
    drive(True)
    drive(False)
    assert runner.execute_model(scheduled(1, 1, rows={"a": "rows"})) == LIVE
    assert runner.log == ["update", "prepare"]
