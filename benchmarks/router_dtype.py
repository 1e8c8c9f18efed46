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
from contextlib import AbstractContextManager
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

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, TEMPERATURE = 16, 24, 48, 1.0
STEPS, RATE = 5, 3e-4
EXACT, KEPT_SHARE = 1e-5, 0.1
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 6, "hidden_size": 256},
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 6, "hidden_size": 256},
}
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Arm:
    """A dtype of the engine and of its routers, what is sent, and how the trainer computes its own routers."""

    name: str
    rounded: bool
    wide_trainer: bool


EXACT_ARMS = (Arm("rounded on the way", True, True), Arm("kept", False, True))
ENGINES: Sequence[tuple[str, Mapping[str, Any], Sequence[Arm]]] = (
    ("float32", {"dtype": "float32"}, EXACT_ARMS),
    (
        "bfloat16",
        {"dtype": "bfloat16"},
        (Arm("both sides in bfloat16", False, False), Arm("trainer's routers float32", False, True)),
    ),
    (
        "bfloat16, routers float32",
        {"dtype": "bfloat16", "router_dtype": "float32"},
        (
            Arm("engine's routers float32", False, False),
            Arm("both float32, rounded on the way", True, True),
            Arm("both float32, kept", False, True),
        ),
    ),
)


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
    """Sync, generate and score after each step, in each arm; of one engine."""
    sent, narrow, wide = (copy.deepcopy(master) for _ in range(3))
    routers = float32_routers(wide)
    found: dict[Arm, list[ReplayProbe]] = {arm: [] for arm in arms}
    autocast: AbstractContextManager[object] = contextlib.nullcontext()
    if arguments["dtype"] == "bfloat16":
        autocast = torch.autocast("cpu", torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sent.bfloat16().save_pretrained(folder)
        sent.float()
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
        actors = {model: TransformersWrapper(model, replay="R3", temperature=TEMPERATURE) for model in (narrow, wide)}
        prompts = torch.randint(0, 256, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        for state in states:
            for arm in arms:
                sent.load_state_dict(rounded(state, routers) if arm.rounded else state)
                sender.update_weights()
                td = policy(TensorDict(tokens=Tokens(prompt=prompts), batch_size=[PROMPTS]))
                model = wide if arm.wide_trainer else narrow
                model.load_state_dict(state)
                with autocast:
                    found[arm].append(probe_replay(actors[model], td, use_tqdm=False))
    return found


def described(probes: Sequence[ReplayProbe]) -> str:
    """Return what was measured after each step."""
    parts = [
        f"{step}: {probe.agreement:.2%}, {probe.live.mean:.1e} / {probe.live.maximum:.1e}, {probe.live.kl:.1e}"
        f" ({probe.replay.mean:.1e} / {probe.replay.maximum:.1e}, {probe.replay.kl:.1e})"
        for step, probe in enumerate(probes)
    ]
    return "; ".join(parts)


def of_family(family: str, rate: float = RATE) -> Iterator[Row]:
    """Measure all engines and arms of a family."""
    # correction biases are float32 in checkpoints too
    master = make_tiny_moe(family, dtype=torch.bfloat16, **FAMILIES[family]).float()
    states = list(trained(copy.deepcopy(master), rate))
    medians: dict[str, float] = {}
    for engine, arguments, arms in ENGINES:
        for arm, probes in measure(states, master, arguments, arms).items():
            print(family, engine, arm.name, described(probes), sep="\n  ", flush=True)
            medians[f"{engine}: {arm.name}"] = statistics.median(probe.live.kl for probe in probes[1:])
            yield Row(claim=f"{family}, {engine}, {arm.name}", value=described(probes))
    yield Row(claim=str(medians), value="")


def main() -> None:
    """Measure both families."""
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    note = "after each step: routes that agree; |dlogp| mean / max, k3, live (replayed)"
    finish("router_dtype", [Row(claim=note, value=""), *(row for family in FAMILIES for row in of_family(family))])


if __name__ == "__main__":
    main()
