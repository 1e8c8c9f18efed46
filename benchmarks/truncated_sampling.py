"""What recording the kept tokens of truncated sampling gains, and what it costs.

Gain: fresh on-policy rollouts of a tiny MoE, real vLLM in float32, routes replayed, so trainer and engine agree to
rounding. The rows say how far log-probs over all words are off, and what GRPO and GSPO clip because of it, with and
without the kept tokens. Cost: tokens per second with the hook in the sampler and without it, in pairs, and bytes per
token, at 32 768 words. That model's weights are random, so its distributions are flat, and top_p keeps most words.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM

from benchmarks.report import RESULTS, Row, finish, median_range
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import GRPOLoss, GSPOLoss
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "top_p 0.95": {"top_p": 0.95},
    "temperature 0.6, top_p 0.95, top_k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "min_p 0.05": {"min_p": 0.05},
}
ANSWERS, NEW, BOUND = 32, 48, 1e-5
WORDS, REQUESTS, TOKENS, PAIRS, SPEED = 32768, 16, 64, 5, 0.9


def prompts(count: int, length: int) -> TensorDictBase:
    """Random bytes."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (count, length), generator=generator)
    return lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in rows])


def engine_of(folder: Path, **config: Any) -> AsyncVLLM:
    """An engine of a tiny model."""
    make_tiny_moe("qwen3_moe", **config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return AsyncVLLM.from_pretrained(
        folder, dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=1 << 26
    )


# -- worth ------------------------------------------------------------------------------------------------------------


def without_words(batch: TensorDictBase) -> TensorDictBase:
    """Return the batch without its record of kept tokens."""
    return lazy_stack([row.exclude(("sampling", "kept")) for row in batch.unbind(0)])


def gap(batch: TensorDictBase, actor: TransformersWrapper) -> torch.Tensor:
    """|log-prob, trainer - engine| of all sampled tokens."""
    with torch.no_grad():
        scores = actor.score(batch.copy(), entropy=False)[0]
    sampled = batch.get(("log_probs", "full"), as_padded_tensor=True, padding_side="left", padding_value=torch.nan)
    return (scores - sampled)[sampled.isfinite()].abs()


def clipped(batch: TensorDictBase, actor: TransformersWrapper) -> tuple[float, float]:
    """Return the shares that GRPO and GSPO clip."""
    rows = batch.unbind(0)
    signs = torch.tensor([1.0, -1.0]).repeat(len(rows) // 2)
    for row, sign in zip(rows, signs, strict=True):
        row["advantage"] = sign.expand(len(row["tokens", "full"]), 1).clone()
    with torch.no_grad():
        losses = [kind(actor, entropy_bonus=False)(lazy_stack(list(rows))) for kind in (GRPOLoss, GSPOLoss)]
    return float(losses[0].clip_fraction), float(losses[1].clip_fraction)


def worth() -> tuple[list[Row], dict[str, list[float]]]:
    """All settings."""
    rows, shown = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with engine_of(folder) as engine:
            actor = TransformersWrapper(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
            for words, params in SAMPLING.items():
                policy = vLLMWrapper(
                    engine, input_mode="tokens", generate_kwargs={"max_new_tokens": NEW, "ignore_eos": True, **params}
                )
                batch = policy(prompts(ANSWERS, 12))
                bare = without_words(batch)
                far, near = gap(bare, actor), gap(batch, actor)
                (grpo, gspo), (grpo_kept, gspo_kept) = clipped(bare, actor), clipped(batch, actor)
                shown[words] = [float(far.mean()), float(near.mean()), gspo, gspo_kept]
                rows.append(
                    Row(
                        claim=f"{words}: |dlogp| mean without kept tokens; with, mean; with, max",
                        value=f"{far.mean():.1e}; {near.mean():.1e}; {near.max():.1e}",
                        target=f"max <= {BOUND:.0e}",
                        met=bool(near.max() <= BOUND),
                    )
                )
                value = f"GRPO {grpo:.3f} -> {grpo_kept:.3f}, GSPO {gspo:.3f} -> {gspo_kept:.3f}"
                rows.append(
                    Row(claim=f"{words}: clipped, on policy", value=value, target="-> 0", met=not grpo_kept + gspo_kept)
                )
    return rows, shown


def draw(shown: dict[str, list[float]]) -> None:
    """Draw mismatch and clip fraction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    gaps, clips = figure.subplots(1, 2)
    names, places = list(shown), np.arange(len(shown))
    for axes, first in ((gaps, 0), (clips, 2)):
        for offset, label, column in ((-0.2, "over all words", first), (0.2, "over the kept tokens", first + 1)):
            axes.barh(places + offset, [shown[name][column] for name in names], 0.36, label=label)
        axes.set_yticks(places, names if axes is gaps else [""] * len(names))
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    gaps.set(xscale="log", xlabel="mean |log-prob, trainer - engine|")
    clips.set(xlabel="share of sequences that GSPO clips, on policy", xlim=(0, 1))
    figure.legend(*gaps.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / "truncated_sampling.png", dpi=120)


# -- cost -------------------------------------------------------------------------------------------------------------


def speed(engine: AsyncVLLM, params: dict[str, Any]) -> tuple[float, list[Any]]:
    """Tokens per second, and the outputs."""
    ids = [row["tokens", "prompt"].tolist() for row in prompts(REQUESTS, 12).unbind(0)]
    asked = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, "detokenize": False, **params}
    began = time.perf_counter()
    completions = engine.generate(prompt_token_ids=ids, sampling_params=asked, use_tqdm=False)
    assert isinstance(completions, list)
    seconds = time.perf_counter() - began
    return REQUESTS * TOKENS / seconds, [completion.outputs[0] for completion in completions]


def cost() -> list[Row]:
    """Measure pairs with the hook and without it."""
    rows = []
    with tempfile.TemporaryDirectory() as name, engine_of(Path(name), vocab_size=WORDS) as engine:
        for words, params in (("top_k 20", {"top_k": 20}), ("top_p 0.95", {"top_p": 0.95})):
            speed(engine, params)
            ratios, sizes = [], []
            for _ in range(PAIRS):
                on, outputs = speed(engine, params)
                sizes += [(output.kept.ids.nbytes + output.kept.sizes.nbytes) / TOKENS for output in outputs]
                engine.collective_rpc("torchrl_moe_masks", args=(False,))
                off, _ = speed(engine, params)
                engine.collective_rpc("torchrl_moe_masks", args=(True,))
                ratios.append(on / off)
            fast = statistics.median(ratios)
            claim = f"{words}, {WORDS} words: tokens/s with kept tokens / without"
            rows.append(Row(claim=claim, value=median_range(ratios), target=f">= {SPEED}", met=fast >= SPEED))
            claim = f"{words}, {WORDS} words: bytes of a token's kept tokens"
            rows.append(Row(claim=claim, value=f"{statistics.mean(sizes):.0f}"))
    return rows


def main() -> None:
    """Both."""
    torch.set_num_threads(1)
    rows, shown = worth()
    draw(shown)
    finish("truncated_sampling", [*rows, *cost()])


if __name__ == "__main__":
    main()
