"""What forced routing gains, and what it costs: an engine that follows recorded experts.

Gain: a partial rollout across a weight change. The first half is sampled by the old weights, the second half by the new
ones, which prefill the first half again: with their own routing, or with the experts that it was sampled with. A
trainer replays the rows that were recorded first (R3). The rows say how far its log-probs of the second half are
from the engine's, and in how many rows the new weights would choose other experts than those recorded.

Cost: the time to prefill 2048 tokens with given experts relative to without, and the speed of generation with the hook
installed relative to without it, in pairs, next to control pairs that do not differ; and the memory that a worker
holds for running requests. The model is large enough that a step is not dominated by overhead.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import Tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.fidelity import deep
from benchmarks.report import Row, finish
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.backends.request_routes import rows_of_answer
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme

HALF, PROMPTS, PROMPT_TOKENS = 64, 12, 24
BOUND, GAIN = 1e-5, 100.0
LONG, REQUESTS, TOKENS, HELD = 2048, 16, 32, 4
READ_PAIRS, WRITE_PAIRS = 30, 120  # the time of a short generation varies by a quarter on a shared machine
PREFILL, DECODE = 1.05, 0.97


def engine_of(folder: Path, dtype: str, length: int) -> AsyncVLLM:
    """An engine of a saved model."""
    return AsyncVLLM.from_pretrained(
        folder,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=length,
        max_num_batched_tokens=max(length, 2048),
        kv_cache_memory_bytes=1 << 29,
    )


# -- worth ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def change(model: PreTrainedModel, scale: float) -> None:
    """Perturb every weight by a fraction of its spread."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_((scale * parameter.float().std() * noise).to(parameter.dtype))


def first_half(completion: Completion) -> Completion:
    """Return an answer as if a weight update had interrupted it there."""
    (output,) = completion.outputs
    return replace(completion, outputs=[replace(output, finish_reason="abort")])


def worth(words: str, dtype: str, scale: float, **config: Any) -> list[Row]:
    """One model, one weight change; the same first halves are prefilled again in both ways."""
    with tempfile.TemporaryDirectory() as name:
        folder = save_tiny_moe(Path(name), "qwen3_moe", dtype=getattr(torch, dtype), **config)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        with engine_of(folder, dtype, 256) as engine:
            kwargs = {"max_new_tokens": 2 * HALF, "ignore_eos": True, "temperature": 1.0}
            policy = vLLMWrapper(engine, input_mode="tokens", generate_kwargs=kwargs, inplace=False)
            ids = torch.randint(0, 256, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
            requests = policy.requests(lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in ids]))
            params = requests[0].arguments["sampling_params"]
            firsts = engine.generate(
                prompt_token_ids=[row.tolist() for row in ids],
                sampling_params={**params, "max_tokens": HALF},
                use_tqdm=False,
            )
            assert isinstance(firsts, list)
            change(model, scale)
            sender = VLLMWeightSyncScheme().create_sender()
            sender.register_model(model)
            sender.init_all_workers_group(None, vllm_engine=engine)
            sender.update_weights()
            actor = TransformersWrapper(model, replay="R3")
            rows, means = [other_experts(f"{words}, weights changed by {scale:.1%}", engine, firsts)], {}
            for how in ("live", "forced"):
                wholes = engine.generate(
                    resume=[first_half(one) for one in firsts],
                    sampling_params=params,
                    on_resume=how,
                    use_tqdm=False,
                )
                assert isinstance(wholes, list)
                batch = lazy_stack([policy.answer(one, whole) for one, whole in zip(requests, wholes, strict=True)])
                off = tail_gap(batch, actor)
                means[how] = float(off.mean())
                claim = f"{words}, weights changed by {scale:.1%}, re-prefilled {how}: |dlogp| of the tail, mean; max"
                exact = how == "forced" and dtype == "float32"
                rows.append(
                    Row(
                        claim=claim,
                        value=f"{off.mean():.1e}; {off.max():.1e}",
                        target=f"max <= {BOUND:.0e}" if exact else "",
                        met=bool(off.max() <= BOUND) if exact else None,
                    )
                )
            sender.shutdown()
        ratio = means["live"] / means["forced"]
        return [
            *rows,
            Row(
                claim=f"{words}, weights changed by {scale:.1%}: live over forced, means",
                value=f"{ratio:.1f}",
                target=f">= {GAIN:.0f}" if dtype == "float32" else "",
                met=ratio >= GAIN if dtype == "float32" else None,
            ),
        ]


