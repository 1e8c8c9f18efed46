"""What replay costs: the whole model forward and backward, one router alone, and the check of the routes.

Pairs of a pass with replay and one without, on the same tokens, one thread; the model is small enough for a CPU, so its
routers weigh more than those of a large model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import Row, finish, median_range
from torchrl_moe.modules import RouterReplay
from torchrl_moe.modules.replay.binding import Binding
from torchrl_moe.modules.replay.router_replay import bind_routes
from torchrl_moe.testing import make_tiny_moe

PAIRS, ROUTER_PAIRS, CHECKS = 15, 41, 11
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 256, "num_experts": 64, "num_experts_per_tok": 8},
    "deepseek_v3": {"hidden_size": 256, "n_routed_experts": 64, "num_experts_per_tok": 8},
}
LIVE = {"every row given": 0, "first row of each sequence live": 1}
MODEL_TARGET, ROUTER_TARGET, CHECK_TARGET = 1.05, 1.0, 0.02


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call on one thread: other processes on the machine do not count."""
    started = time.process_time()
    work()
    return time.process_time() - started


def ratio_row(claim: str, work: Callable[[], object], other: Callable[[], object], pairs: int, target: float) -> Row:
    """Return the row of ``work`` over ``other``, in pairs whose order alternates; a target of 0 means none."""
    found = []
    for i in range(pairs + 2):
        calls = (work, other) if i % 2 else (other, work)
        times = {call: seconds(call) for call in calls}
        found.append(times[work] / times[other])
    found = found[2:]  # after the warm-up
    return Row(
        claim=f"{claim}, replay / live",
        value=median_range(found, 3),
        target=f"<= {target}" if target else "",
        met=statistics.median(found) <= target if target else None,
    )


def random_routes(replay: RouterReplay, batch: int, length: int) -> Tensor:
    """Return int16 ``[B, T, L, K]``: distinct experts, -1 where a layer has no router."""
    routes = torch.full((batch, length, replay.num_layers, replay.top_k), -1, dtype=torch.int16)
    for site in replay.sites:
        chosen = torch.rand(batch, length, site.num_experts).argsort(-1)[..., : site.top_k]
        routes[:, :, site.layer, : site.top_k] = chosen
    return routes


def own_routes(model: nn.Module, replay: RouterReplay, ids: Tensor) -> Tensor:
    """Return routes of the model's own choice, so that both passes of a pair give every expert the same work."""
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    return recording.routed_experts


def train_step(model: nn.Module, ids: Tensor, context: AbstractContextManager[None]) -> None:
    """Run one forward pass in ``context``, and the backward pass after it."""
    with context:
        loss = model(ids, use_cache=False).logits.float().logsumexp(-1).mean()
    loss.backward()
    model.zero_grad()


def model_rows(family: str) -> list[Row]:
    """Measure whole passes, with every row given and with one row of each sequence on the live router."""
    model = make_tiny_moe(family, num_hidden_layers=8, **MODELS[family]).train()
    replay = RouterReplay(model)
    ids = torch.randint(0, 256, (4, 128))
    rows = []
    for name, live in LIVE.items():
        routes = own_routes(model, replay, ids)
        routes[:, :live] = -1

        def replayed(given: Tensor) -> None:
            train_step(model, ids, replay.replay(given))

        rows.append(
            ratio_row(
                f"{family}, 8 layers, 64 experts, 512 tokens, forward and backward, {name}",
                partial(replayed, routes),
                partial(train_step, model, ids, nullcontext()),
                PAIRS,
                MODEL_TARGET,
            )
        )
    return rows


def router_rows() -> list[Row]:
    """Measure one router forward and backward: routes are bound outside, as for a whole model."""
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=2, **{**MODELS["qwen3_moe"], "num_experts": 128})
    replay = RouterReplay(model)
    router = model.get_submodule(replay.sites[0].name)

    def step(hidden: Tensor) -> None:
        router(hidden)[1].square().sum().backward()

    def replayed(hidden: Tensor, binding: Binding) -> None:
        with replay._state.opened(binding):  # a replay() context requires a forward pass of the whole model
            step(hidden)

    rows = []
    for count in (1024, 4096):
        hidden = torch.randn(count, 256, requires_grad=True)
        for name, live in LIVE.items():  # one row: routes are of one sequence
            routes = random_routes(replay, 1, count)
            routes[:, :live] = -1
            binding = bind_routes(routes, replay.sites, replay.num_layers)
            rows.append(
                ratio_row(
                    f"router alone, N={count}, E=128, K=8, forward and backward, {name}",
                    partial(replayed, hidden, binding),
                    partial(step, hidden),
                    ROUTER_PAIRS,
                    ROUTER_TARGET,
                )
            )
    return rows


@torch.no_grad()
def check_rows() -> list[Row]:
    """Measure the check of a batch of routes beside the forward pass that uses them."""
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=16, **{**MODELS["qwen3_moe"], "num_experts": 128})
    replay = RouterReplay(model)
    ids = torch.randint(0, 256, (8, 512))
    routes = random_routes(replay, 8, 512)
    mask = torch.ones(8, 512, dtype=torch.bool)
    mask[:, :100] = False
    forward = statistics.median(seconds(lambda: model(ids, use_cache=False)) for _ in range(3))
    rows = []
    for name, dtype, keep in (
        ("int8", torch.int8, None),
        ("int16", torch.int16, None),
        ("int64", torch.int64, None),
        ("int8, with a mask", torch.int8, mask),
    ):
        check = partial(bind_routes, routes.to(dtype), replay.sites, replay.num_layers, attention_mask=keep)
        times = [seconds(check) for _ in range(CHECKS)]
        share = statistics.median(times) / forward
        rows.append(
            Row(
                claim=f"check of routes {list(routes.shape)}, {name}, ms, and its share of a forward pass without "
                f"gradients ({forward * 1e3:.0f} ms)",
                value=f"{median_range([t * 1e3 for t in times], 1)}; {share:.2%}",
                target=f"<= {CHECK_TARGET:.0%}",
                met=share <= CHECK_TARGET,
            )
        )
    return rows


def main() -> None:
    """Measure all three on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    finish("replay_cost", [*model_rows("qwen3_moe"), *model_rows("deepseek_v3"), *router_rows(), *check_rows()])


if __name__ == "__main__":
    main()
