"""The schedulers are vLLM's, with one switch set by what the engine is; real ones are in test_forced_routing.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.engines import EngineShelf
from support.scheduler import Steps
from torchrl_moe._compat_routing import SCHEDULERS
from torchrl_moe.modules.backends.vllm.forced_rows import Forced, attach, forced_of


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("name", ["MoEScheduler", "AsyncMoEScheduler"])
def test_a_scheduler_hands_masks_on_whatever_the_model_says(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from torchrl_moe.modules.backends.vllm import schedulers

    seen: list[Any] = []

    def init(self: Any, vllm_config: Any, *, block_size: int) -> None:
        seen.append((vllm_config, block_size))
        self.vllm_config, self.return_sampling_mask = vllm_config, False

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(schedulers.AsyncScheduler, "__init__", init)
    model = SimpleNamespace(logprobs_mode=mode, logits_processors=None, enable_return_routed_experts=False)
    scheduling = SimpleNamespace(scheduler_cls=f"{SCHEDULERS}.{name}")
    config = SimpleNamespace(
        model_config=model,
        scheduler_config=scheduling,
        parallel_config=SimpleNamespace(data_parallel_size=1, use_ubatching=False),
    )
    scheduler = getattr(schedulers, name)(config, block_size=16)
    assert scheduler.return_sampling_mask is (mode == "processed_logprobs")
    assert seen == [(config, 16)]


def test_the_schedulers_are_those_that_vllm_would_take() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from torchrl_moe.modules.backends.vllm.schedulers import AsyncMoEScheduler, MoEScheduler

    assert MoEScheduler.__bases__ == (Scheduler,)
    assert AsyncMoEScheduler.__mro__[1:4] == (MoEScheduler, AsyncScheduler, Scheduler)


# -- requests that are read again -------------------------------------------------------------------------------------

STORE = np.arange(20 * 2 * 2, dtype=np.uint8).reshape(20, 2, 2)  # the rows of all tokens, by their places


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that follows, over a vLLM that does nothing; a request has all blocks."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from torchrl_moe.modules.backends.vllm.schedulers import MoEScheduler

    monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, request, timestamp, drop_stale_output: None)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, scheduler_output, output: output(self))
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda self, running, connector: True)
    made = MoEScheduler.__new__(MoEScheduler)
    made._follows, made._leaving, made._weight_check, made.requests = True, {}, "", {}
    made.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: ([0, 1],))
    made.routed_experts_mgr = SimpleNamespace(
        attn_gid=0, get=lambda blocks, stop, token_start: STORE[token_start:stop].copy()
    )
    return made


def a_request(scheduler: Any, prompt: int, answer: int, forced: Forced | None = None) -> Any:
    params = SimpleNamespace(extra_args=None)
    params.clone = lambda: SimpleNamespace(**vars(params))
    made = SimpleNamespace(
        request_id="a",
        sampling_params=params if forced is None else attach(params, forced),
        num_tokens=prompt + answer,
        num_output_tokens=answer,
        num_in_flight_tokens=0,
        num_stale_output_tokens=0,
        block_hashes=["old"],
    )
    made.update_block_hashes = lambda: made.block_hashes.append("new")
    scheduler.requests["a"] = made
    return made


def preempt(scheduler: Any, request: Any, drop: bool = False) -> Any:
    scheduler._preempt_request(request, 0.0, drop)
    return forced_of(request)


def test_a_preempted_request_keeps_the_rows_of_the_tokens_that_it_has(scheduler: Any) -> None:
    """The last token's comes with the next one. What came since is added when it is preempted again."""
    request = a_request(scheduler, prompt=3, answer=2)
    forced = preempt(scheduler, request)
    assert forced.is_recorded
    assert (forced.rows == STORE[:4]).all()
    request.num_tokens += 2
    request.num_output_tokens += 2
    before = forced.rows
    forced = preempt(scheduler, request)
    assert (forced.rows == STORE[:6]).all()
    assert (forced.rows[:4] == before).all()


def test_a_request_without_a_token_has_no_rows_to_keep(scheduler: Any) -> None:
    assert preempt(scheduler, a_request(scheduler, prompt=3, answer=0)).rows is None
    given = Forced(rows=np.full((2, 2, 2), 7, np.int8))
    forced = preempt(scheduler, a_request(scheduler, prompt=3, answer=0, forced=given))
    assert (forced.rows == given.rows).all()
    assert not forced.is_recorded


def test_rows_that_the_model_chose_among_given_ones_are_kept_too(scheduler: Any) -> None:
    """Given rows may hold -1: that is how they were read the first time, and not the next."""
    given = np.full((3, 2, 2), -1, np.int8)
    given[0] = 7
    forced = preempt(scheduler, a_request(scheduler, prompt=3, answer=1, forced=Forced(rows=given)))
    assert (forced.rows == STORE[:3]).all()


def test_a_request_that_is_to_be_routed_live_keeps_none(scheduler: Any) -> None:
    request = a_request(scheduler, prompt=3, answer=2, forced=Forced(is_live=True))
    assert preempt(scheduler, request).rows is None


