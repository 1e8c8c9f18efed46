"""Which families follow recorded experts in real engines, against transformers; and which do not, and why.

Experts are drawn at random, so that none follows them by chance. ``support/served_families.py`` has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from support.engines import EngineShelf, start_engine
from support.families import FAMILIES, REFUSED, is_absent
from support.reference import TOLERANCE
from support.routes import rows_at_random
from support.served_families import SERVED, Served, engine_arguments, save_served
from support.versions import random_ids
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import EngineError, RequestRefusedError
from torchrl_moe.modules import AsyncVLLM, FaultPolicy, RouterReplay, bisect_mismatch
from torchrl_moe.modules.backends.replica import Completion

ELSEWHERE = {"qwen3_moe", "mixtral", "olmoe", "deepseek_v3"}  # in test_real_engine.py
PARAMS = {"max_tokens": 12, "logprobs": 0, "ignore_eos": True}
ONCE = FaultPolicy(restart=False, attempts=1)
ROUNDED = 0.05
"""Of log-probs in bfloat16, on average."""


def test_every_family_is_in_the_table() -> None:
    known = {*FAMILIES, *REFUSED} - ELSEWHERE
    assert {*SERVED} - known == set()
    assert {name for name in known if not is_absent(name)} - {*SERVED} == set()


def names(*outcomes: str) -> list[str]:
    return [name for name, served in SERVED.items() if served.outcome in outcomes]


class Family:
    """A saved model, as transformers computes it."""

    def __init__(self, name: str, folder: Path) -> None:
        if is_absent(name):
            pytest.skip("this release of transformers has no such family")
        self.arguments = engine_arguments(name)
        self.folder = folder
        self.model = save_served(name, folder).to(getattr(torch, self.arguments["dtype"]))

    def engine(self) -> AsyncVLLM:
        return start_engine(self.folder, faults=ONCE, **self.arguments)

    @torch.no_grad()
    def off(self, completion: Completion, routes: NDArray[Any] | None = None) -> Tensor:
        """How far each of the answer's log-probs is from the model's, which follows ``[P + G - 1, L, K]``."""
        (output,) = completion.outputs
        ids = torch.from_numpy(np.concatenate([completion.prompt_token_ids, output.token_ids])).long()[None]
        if routes is None:
            logits = self.model(ids[:, :-1]).logits
        else:
            replay = RouterReplay(self.model)
            with replay.replay(torch.from_numpy(routes)[None]):
                logits = self.model(ids[:, :-1]).logits
            replay.remove()
        log_probs = logits[0].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return (log_probs[len(completion.prompt_token_ids) - 1 :] - torch.from_numpy(output.logprobs.copy())).abs()


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path: Path, no_engine: EngineShelf) -> Family:
    del no_engine
    return Family(request.param, tmp_path)


@pytest.fixture
def engine(family: Family) -> Iterator[AsyncVLLM]:
    with family.engine() as engine:
        yield engine


def each(*outcomes: str) -> Any:
    return pytest.mark.parametrize("family", names(*outcomes), indirect=True)


def generate(engine: AsyncVLLM, rows: Any) -> list[Completion]:
    prompts = [random_ids(5, 40).tolist(), random_ids(6, 17).tolist()]
    done: list[Completion] = engine.generate(
        prompt_token_ids=prompts, sampling_params=PARAMS, routed_experts=rows, use_tqdm=False
    )
    return done


def recorded(completion: Completion, layout: RoutingLayout) -> NDArray[np.int64]:
    """What the engine recorded, -1 in layers without a router."""
    rows = completion.outputs[0].routed_experts
    assert rows is not None
    kept = np.full(rows.shape, -1, np.int64)
    kept[:, layout.moe_layers] = rows[:, layout.moe_layers]
    return kept


@pytest.mark.parity
@each("exact", "rounded")
def test_a_family_follows_experts_that_it_would_not_choose(
    family: Family, engine: AsyncVLLM, request: pytest.FixtureRequest
) -> None:
    served, layout = SERVED[request.node.callspec.params["family"]], engine.routing_layout
    assert engine.infos[0].forced_routing_unavailable_reason == ""
    assert layout is not None
    replay = RouterReplay(family.model)
    assert replay.layers == layout.moe_layers
    replay.remove()
    rows = [rows_at_random(layout, 40), rows_at_random(layout, 9)]
    completions = generate(engine, rows)
    routes = [recorded(completion, layout) for completion in completions]
    assert all(np.array_equal(made[: len(one)], one) for made, one in zip(routes, rows, strict=True))
    # operation by operation, too; where the engine's routers choose in another way, that is the one that is named
    bisection = bisect_mismatch(engine, family.model, random_ids(7, 40).tolist())
    assert bisection.first is None or (served.live and bisection.first.is_choice), str(bisection)
    following = torch.cat([family.off(*pair) for pair in zip(completions, routes, strict=True)])
    alone = torch.cat([family.off(completion) for completion in completions])
    if served.outcome == "rounded":
        assert following.mean() <= ROUNDED
        assert alone[: len(alone) // 2].mean() >= 2 * following[: len(following) // 2].mean()  # all rows were given
        return
    assert following.max() <= TOLERANCE
    assert alone.max() > 100 * TOLERANCE
    check_live(served, family, engine)


def check_live(served: Served, family: Family, engine: AsyncVLLM) -> None:
    off = max(float(family.off(completion).max()) for completion in generate(engine, None))
    assert off > 100 * TOLERANCE if served.live else off <= TOLERANCE


@pytest.mark.parity
@each("refused")
def test_a_family_that_cannot_follow_says_by_what_name(
    family: Family, engine: AsyncVLLM, request: pytest.FixtureRequest
) -> None:
    served, layout = SERVED[request.node.callspec.params["family"]], engine.routing_layout
    assert served.why in engine.infos[0].forced_routing_unavailable_reason
    assert layout is not None
    check_live(served, family, engine)
    with pytest.raises(RequestRefusedError, match=served.why):
        generate(engine, [rows_at_random(layout, 40), None])


@pytest.mark.parity
@each("unserved")
def test_a_family_that_vllm_does_not_serve_on_a_cpu(family: Family, request: pytest.FixtureRequest) -> None:
    """Once this fails, the family has another place in the table."""
    served = SERVED[request.node.callspec.params["family"]]
    if served.needs_amx and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM serves it where the CPU has no AMX")
    with pytest.raises(EngineError, match=served.why), family.engine() as engine:
        generate(engine, None)
