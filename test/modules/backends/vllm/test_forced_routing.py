"""Routers that follow recorded experts, the schedulers that keep them, and what they add to vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from support.engines import EngineShelf
from support.routes import rows_of
from support.scheduler import Steps
from torchrl_moe._compat import SCHEDULERS
from torchrl_moe.errors import ReplayError
from torchrl_moe.modules.backends.vllm.engine_requests import Forced, attach, forced_in, forced_of
from torchrl_moe.modules.backends.vllm.forced_routing import (
    FORMULAS,
    ForcedRouting,
    forced_routing_unavailable_reason,
    prove,
    routers_of,
    through_topk,
)

# -- one worker's steps -----------------------------------------------------------------------------------------------
LAYERS, WIDTH, EXPERTS, MOST = 4, 2, 8, 16


class Worker:
    """A model runner of vLLM's shape whose model is three routers; layer 0 has none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool = True, **fields: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        class Layer(MoERunner):
            _quant_method: Any = SimpleNamespace(is_monolithic=False)
            layer_id = 0

            def __init__(self, number: int) -> None:
                torch.nn.Module.__init__(self)
                self.layer_id, self.router = number, router(top_k=WIDTH, global_num_experts=EXPERTS, **fields)

        monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
        self.model = torch.nn.ModuleList([Layer(number) for number in (1, 2, 3)])
        model_config = SimpleNamespace(enforce_eager=enforce_eager, get_hidden_size=lambda: 4, dtype=torch.float32)
        self.vllm_config = SimpleNamespace(
            aux_output_config=SimpleNamespace(enabled=True),
            speculative_config=None,
            scheduler_config=SimpleNamespace(scheduler_cls=f"{SCHEDULERS}.MoEScheduler"),
            model_config=model_config,
            device_config=SimpleNamespace(device_type="cpu" if enforce_eager else "cuda"),
            parallel_config=SimpleNamespace(data_parallel_size=1, use_ubatching=False, use_sequence_parallel_moe=False),
        )
        self.captured = torch.zeros(MOST, LAYERS, WIDTH, dtype=torch.int32)
        self.delivers = True
        self.aux_output_connector = Connector(self)
        self.forced = ForcedRouting(self)

    def get_model(self) -> Any:
        return self.model

    def add_requests(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self._remove_request(new.req_id)

    def _remove_request(self, req_id: str) -> bool:
        return True

    def prepare_inputs(self, batch: Any) -> Any:
        return batch

    def begin(self, **params: Any) -> None:
        self.add_requests(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=name, sampling_params=one) for name, one in params.items()]
            )
        )

    def step(self, *spans: tuple[str, int, int], logits: Tensor | None = None) -> dict[int, tuple[Tensor, Tensor]]:
        """Run a step of these requests (name, first position, count); return what each router gave, by layer."""
        counts = [count for _, _, count in spans]
        starts = np.cumsum([0, *counts])
        batch = SimpleNamespace(
            req_ids=[name for name, _, _ in spans],
            num_reqs=len(spans),
            num_computed_tokens_np=np.array([start for _, start, _ in spans]),
            num_scheduled_tokens=np.array(counts),
            query_start_loc_np=starts,
        )
        self.prepare_inputs(batch)
        tokens = int(starts[-1])
        logits = SCORES[:tokens] if logits is None else logits
        given = {}
        for layer in self.model:
            given[layer.layer_id] = weights, ids = layer.router._compute_routing(
                torch.zeros(len(logits), 4), logits, torch.int32
            )
            assert weights.shape == ids.shape
            self.captured[: len(ids), layer.layer_id] = ids
        pending = self.aux_output_connector.prepare_output(batch)
        if pending is not None:
            pending.process_output()
        return given

    def firsts(self, *spans: tuple[str, int, int], layer: int = 1) -> list[int]:
        """The first expert of each token; a router that chooses by itself takes 0."""
        ids = self.step(*spans)[layer][1]
        assert (ids[:, 1] == ids[:, 0] + 1).all()
        return [int(first) for first in ids[:, 0]]


