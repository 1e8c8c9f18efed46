"""What a router that is rounded to bfloat16 on its way to the engine costs, against one that stays float32.

A float32 master is trained for a few steps from weights that bfloat16 can hold, as a checkpoint's are. After each step
it is synced to an engine, which generates; the answers are scored by the master. Two questions, each of two families:

- with all else in float32, how large is the gap that the rounding of the routers alone makes? Step 0 has none.
- with an engine in bfloat16, and a trainer that autocasts to it, what do float32 routers change, on one side and both?
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, set_list_to_stack
from torch import Tensor, nn
from torchrl.modules.llm.policies import Tokens

from benchmarks.report import Row, finish
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, float32_routers, probe_replay, vLLMWrapper
from torchrl_moe.modules.policies.probe import ReplayProbe
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer
from torchrl_moe.weight_update import VLLMWeightSyncScheme

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, TEMPERATURE = 16, 24, 32, 1.0
STEPS, RATE, OTHER_RATES = 5, 3e-4, (1e-5, 1e-3)
EXACT, LEAST_RATIO = 1e-5, 1e3
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4, "hidden_size": 256},
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4, "hidden_size": 256},
}
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Arm:
    """Whether routers are rounded before they are sent, and whether the trainer computes its own in float32."""

    name: str
    rounded: bool
    wide_trainer: bool


KEPT, ROUNDED = Arm("kept", False, True), Arm("rounded on the way", True, True)
LOW_ENGINES: Sequence[tuple[Mapping[str, Any], Sequence[Arm]]] = (
    (
        {"dtype": "bfloat16"},
        (Arm("routers bfloat16 on both sides", False, False), Arm("routers float32 in the trainer", False, True)),
    ),
    (
        {"dtype": "bfloat16", "router_dtype": "float32"},
        (
            Arm("routers float32 in the engine", False, False),
            Arm("routers float32 on both sides, rounded on the way", True, True),
            Arm("routers float32 on both sides, kept", False, True),
        ),
    ),
)
LOW_STEPS = (1, 3, 5)


def trained(model: nn.Module, rate: float) -> Iterator[State]:
    """Yield the weights after 0, 1, 2, ... steps of Adam on random tokens, in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS + 1):
        yield {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if step < STEPS:
            tokens = torch.randint(0, 256, (8, 32), generator=generator)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def rounded(state: State, routers: Sequence[str]) -> dict[str, Tensor]:
    """Return weights whose routers were sent in bfloat16."""
    return {name: tensor.bfloat16().float() if name in routers else tensor for name, tensor in state.items()}


def measure(
    states: Sequence[State], master: nn.Module, arguments: Mapping[str, Any], arms: Sequence[Arm]
) -> dict[Arm, list[ReplayProbe]]:
    """Sync, generate and score each of the states, in each arm; of one engine."""
    sent, narrow, wide = (copy.deepcopy(master) for _ in range(3))
    routers = float32_routers(wide)
    found: dict[Arm, list[ReplayProbe]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        copy.deepcopy(master).bfloat16().save_pretrained(folder)
        ByteTokenizer().save_pretrained(folder)
        engine = stack.enter_context(
            AsyncVLLM.from_pretrained(folder, kv_cache_memory_bytes=1 << 27, max_model_len=256, **arguments)
        )
        sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
        stack.callback(sender.shutdown)
        sender.register_model(sent)
        sender.init_all_workers_group(None, vllm_engine=engine)
        policy = vLLMWrapper(
            engine,
            input_mode="tokens",
            generate_kwargs={"max_new_tokens": NEW_TOKENS, "temperature": TEMPERATURE, "ignore_eos": True},
            inplace=False,
        )
        actors = {
            is_wide: TransformersWrapper(model, replay="R3", temperature=TEMPERATURE)
            for is_wide, model in ((False, narrow), (True, wide))
        }
        prompts = torch.randint(0, 256, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        for state in states:
            narrow.load_state_dict(state)
            wide.load_state_dict(state)
            for arm in arms:
                sent.load_state_dict(rounded(state, routers) if arm.rounded else state)
                sender.update_weights()
                td = policy(TensorDict(tokens=Tokens(prompt=prompts), batch_size=[PROMPTS]))
                with torch.autocast("cpu", torch.bfloat16, enabled=arguments["dtype"] == "bfloat16"):
                    found[arm].append(probe_replay(actors[arm.wide_trainer], td, use_tqdm=False))
    return found


def described(probe: ReplayProbe) -> str:
    """Return what was measured of one state."""
    live, replay = probe.live, probe.replay
    return (
        f"{probe.agreement:.2%}; {live.mean:.1e} / {live.maximum:.1e}, {live.kl:.1e}; "
        f"{replay.mean:.1e} / {replay.maximum:.1e}, {replay.kl:.1e}"
    )


def in_float32(family: str, master: nn.Module) -> Iterator[Row]:
    """Rounded against kept, with all else in float32."""
    states = list(trained(copy.deepcopy(master), RATE))
    names = [f"{RATE:g}, step {step}" for step in range(STEPS + 1)]
    for rate in OTHER_RATES:
        *_, last = trained(copy.deepcopy(master), rate)
        states.append(last)
        names.append(f"{rate:g}, step {STEPS}")
    found = measure(states, master, {"dtype": "float32"}, (ROUNDED, KEPT))
    for name, *probes in zip(names, found[ROUNDED], found[KEPT], strict=True):
        for arm, probe in zip((ROUNDED, KEPT), probes, strict=True):
            yield Row(claim=f"{family}, float32, lr {name}: {arm.name}", value=described(probe))
    kept = max(probe.live.maximum for probe in found[KEPT])
    yield Row(
        claim=f"{family}, float32, kept: largest |dlogp|, live", value=f"{kept:.1e}", target=f"<= {EXACT:g}",
        met=kept <= EXACT,
    )  # fmt: skip
    after = slice(1, STEPS + 1)
    ratio = statistics.median(
        one.live.kl / other.live.kl for one, other in zip(found[ROUNDED][after], found[KEPT][after], strict=True)
    )
    yield Row(
        claim=f"{family}, float32: k3 rounded over kept, median of steps 1 to {STEPS}", value=f"{ratio:.1e}",
        target=f">= {LEAST_RATIO:g}", met=ratio >= LEAST_RATIO,
    )  # fmt: skip


def in_bfloat16(family: str, master: nn.Module) -> Iterator[Row]:
    """The same under all the other rounding of an engine in bfloat16, and of a trainer that autocasts."""
    states = [state for step, state in enumerate(trained(copy.deepcopy(master), RATE)) if step in LOW_STEPS]
    for arguments, arms in LOW_ENGINES:
        for arm, probes in measure(states, master, arguments, arms).items():
            middle = sorted(probes, key=lambda probe: probe.live.kl)[len(probes) // 2]
            yield Row(claim=f"{family}, bfloat16, {arm.name}: median of steps 1, 3, 5", value=described(middle))


def main() -> None:
    """Measure both families."""
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    legend = "routes that agree; |dlogp| mean / max, k3, live; the same, replayed"
    rows = [Row(claim="what a row says", value=legend)]
    for family, config in FAMILIES.items():
        # as a checkpoint: bfloat16, but for what the family keeps in float32
        master = make_tiny_moe(family, dtype=torch.bfloat16, **config).float()
        for row in (*in_float32(family, master), *in_bfloat16(family, master)):
            print(f"{row.claim}: {row.value}", flush=True)
            rows.append(row)
    finish("router_dtype", rows)


if __name__ == "__main__":
    main()