def test_tokens_under_way_at_a_preemption_bring_their_rows(scheduler: Any) -> None:
    request = a_request(scheduler, prompt=3, answer=2)
    request.num_in_flight_tokens = request.num_stale_output_tokens = 1
    assert len(preempt(scheduler, request).rows) == 4

    def deliver(scheduler: Any) -> str:
        request.num_tokens += 1
        request.num_output_tokens += 1
        request.num_stale_output_tokens = 0
        return "outputs"

    assert scheduler.update_from_output(None, deliver) == "outputs"
    assert (forced_of(request).rows == STORE[:5]).all()
    assert not scheduler._leaving


def test_a_request_that_ends_with_tokens_under_way_is_forgotten(scheduler: Any) -> None:
    request = a_request(scheduler, prompt=3, answer=2)
    request.num_in_flight_tokens = 1
    preempt(scheduler, request)
    assert scheduler._leaving
    scheduler.update_from_output(None, lambda scheduler: scheduler.requests.clear())
    assert not scheduler._leaving


@pytest.mark.parametrize(("answer", "running", "names"), [(2, True, ["new"]), (0, True, ["old"]), (2, False, ["old"])])
def test_a_reset_gives_the_blocks_of_what_is_read_again_other_names(
    scheduler: Any, answer: int, running: bool, names: list[str]
) -> None:
    """Also where the request was preempted before: other weights compute its blocks, by the rows of the old ones."""
    request = a_request(scheduler, prompt=3, answer=answer)
    preempt(scheduler, request)
    assert request.block_hashes == ["old"]
    assert scheduler.reset_prefix_cache(running, False)
    assert request.block_hashes == names


# -- the question that tries new weights ------------------------------------------------------------------------------

PLACES = 4
Make = Callable[..., Steps]


@pytest.fixture(params=[False, True], ids=["waits for each step", "begins a step during another"])
def make(request: pytest.FixtureRequest, shelf: EngineShelf) -> Make:
    """Make a scheduler with four places that reads up to 64 tokens a step."""

    def make(**arguments: Any) -> Steps:
        common = {"max_num_seqs": PLACES, "max_num_batched_tokens": 64, "max_model_len": 256}
        return Steps(shelf.folder("qwen3_moe"), request.param, **{**common, **arguments})

    return make


def fill(steps: Steps, requests: int = 20, tokens: int = 30) -> None:
    """Four requests run, and more wait; none has ended."""
    for number in range(requests):
        steps.add(str(number), prompt=10, max_tokens=tokens, priority=number)
    while min(steps.tokens[str(number)] for number in range(PLACES)) < 3:
        steps.step()
    assert len(steps.core.waiting) == requests - PLACES
    steps.drain()


def finish(steps: Steps) -> None:
    for _ in range(1000):
        steps.step()
        if not steps.core.requests:
            break


def test_a_question_is_answered_by_the_first_step_of_a_full_engine_and_takes_nobodys_place(make: Make) -> None:
    steps = make()
    fill(steps)
    running = list(steps.core.running)
    steps.add("check", prompt=16, max_tokens=1, check=True)
    assert steps.step() == {"check": 16}
    assert sorted(steps.step()) == ["0", "1", "2", "3"]
    assert steps.tokens["check"] == 1
    assert steps.core.running == running
    finish(steps)
    assert steps.tokens == {**{str(number): 30 for number in range(20)}, "check": 1}
    assert steps.most == steps.core.max_num_running_reqs == PLACES
    assert not any(request.num_preemptions for request in running)


def test_a_question_longer_than_a_step_gets_as_many_as_it_needs(make: Make) -> None:
    steps = make()
    fill(steps)
    steps.add("check", prompt=150, max_tokens=1, check=True)
    assert [steps.step() for _ in range(3)] == [{"check": 64}, {"check": 64}, {"check": 22}]
    steps.step()
    assert steps.tokens["check"] == 1
    finish(steps)
    assert set(steps.tokens.values()) == {1, 30}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_question_takes_blocks_from_the_request_that_vllm_would_take_them_from(make: Make, policy: str) -> None:
    """Here the last: it came last, and is the least urgent. It is read again, and loses no token."""
    steps = make(blocks=1 + PLACES, scheduling_policy=policy)
    fill(steps, tokens=5)  # a block each, and none is left
    first, *others, last = steps.core.running
    steps.add("check", prompt=15, max_tokens=1, check=True, priority=1000)
    assert steps.step() == {"check": 15}
    assert [one.num_preemptions for one in (first, *others, last)] == [0, 0, 0, 1]
    finish(steps)
    assert steps.tokens == {**{str(number): 5 for number in range(20)}, "check": 1}


def test_questions_are_forgotten_when_they_are_over_or_given_up(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    steps = make()
    fill(steps)
    steps.add("given up", prompt=16, max_tokens=1, check=True)
    steps.core.finish_requests("given up", RequestStatus.FINISHED_ABORTED)
    assert sorted(steps.step()) == ["0", "1", "2", "3"]
    steps.drain()
    for name in ("first", "second"):
        steps.add(name, prompt=16, max_tokens=1, check=True)
        assert steps.step() == {name: 16}
        steps.drain()
    finish(steps)
    assert set(steps.tokens.values()) == {0, 1, 30}


def test_a_question_that_comes_in_the_middle_of_a_step_disturbs_no_token(make: Make) -> None:
    steps = make()
    fill(steps)
    steps.step()
    steps.add("check", prompt=16, max_tokens=1, check=True)
    assert steps.step() == {"check": 16}
    finish(steps)
    assert set(steps.tokens.values()) == {1, 30}