def other_experts(words: str, engine: AsyncVLLM, firsts: Sequence[Completion]) -> Row:
    """Return in how many rows the current weights choose other experts for the first halves."""
    parts = [part for first in firsts if (part := first.outputs[0].routed_experts) is not None]
    again = engine.generate(
        prompt_token_ids=[[*first.prompt_token_ids, *first.outputs[0].token_ids[:-1].tolist()] for first in firsts],
        sampling_params={"max_tokens": 1},
        use_tqdm=False,
    )
    assert isinstance(again, list)
    routed = [part for one in again if (part := one.outputs[0].routed_experts) is not None]
    pairs = zip(parts, routed, strict=True)
    others = np.concatenate([(np.sort(was, -1) != np.sort(now[: len(was)], -1)).any(-1).ravel() for was, now in pairs])
    return Row(claim=f"{words}: rows with other experts", value=f"{others.mean():.1%} of {others.size}")


def tail_gap(batch: TensorDictBase, actor: TransformersWrapper) -> torch.Tensor:
    """|log-prob, trainer - engine| of the second halves."""
    with torch.no_grad():
        scores = actor.score(batch.copy(), entropy=False)[0]
    sampled = torch.stack([row["log_probs", "full"] for row in batch.unbind(0)])
    return (scores - sampled)[:, -HALF:].abs()


# -- cost -------------------------------------------------------------------------------------------------------------


def paired(one: Callable[[], float], other: Callable[[], float], pairs: int) -> list[float]:
    """Ratios of seconds, of paired runs in alternating order."""
    ratios = []
    for i in range(pairs):
        order = (one, other) if i % 2 else (other, one)
        seconds = {run: run() for run in order}
        ratios.append(seconds[one] / seconds[other])
    return ratios


def interval(values: Sequence[float]) -> str:
    """The median, and the middle 95 % of medians of resamples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return f"{statistics.median(values):.3f} ({medians[50]:.3f} to {medians[-51]:.3f}, {len(values)} pairs)"


def cost() -> list[Row]:
    """Measure prefill with given experts, and generation without any."""
    with tempfile.TemporaryDirectory() as name:
        config: dict[str, Any] = {**deep(8), "max_position_embeddings": 4096}
        folder = save_tiny_moe(Path(name), "qwen3_moe", **config)
        with engine_of(folder, "float32", LONG + 2) as engine:
            rows, reading = read_pairs(engine)
            generating, null = write_pairs(engine, False), write_pairs(engine, True)
            held = memory(engine, rows)
    return [
        Row(
            claim=f"prefill of {LONG} tokens: seconds with its own experts given / as routed",
            value=interval(reading),
            target=f"<= {PREFILL}",
            met=statistics.median(reading) <= PREFILL,
        ),
        Row(
            claim=f"generating {REQUESTS} x {TOKENS} tokens without any: tokens/s with the hook / without",
            value=interval(generating),
            target=f">= {DECODE}",
            met=statistics.median(generating) >= DECODE,
        ),
        Row(claim="control, with the hook / with the hook: noise of the machine", value=interval(null)),
        held,
    ]


def read_pairs(engine: AsyncVLLM) -> tuple[np.ndarray[Any, Any], list[float]]:
    """Rows of a prompt, and ratios. Given experts are the router's own: others would load the kernels differently."""
    ids = np.random.default_rng(0).integers(0, 256, LONG).tolist()
    layout = engine.routing_layout
    assert layout is not None
    completion = engine.generate(prompt_token_ids=ids, sampling_params={"max_tokens": 1}, use_tqdm=False)
    assert isinstance(completion, Completion)
    recorded = completion.outputs[0].routed_experts
    assert recorded is not None
    rows = rows_of_answer(recorded, layout)

    def read(given: Any) -> float:
        engine.reset_prefix_cache()
        began = time.perf_counter()
        engine.generate(
            prompt_token_ids=ids,
            sampling_params={"max_tokens": 1, "detokenize": False},
            routed_experts=given,
            return_routed_experts=False,
            use_tqdm=False,
        )
        return time.perf_counter() - began

    read(rows)
    return rows, paired(lambda: read(rows), lambda: read(None), READ_PAIRS)