class Connector:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._capturer = SimpleNamespace(device_buffer=worker.captured)

    def prepare_output(self, batch: Any) -> Any:
        if not self.worker.delivers:
            return None
        recorded = self.worker.captured.numpy().astype(np.uint8)
        return SimpleNamespace(routed_experts=recorded, process_output=lambda: "processed")


SCORES = torch.arange(EXPERTS, 0, -1).float().expand(MOST, -1)


def params_of(rows: NDArray[Any] | None) -> Any:
    params = SimpleNamespace(extra_args=None)
    params.clone = lambda: SimpleNamespace(**vars(params))
    return params if rows is None else attach(params, Forced(rows=rows))


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_rows_follow_requests_in_chunks_and_beside_others(enforce_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs, which call no Python, the routers are the same before, during and after."""
    worker = Worker(monkeypatch, enforce_eager)
    assert worker.forced.forced_routing_unavailable_reason == ""
    before = [vars(layer.router).get("_compute_routing") for layer in worker.model]
    assert [one is not None for one in before] == [not enforce_eager] * 3
    worker.begin(a=params_of(rows_of(3, 4, -1, 5)), b=params_of(None))
    assert worker.firsts(("b", 0, 2), ("a", 0, 3)) == [0, 0, 3, 4, 0]
    assert worker.firsts(("a", 3, 3), ("b", 2, 1), layer=2) == [5, 0, 0, 0]
    assert worker.firsts(("a", 6, 1), ("b", 3, 1)) == [0, 0]
    if not enforce_eager:  # a step of a captured size reads more rows of the buffer than it has tokens
        ids = worker.step(("a", 0, 2), logits=SCORES[:8])[1][1]
        assert ids[:, 0].tolist() == [3, 4, 0, 0, 0, 0, 0, 0]  # those of a longer step are gone
    assert [vars(layer.router).get("_compute_routing") for layer in worker.model] == before


def test_a_request_that_ends_or_is_preempted_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    worker.begin(a=params_of(rows_of(3)))
    assert worker._remove_request("a") is True
    worker._remove_request("never seen")
    assert worker.firsts(("a", 0, 4)) == [0, 0, 0, 0]
    worker.begin(a=params_of(rows_of(3, 6, 2)))  # it comes back with more
    assert worker.firsts(("a", 0, 4)) == [3, 6, 2, 0]
    worker.begin(a=params_of(None))  # another one of that name
    assert worker.firsts(("a", 0, 4)) == [0, 0, 0, 0]


@pytest.mark.parametrize("delivers", [True, False])
def test_what_was_recorded_must_be_what_was_to_be_followed(delivers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each rank, the one that delivers the routes and the others."""
    worker = Worker(monkeypatch)
    worker.delivers = delivers
    worker.begin(a=params_of(rows_of(3, -1, 5)))
    worker.step(("a", 0, 3))
    deaf = worker.model[1].router
    worker.forced._routers[2] = deaf, deaf._compute_routing
    words = "layer 2 did not follow 2 of 2 recorded rows" if delivers else None
    with pytest.raises(ReplayError if delivers else RuntimeError, match=words):
        worker.step(("a", 0, 3))


@pytest.mark.parametrize(
    ("room", "fields", "words"),
    [
        ("aux_output_config", {"enabled": False}, "captures no routes"),
        ("", {"speculative_config": object()}, "speculative decoding"),
        ("scheduler_config", {"scheduler_cls": "mine.Scheduler"}, "a scheduler of your own, mine.Scheduler"),
        ("parallel_config", {"data_parallel_size": 2}, "data_parallel_size=2"),
        ("parallel_config", {"use_ubatching": True}, "enable_dbo"),
        ("parallel_config", {"use_sequence_parallel_moe": True}, "sequence parallel"),
        ("model_config", {"enforce_eager": False}, "enforce_eager=True"),
    ],
)
def test_an_engine_that_cannot_follow_says_why(
    room: str, fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Worker(monkeypatch).vllm_config
    assert forced_routing_unavailable_reason(config) == ""
    vars(getattr(config, room) if room else config).update(fields)
    assert words in forced_routing_unavailable_reason(config)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # steps that are not compiled call Python
    assert (forced_routing_unavailable_reason(config) == "") == (room == "model_config")


@pytest.mark.parametrize(
    ("where", "change", "words"),
    [
        ("_quant_method", {"is_monolithic": True}, "routes inside its kernel"),
        ("", {"_moe_state": 1}, "takes experts that transformers' code has chosen"),
        ("", {"router": "none"}, "str is no router that vLLM records"),
    ],
)
def test_a_layer_whose_experts_are_chosen_elsewhere_is_named(
    where: str, change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(monkeypatch)
    layer = worker.model[0]
    assert routers_of(worker.model) == {layer.layer_id: layer.router for layer in worker.model}
    vars(getattr(type(layer), where) if where else layer).update(change)
    with pytest.raises(ValueError, match=words):
        routers_of(worker.model)
    worker.forced.drive(False)
    assert words in ForcedRouting(worker).forced_routing_unavailable_reason


# -- vLLM's routers ---------------------------------------------------------------------------------------------------
def router(**fields: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    return CPURouter(**{"top_k": 3, "global_num_experts": 8, **fields})


def sigmoid_top_1(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> Any:
    """As Llama 4 routes."""
    scores, ids = torch.topk(gating_output, topk, dim=-1)
    return scores.float().sigmoid(), ids.int()


BIAS = torch.linspace(-1, 1, 8)
GROUPS = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
ROUTERS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    # arguments, and the weights of given experts by the formula of the family's paper
    "softmax": ({"renormalize": False}, lambda x, ids: x.softmax(-1).gather(1, ids)),
    "renormalised": ({}, lambda x, ids: x.gather(1, ids).softmax(-1)),
    "groups": (
        {**GROUPS, "renormalize": False, "routed_scaling_factor": 2.5},
        lambda x, ids: x.softmax(-1).gather(1, ids) * 2.5,
    ),
    "sigmoid, bias, groups": (
        {**GROUPS, "scoring_func": "sigmoid", "e_score_correction_bias": BIAS, "routed_scaling_factor": 2.0},
        lambda x, ids: x.sigmoid().gather(1, ids) / x.sigmoid().gather(1, ids).sum(-1, keepdim=True) * 2.0,
    ),
    "one group": (
        {**GROUPS, "num_expert_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "e_score_correction_bias": BIAS},
        lambda x, ids: x.sigmoid().gather(1, ids) / x.sigmoid().gather(1, ids).sum(-1, keepdim=True),
    ),
    "of the model's own": (
        {"custom_routing_function": sigmoid_top_1, "top_k": 1},
        lambda x, ids: x.gather(1, ids).sigmoid(),
    ),
    # an expert's weight alone does not tell how it was normalised: with one expert there is no order to change
    "one expert": ({"top_k": 1, "renormalize": False}, lambda x, ids: x.softmax(-1).gather(1, ids)),
    "one expert, renormalised": ({"top_k": 1}, lambda x, ids: torch.ones(ids.shape)),
}


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_weighs_the_experts_that_it_follows_by_its_own_formula(name: str, is_fused: bool) -> None:
    """Also where its choice is a fused kernel, as on a GPU: its code asks for no ``topk`` that could be answered."""
    fields, formula = ROUTERS[name]
    one = router(**fields)
    native = one._compute_routing

    def fused(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return native(*args, **kwargs)

    if is_fused:
        one._compute_routing = fused
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 8, generator=random)
    rows = torch.stack([torch.randperm(8, generator=random) for _ in range(6)])[:, : one.top_k].int()
    rows[2] = -1
    way = prove(5, one, hidden_size=4, dtype=torch.float32)
    assert (way is through_topk) is not is_fused

    def following(rows: Tensor) -> tuple[Tensor, Tensor]:
        route = way(one, one._compute_routing, lambda count: rows[:count])
        weights, ids = route(torch.zeros(6, 4), logits, torch.int32)
        return weights, ids

    weights, ids = following(rows)
    own_weights, own = native(torch.zeros(6, 4), logits, torch.int32)
    live = torch.arange(6) == 2
    assert torch.equal(ids[~live], rows[~live])
    assert torch.equal(weights[live], own_weights[live])
    assert torch.equal(ids[live], own[live])
    assert not torch.equal(own, ids)
    torch.testing.assert_close(weights[~live], formula(logits, rows.clamp(min=0).long())[~live])
    assert torch.equal(following(own)[0], own_weights)  # its own choice, bit by bit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and its Triton")
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (60, 4), (128, 8)])
def test_the_kernel_of_a_formula_is_the_formula(name: str, experts: int, top_k: int) -> None:
    from torchrl_moe.modules.backends.vllm.formula_kernel import follow_rows

    way, one = FORMULAS[name], SimpleNamespace(routed_scaling_factor=2.5)
    random = torch.Generator().manual_seed(experts)
    logits = torch.randn(33, experts, generator=random).cuda()
    draw = torch.stack([torch.randperm(experts, generator=random)[: 2 * top_k] for _ in range(33)]).cuda()
    ids, rows = draw[:, :top_k].int(), draw[:, top_k : 2 * top_k].int()
    rows[::3], rows[1] = -1, ids[1]
    own = torch.rand(33, top_k, generator=random).cuda()
    weights, chosen = follow_rows(own, ids, rows, logits, way.score, way.normalise, 2.5)
    on = rows[:, :1] >= 0
    on[1] = False  # its own choice keeps its own weights
    assert torch.equal(chosen, torch.where(rows[:, :1] >= 0, rows, ids))
    torch.testing.assert_close(weights, torch.where(on, way.weights(one, logits, rows.clamp(min=0)), own))


def argmax_one_by_one(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> Any:
    """Never asks for a topk."""
    left, ids = gating_output.clone(), []
    for _ in range(topk):
        ids.append(left.argmax(-1))
        left[torch.arange(len(left)), ids[-1]] = -torch.inf
    chosen = torch.stack(ids, -1)
    return gating_output.gather(1, chosen), chosen.int()


def weights_by_rank(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> Any:
    """Follows, and weighs whatever it follows as its own choice."""
    ids = torch.topk(gating_output, topk, dim=-1).indices
    return gating_output.sort(-1, descending=True).values[:, :topk].softmax(-1) ** 2, ids.int()


def confused(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> Any:
    raise IndexError("out of my depth")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (argmax_one_by_one, "its own code: it does not follow other experts"),
        (weights_by_rank, "its own code: it does not weigh the experts that it follows"),
        (confused, "its own code: IndexError: out of my depth"),
    ],
)
def test_a_router_that_does_not_follow_is_named(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"layer 3: CPURouter cannot follow .*{words}"):
        prove(3, router(custom_routing_function=function), hidden_size=4, dtype=torch.float32)


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


def a_request(scheduler: Any, prompt: int, given: Any = None) -> Any:
    made = SimpleNamespace(
        request_id="a", sampling_params=params_of(given), num_tokens=prompt, status="running", block_hashes=["old"]
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


def preempt(scheduler: Any, request: Any) -> Any:
    """The rows that the workers get of a request that is preempted."""
    scheduler._preempt_request(request, 0.0, False)
    return forced_in(request.sampling_params).rows


def test_a_preempted_request_keeps_the_rows_of_the_tokens_that_it_has(scheduler: Any) -> None:
    """The last token's comes with the next one. What came since is added when it is preempted again."""
    request = a_request(scheduler, prompt=3)
    assert preempt(scheduler, request) is None  # it has no token yet
    request.status = "running"
    sample(scheduler, request, start=0)
    sample(scheduler, request)
    assert (preempt(scheduler, request) == STORE[:4]).all()
    assert forced_of(request).is_recorded
    sample(scheduler, request)  # its step was under way
    assert (forced_in(request.sampling_params).rows == STORE[:5]).all()
    assert (forced_of(request).rows == STORE[:5]).all()
    request.status = "running"
    sample(scheduler, request)
    assert (preempt(scheduler, request) == STORE[:6]).all()


def test_rows_from_before_those_that_are_delivered_are_the_given_ones(scheduler: Any) -> None:
    """The rest of an answer follows what it had, and asks for its own rows only; where it has none, routers choose."""
    given = np.full((2, 2, 2), 7, np.int8)
    request = a_request(scheduler, prompt=5, given=given)
    assert (preempt(scheduler, request) == given).all()
    assert not forced_of(request).is_recorded
    request.status = "running"
    sample(scheduler, request, start=4)
    rows = preempt(scheduler, request)
    assert (rows[:2] == 7).all() and (rows[2:4] == -1).all() and (rows[4:] == STORE[4:5]).all()


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


# -- the question that tries new weights ------------------------------------------------------------------------------
PLACES = 4
Make = Callable[..., Steps]
FULL = [str(number) for number in range(PLACES)]


@pytest.fixture(params=[False, True], ids=["waits for each step", "begins a step during another"])
def make(request: pytest.FixtureRequest, shelf: EngineShelf) -> Make:
    """Make a scheduler with four places that reads up to 64 tokens a step."""

    def make(**arguments: Any) -> Steps:
        common = {"max_num_seqs": PLACES, "max_num_batched_tokens": 64, "max_model_len": 256}
        return Steps(shelf.folder("qwen3_moe"), request.param, **{**common, **arguments})

    return make


def fill(steps: Steps, tokens: int = 30) -> None:
    """Four of 20 requests run, the others wait, and none has ended."""
    for number in range(20):
        steps.add(str(number), prompt=10, max_tokens=tokens, priority=number)
    while min(steps.tokens[name] for name in FULL) < 3:
        steps.step()
    assert len(steps.core.waiting) == 20 - PLACES
    steps.drain()


def check(steps: Steps, prompt: int, name: str = "check", **fields: Any) -> None:
    steps.add(name, prompt=prompt, max_tokens=1, check=True, **fields)


def finish(steps: Steps, tokens: int = 30) -> None:
    """Nobody has lost a token."""
    for _ in range(1000):
        steps.step()
        if not steps.core.requests:
            break
    assert {steps.tokens[str(number)] for number in range(20)} == {tokens}
    assert steps.most == steps.core.max_num_active_reqs == PLACES


def test_a_question_is_answered_by_the_first_step_of_a_full_engine_and_takes_nobodys_place(make: Make) -> None:
    steps = make()
    fill(steps)
    running = list(steps.core.running)
    check(steps, 16)
    assert steps.step() == {"check": 16}
    assert sorted(steps.step()) == FULL
    assert (steps.tokens["check"], steps.core.running) == (1, running)
    finish(steps)
    assert not any(request.num_preemptions for request in running)


def test_a_question_longer_than_a_step_gets_as_many_as_it_needs(make: Make) -> None:
    steps = make()
    fill(steps)
    check(steps, 150)
    assert [steps.step() for _ in range(3)] == [{"check": 64}, {"check": 64}, {"check": 22}]
    steps.step()
    assert steps.tokens["check"] == 1
    finish(steps)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_question_takes_blocks_from_the_request_that_vllm_would_take_them_from(make: Make, policy: str) -> None:
    """Here the last: it came last, and is the least urgent. It is read again, and loses no token."""
    steps = make(blocks=1 + PLACES, scheduling_policy=policy)
    fill(steps, tokens=5)  # a block each, and none is left
    running = list(steps.core.running)
    check(steps, 15, priority=1000)
    assert steps.step() == {"check": 15}
    assert [one.num_preemptions for one in running] == [0, 0, 0, 1]
    finish(steps, tokens=5)
    assert steps.tokens["check"] == 1


def test_questions_are_forgotten_when_they_are_over_or_given_up(make: Make) -> None:
    from vllm.v1.request import RequestStatus

    steps = make()
    fill(steps)
    check(steps, 16, "given up")
    steps.core.finish_requests("given up", RequestStatus.FINISHED_ABORTED)
    assert sorted(steps.step()) == FULL
    steps.drain()
    for name in ("first", "second"):
        check(steps, 16, name)
        assert steps.step() == {name: 16}
        steps.drain()
    finish(steps)
    assert [steps.tokens[name] for name in ("given up", "first", "second")] == [0, 1, 1]
