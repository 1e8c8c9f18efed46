"""The model: replay's self-test and exactness in bfloat16 with ``grouped_mm``, its cost, and a whole step of a loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.gpu.measuring import Device
from benchmarks.gpu.sizes import Sizes
from benchmarks.report import Row
from torchrl_moe.modules import RouterReplay, TransformersWrapper
from torchrl_moe.objectives import GRPOLoss

__all__ = ["model_rows"]

REPLAY_TARGET = 1.05


def model_rows(device: Device, sizes: Sizes, model: nn.Module, peak: float) -> list[Row]:
    """Measure one model."""
    replay = RouterReplay(model)  # raises if it is not bit-equal
    ids = torch.randint(3, sizes.vocabulary, (sizes.sequences, sizes.length), device=device.device)
    with torch.no_grad(), replay.record() as recording:
        before = body(model, ids)
    routes = recording.routed_experts
    routes[:, -1] = -1  # as in every rollout
    with torch.no_grad():
        again = body(model, ids)
        with replay.replay(routes):
            after = body(model, ids)
    noise, gap = (float((x - before).abs().max()) for x in (again, after))
    rows = [
        Row(claim="self-test, bfloat16, grouped_mm", value="passed", target="bit-equal", met=True),
        Row(
            claim=f"own routes of {sizes.tokens} tokens replayed, greatest change of a hidden state (without replay: "
            f"{noise:.1e})",
            value=f"{gap:.1e}",
            target="0" if noise == 0 else "",
            met=gap == 0 if noise == 0 else None,
        ),
    ]

    def live() -> None:
        train(model, ids, nullcontext())

    def replayed() -> None:
        train(model, ids, replay.replay(routes))

    native, with_replay = device.measure(live, replayed)
    ratio = with_replay.time / native.time
    rows += [
        Row(claim="layers, forward and backward, live", value=str(native)),
        Row(claim="layers, forward and backward, replayed", value=str(with_replay)),
        Row(
            claim="replayed over live",
            value=f"{ratio:.3f}",
            target=f"<= {REPLAY_TARGET}" if device.is_gpu else "",
            met=ratio <= REPLAY_TARGET if device.is_gpu else None,
        ),
        Row(
            claim="layers, live, time at the device's peak product over measured",
            value=f"{sizes.body_flops / peak / native.time:.2f}",
        ),
    ]
    return rows + loss_rows(device, model, ids, routes)


def loss_rows(device: Device, model: nn.Module, ids: Tensor, routes: Tensor) -> list[Row]:
    """Measure a step of GRPO: score under R3, loss, backward."""
    loss = GRPOLoss(TransformersWrapper(model), entropy_bonus=False, masking_strategy="generic")
    td = batch(ids, routes)

    def step() -> None:
        loss(td).loss_objective.backward()
        model.zero_grad(set_to_none=True)

    (cost,) = device.measure(step)
    out = loss(td)
    assert out.loss_objective.isfinite()
    return [Row(claim="GRPOLoss under R3, forward and backward, parameters' gradients included", value=str(cost))]


def batch(ids: Tensor, routes: Tensor) -> TensorDict:
    """Return rollouts of these tokens, as if another policy had sampled all but the first token of each."""
    known = torch.ones_like(ids, dtype=torch.bool)
    log_probs = torch.full(ids.shape, -2.0, device=ids.device)
    log_probs[:, 0] = float("nan")
    entries = {
        "tokens": {"full": ids},
        "masks": {"all_attention_mask": known},
        "log_probs": {"full": log_probs},
        "routed_experts": {"full": routes},
        "sampling": {"temperature": torch.ones(len(ids), device=ids.device)},
        "advantage": torch.ones(len(ids), 1, 1, device=ids.device),
    }
    return TensorDict(entries, batch_size=[len(ids)], device=ids.device)


def body(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the last hidden states."""
    hidden: Tensor = model.model(ids, use_cache=False).last_hidden_state  # type: ignore[operator, union-attr]
    return hidden


def train(model: nn.Module, ids: Tensor, context: AbstractContextManager[None]) -> None:
    """Run the layers forward and backward."""
    with context:
        loss = body(model, ids).float().square().mean()
    loss.backward()
    model.zero_grad(set_to_none=True)