def write_pairs(engine: AsyncVLLM, base: bool) -> list[float]:
    """Ratios of tokens per second, with the hook installed over ``base``. It is installed before and afterwards."""
    ids = np.random.default_rng(1).integers(0, 256, (REQUESTS, 12)).tolist()
    params = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}

    def write(on: bool) -> float:
        engine.collective_rpc("torchrl_moe_follow", args=(on,))
        began = time.perf_counter()
        engine.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
        return time.perf_counter() - began

    write(True)
    ratios = paired(lambda: write(base), lambda: write(True), WRITE_PAIRS)
    engine.collective_rpc("torchrl_moe_follow", args=(True,))
    return ratios


def bytes_held(_saved: Mapping[str, torch.Tensor], _model: torch.nn.Module) -> tuple[int, int]:
    """Return, in a worker, the number of requests that follow rows, and the bytes of all memory that holds rows."""
    from torchrl_moe.modules.backends.vllm.forced_routing import ForcedRouting

    buffers: dict[int, int] = {}
    requests = 0
    for one in gc.get_objects():
        if type(one) is dict and type(packed := one.get("torchrl_moe")) is dict and "rows" in packed:
            buffers[id(packed["rows"])] = len(packed["rows"])
        elif type(one) is ForcedRouting:
            requests += len(one._rows)
            for rows in one._rows.values():
                while isinstance(rows.base, np.ndarray):
                    rows = rows.base
                buffers[id(rows if rows.base is None else rows.base)] = rows.nbytes
    return requests, sum(buffers.values())


def memory(engine: AsyncVLLM, rows: np.ndarray[Any, Any]) -> Row:
    """Measure the memory that a worker holds for running requests."""
    ids = np.random.default_rng(0).integers(0, 256, LONG).tolist()
    half = rows[: LONG // 2]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            engine.generate,
            prompt_token_ids=[ids[: len(half)]] * HELD,
            routed_experts=[half] * HELD,
            sampling_params={"max_tokens": TOKENS * 2, "ignore_eos": True},
            use_tqdm=False,
        )
        requests, held = 0, 0
        while requests < HELD and not running.done():
            ((found,),) = engine.validate_model_params(bytes_held)
            requests, held = found
        running.result()
    return Row(
        claim=f"bytes that a worker holds for {requests} requests with {len(half)} rows of {rows.shape[1]} layers, "
        f"top-{rows.shape[2]} / of the rows",
        value=f"{held / (HELD * half.nbytes):.2f} ({held} bytes)",
        target="1",
        met=held == HELD * half.nbytes,
    )


def main() -> None:
    """Both."""
    torch.set_num_threads(1)
    rows = [
        *worth("float32, 4 layers, 16 experts", "float32", 0.005),
        *worth("float32, 4 layers, 16 experts", "float32", 0.02),
        *worth("bfloat16, 16 layers, 64 experts", "bfloat16", 0.005, **deep(16)),
        *worth("bfloat16, 16 layers, 64 experts", "bfloat16", 0.02, **deep(16)),
    ]
    finish("forced_routing", [*rows, *cost()])


if __name__ == "__main__":
    main()
