"""How far trainer and engine are apart on the same tokens, with the engine's experts replayed and with live routing.

fp32 proves that routes, tokens and layers are mapped correctly; bf16 shows the benefit of replay. Real vLLM rollouts
are scored, teacher-forced, by the stock transformers model of the same folder and dtype.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM

from benchmarks.report import Row, finish
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, probe_replay, vLLMWrapper
from torchrl_moe.testing.tiny_moe import TINY_MOE_FAMILIES, save_tiny_moe

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, TEMPERATURE = 24, 24, 48, 1.0
FP32_BOUND, MEAN_GAIN, MAX_GAIN = 1e-5, 2.0, 4.0


@dataclass(frozen=True)
class Case:
    """One model and dtype."""

    family: str
    dtype: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in the table."""
        sizes = ""
        if self.config:
            layers, experts = self.config["num_hidden_layers"], self.config["num_experts"]
            sizes = f", {layers} layers, {experts} experts, top-{self.config['num_experts_per_tok']}"
        return f"{self.family}, {self.dtype}{sizes}"


def deep(layers: int) -> dict[str, Any]:
    """Return the config of a model with many experts, its first layer dense."""
    return {"num_hidden_layers": layers, "num_experts": 64, "num_experts_per_tok": 8, "hidden_size": 256}


CASES = (
    *(Case(family, "float32") for family in ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")),
    Case("qwen3_moe", "bfloat16", deep(8)),
    Case("qwen3_moe", "bfloat16", deep(16)),
)


def measure(case: Case) -> list[Row]:
    """Roll out, score twice, compare."""
    dtype = getattr(torch, case.dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_moe(folder, case.family, dtype=dtype, **case.config)
        engine = AsyncVLLM.from_pretrained(
            path,
            dtype=case.dtype,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 27,
            max_model_len=256,
        )
        with engine:
            policy = vLLMWrapper(
                engine,
                input_mode="tokens",
                generate_kwargs={"max_new_tokens": NEW_TOKENS, "temperature": TEMPERATURE, "ignore_eos": True},
                inplace=False,
            )
            prompts = torch.randint(0, 256, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
            td = policy(TensorDict(tokens=Tokens(prompt=prompts), batch_size=[PROMPTS]))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        probe = probe_replay(TransformersWrapper(model, replay="R3", temperature=TEMPERATURE), td)
    live, replay = probe.live, probe.replay
    rows = [
        Row(
            claim=f"{case.name}: |dlogp| mean / max, live",
            value=f"{live.mean:.1e} / {live.maximum:.1e}; {1 - probe.agreement:.2%} of choices differ",
        ),
        Row(
            claim=f"{case.name}: |dlogp| mean / max, replayed",
            value=f"{replay.mean:.1e} / {replay.maximum:.1e}",
            target=f"max <= {FP32_BOUND:.0e}" if case.dtype == "float32" else "",
            met=replay.maximum <= FP32_BOUND if case.dtype == "float32" else None,
        ),
    ]
    if case.dtype != "float32":
        mean, maximum = live.mean / replay.mean, live.maximum / replay.maximum
        rows.append(
            Row(
                claim=f"{case.name}: live / replayed, mean and max",
                value=f"{mean:.1f}x and {maximum:.1f}x ({probe.tokens} tokens)",
                target=f">= {MEAN_GAIN:.0f}x and >= {MAX_GAIN:.0f}x",
                met=mean >= MEAN_GAIN and maximum >= MAX_GAIN,
            )
        )
    return rows


def main() -> None:
    """Measure all cases, one engine after another."""
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    finish("fidelity", [row for case in CASES for row in measure(case)])


if __name__ == "__main__":
    main()
