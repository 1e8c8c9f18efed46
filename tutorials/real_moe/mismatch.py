"""How far vLLM and transformers are apart on the real model, with its own routes live and with the engine's replayed.

    python tutorials/real_moe/mismatch.py runs/real_moe
    python tutorials/real_moe/mismatch.py runs/real_moe --tokens 1024 --top-p 1   # by place in the answer, and by layer

Chats are answered by the engine at temperature 1, in float32 and in bfloat16, and scored by transformers in the same
dtype: the log-probs of the same tokens, twice.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, probe_replay, vLLMWrapper

QUESTIONS = (
    "What is the capital of Italy?",
    "Name three colours.",
    "Compute 12 + 7.",
    "Write one sentence about the sea.",
    "What is photosynthesis?",
    "Who wrote Hamlet?",
    "List two prime numbers.",
    "Translate 'good morning' to French.",
)
LONG = (
    "Write a long story about a sailor who comes home.",
    "Explain in detail how a computer works.",
    "Write a letter to a friend about a journey through ten countries.",
    "Describe the history of mathematics at length.",
)
"""For answers of more than 128 tokens."""
PLACES = (0, 64, 128, 256, 512, 1024)


def answered(folder: str, dtype: str, top_p: float, tokens: int, prompts: int) -> tuple[TensorDictBase, float]:
    """Return rollouts of chats, and tokens per second."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = QUESTIONS if tokens <= 128 else LONG
    chats = [[{"role": "user", "content": questions[place % len(questions)]}] for place in range(prompts)]
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "top_p": top_p}
    with AsyncVLLM.from_pretrained(folder, dtype=dtype, max_model_len=2048, kv_cache_memory_bytes=1 << 30) as engine:
        policy = vLLMWrapper(engine, tokenizer=tokenizer, input_mode="history", generate_kwargs=sampling)
        start = time.monotonic()
        td = policy(TensorDict(history=ChatHistory(prompt=History.from_chats(chats)), batch_size=[prompts]))
        seconds = time.monotonic() - start
    return td, sum(row["tokens", "response"].numel() for row in td.unbind(0)) / seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: log-probs ``[T]`` of its tokens by the engine, by the live model and with replay, and the experts
    that chose them, ``[T, L, K]``, of the engine and of the live model."""

    engine: Tensor
    live: Tensor
    replayed: Tensor
    theirs: Tensor
    ours: Tensor


@torch.no_grad()
def answers_of(actor: TransformersWrapper, td: TensorDictBase) -> list[Answer]:
    """Score rollouts live and with replay, one at a time."""
    recording = actor.get_new_version(replay="R2", rerecord=True)
    found = []
    for row in td.unbind(0):
        live, replayed = (one(row.copy().unsqueeze(0)).squeeze(0) for one in (recording, actor))
        start = row["tokens", "prompt"].numel()
        log_probs = [one["log_probs", "full"][start:].float() for one in (row, live, replayed)]
        # the row of a token is that of its position: what was read there chose the next token
        experts = (row["routed_experts", "full"], live["train_routed_experts", "full"])
        found.append(Answer(*log_probs, *(one[start - 1 : -1].long().sort(-1).values for one in experts)))
    return found


def by_place(answers: Sequence[Answer]) -> list[str]:
    """Return a line for each stretch of the answers' tokens."""
    lines = ["tokens | count | other experts | mean, live | replayed | 99th, live | replayed | KL, live | replayed"]
    for begin, end in itertools.pairwise(PLACES):
        parts = [one for one in answers if len(one.engine) > begin]
        if not parts:
            break
        engine, live, replayed = (
            torch.cat([getattr(one, name)[begin:end] for one in parts]) for name in ("engine", "live", "replayed")
        )
        other = torch.cat([(one.theirs != one.ours).any(-1)[begin:end] for one in parts]).float().mean()
        gaps = (live - engine, replayed - engine)
        figures = [
            *(float(gap.abs().mean()) for gap in gaps),
            *(float(gap.abs().quantile(0.99)) for gap in gaps),
            *(float((gap.expm1() - gap).mean()) for gap in gaps),
        ]
        lines.append(f"{begin}-{end} | {len(engine)} | {other:.2%} | " + " | ".join(f"{one:.2g}" for one in figures))
    return lines


def by_length(answers: Sequence[Answer]) -> list[str]:
    """Return a line for each length: the log-ratio of answers cut there, and how many of them an update would count."""
    lines = ["answers of | count | log-ratio (rms), live | replayed | effective share, live | replayed"]
    for length in PLACES[1:]:
        parts = [one for one in answers if len(one.engine) >= length]
        if len(parts) < 2:
            break
        ratios = [
            torch.stack([(getattr(one, name) - one.engine)[:length].double().sum() for one in parts])
            for name in ("live", "replayed")
        ]
        shares = [float(one.softmax(0).square().sum().reciprocal() / len(one)) for one in ratios]
        spreads = [float(one.square().mean().sqrt()) for one in ratios]
        figures = " | ".join([*(f"{one:.2g}" for one in spreads), *(f"{one:.0%}" for one in shares)])
        lines.append(f"{length} | {len(parts)} | {figures}")
    return lines


def by_layer(answers: Sequence[Answer]) -> str:
    """Return each layer's share of rows with other experts, in percent."""
    other = torch.cat([(one.theirs != one.ours).any(-1) for one in answers]).float().mean(0)
    return "rows with other experts, by layer (%): " + " ".join(f"{100 * one:.2g}" for one in other.tolist())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="the folder of the model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most (default: 64)")
    asked = parser.parse_args(arguments)
    for dtype in asked.dtypes:
        td, speed = answered(asked.model, dtype, asked.top_p, asked.tokens, asked.prompts)
        model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=getattr(torch, dtype))
        print(f"\n{dtype}: {speed:.1f} tokens/s")
        print(td[0]["routed_experts"])
        if asked.top_p < 1:
            print(td[0]["sampling", "kept"])
        actor = TransformersWrapper(model, replay="R3")
        print(probe_replay(actor, td))
        answers = answers_of(actor, td)
        print("\n".join(["", *by_place(answers), "", *by_length(answers), "", by_layer(answers)]))
    return 0


if __name__ == "__main__":  # replicas are processes, and import this file
    sys.exit(main())
