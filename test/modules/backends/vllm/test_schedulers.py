"""What our schedulers add to vLLM's; under a real engine they are in test_forced_routing.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.engines import EngineShelf
from support.scheduler import Steps
from torchrl_moe.modules.backends.vllm.engine_requests import Forced, attach, forced_in, forced_of

# -- requests that are read again -------------------------------------------------------------------------------------

STORE = np.arange(20 * 2 * 2, dtype=np.uint8).reshape(20, 2, 2)  # the rows of all tokens


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that follows, over a vLLM that does nothing but preempt."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    from torchrl_moe.modules.backends.vllm.forced_routing import MoEScheduler

    def preempt(self: Any, request: Any, timestamp: float, drop_stale_output: bool) -> None:
        request.status = RequestStatus.PREEMPTED

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda self, running, connector: True)
    made = MoEScheduler.__new__(MoEScheduler)
    made._follows, made._weight_check, made.requests = True, "", {}
    made._deliver = lambda request, output: output
    return made


def a_request(scheduler: Any, prompt: int, forced: Forced | None = None) -> Any:
    params = SimpleNamespace(extra_args=None)
    params.clone = lambda: SimpleNamespace(**vars(params))
    made = SimpleNamespace(
        request_id="a",
        sampling_params=params if forced is None else attach(params, forced),
        num_tokens=prompt,
        status="running",
        block_hashes=["old"],
    )
    made.update_block_hashes = lambda: made.block_hashes.append("new")
    scheduler.requests["a"] = made
    return made


def sample(scheduler: Any, request: Any, tokens: int = 1, start: int | None = None) -> None:
    """Tokens come, each with the rows of those before it that were not delivered yet."""
    for _ in range(tokens):
        had = request.num_tokens - 1 if start is None else start
        request.num_tokens += 1
        rows = STORE[had : request.num_tokens - 1]
        assert scheduler._take_and_keep(request, rows) is rows
        start = None


def preempt(scheduler: Any, request: Any, drop: bool = False) -> Any:
    scheduler._preempt_request(request, 0.0, drop)
    return forced_in(request.sampling_params)  # what the workers get


def test_a_preempted_request_keeps_the_rows_of_the_tokens_that_it_has(scheduler: Any) -> None:
    """The last token's comes with the next one. What came since is added when it is preempted again."""
    request = a_request(scheduler, prompt=3)
    sample(scheduler, request, start=0)
    sample(scheduler, request)
    assert (preempt(scheduler, request).rows == STORE[:4]).all()
    assert forced_of(request).is_recorded
    request.status = "running"
    sample(scheduler, request, 2)
    assert (preempt(scheduler, request).rows == STORE[:6]).all()


def test_a_request_without_a_token_has_no_rows_to_keep(scheduler: Any) -> None:
    assert preempt(scheduler, a_request(scheduler, prompt=3)).rows is None
    given = Forced(rows=np.full((2, 2, 2), 7, np.int8))
    request = a_request(scheduler, prompt=3, forced=given)
    assert (preempt(scheduler, request).rows == given.rows).all()
    assert not forced_of(request).is_recorded


def test_rows_from_before_those_that_are_delivered_are_the_given_ones(scheduler: Any) -> None:
    """The rest of an answer follows what it had, and asks for its own rows only; where it has none, routers choose."""
    given = np.full((2, 2, 2), 7, np.int8)
    request = a_request(scheduler, prompt=5, forced=Forced(rows=given))
    sample(scheduler, request, start=4)
    rows = preempt(scheduler, request).rows
    assert (rows[:2] == 7).all() and (rows[2:4] == -1).all() and (rows[4:] == STORE[4:5]).all()


def test_tokens_under_way_at_a_preemption_bring_their_rows(scheduler: Any) -> None:
    request = a_request(scheduler, prompt=3)
    sample(scheduler, request, start=0)
    assert len(preempt(scheduler, request).rows) == 3
    sample(scheduler, request)
    assert (forced_in(request.sampling_params).rows == STORE[:4]).all()
    assert (forced_of(request).rows == STORE[:4]).all()


@pytest.mark.parametrize(("answer", "running", "names"), [(2, True, ["new"]), (0, True, ["old"]), (2, False, ["old"])])
def test_a_reset_gives_the_blocks_of_what_is_read_again_other_names(
    scheduler: Any, answer: int, running: bool, names: list[str]
) -> None:
    """Also where the request was preempted before: other weights compute its blocks, by the rows of the old ones."""
    request = a_request(scheduler, prompt=3)
    sample(scheduler, request, answer, start=0)
    preempt(scheduler, request)
    assert request.block_hashes == ["old"]
    assert scheduler.reset_prefix_cache(running, False)
    assert request.block_hashes == names


# -- the prefix cache -------------------------------------------------------------------------------------------------

ROWS = np.arange(5 * 2 * 2).reshape(5, 2, 2) % 8


def keys_of(rows: Any, start: int, stop: int, salt: str | None = None) -> Any:
    """The extra keys of one block of a request of vLLM's, which follows these rows."""
    from vllm.v1.core import block_pool, kv_cache_utils

    from torchrl_moe.modules.backends.vllm import forced_routing as schedulers

    schedulers._key_blocks_by_rows()
    ours = kv_cache_utils.generate_block_hash_extra_keys
    schedulers._key_blocks_by_rows()
    assert kv_cache_utils.generate_block_hash_extra_keys is ours is block_pool.generate_block_hash_extra_keys
    request = SimpleNamespace(
        torchrl_moe_forced=Forced(rows=rows), lora_request=None, mm_features=[], cache_salt=salt, prompt_embeds=None
    )
    return ours(request, start, stop, 0)[0]


def test_a_block_is_named_by_the_rows_in_it() -> None:
    first = keys_of(ROWS, 0, 4)
    assert len(first) == 1 and first == keys_of(ROWS.astype(np.int8), 0, 4)
    other = ROWS.copy()
    other[2, 1] = other[2, 1, ::-1]
    assert keys_of(other, 0, 4) != first
    assert keys_of(ROWS, 4, 8) not in (None, first)  # a row of four


@pytest.mark.parametrize(("rows", "start"), [(None, 0), (ROWS, 8), (np.full((5, 2, 2), -1), 0)])
def test_a_block_that_follows_nothing_is_anybodys(rows: Any, start: int) -> None:
    assert keys_of(rows, start, start + 4) is None
    assert keys_of(rows, start, start + 4, "salt") == (None if start else (("cache_salt", "salt"),))


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
    assert steps.most == steps.core.max_num_active_reqs == PLACES
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
