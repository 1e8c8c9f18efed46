"""How far vLLM and transformers are apart on the real model, with its own routes live and with the engine's replayed.

    python tutorials/real_moe/mismatch.py real_moe

Chats are answered by the engine at temperature 1, in float32 and in bfloat16, and scored by transformers in the same
dtype: the log-probs of the same tokens, twice.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
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


def answered(folder: str, dtype: str, top_p: float, tokens: int, prompts: int) -> tuple[TensorDictBase, float]:
    """Return rollouts of chats, and tokens per second."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": QUESTIONS[place % len(QUESTIONS)]}] for place in range(prompts)]
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "top_p": top_p}
    with AsyncVLLM.from_pretrained(folder, dtype=dtype, max_model_len=2048, kv_cache_memory_bytes=1 << 28) as engine:
        policy = vLLMWrapper(engine, tokenizer=tokenizer, input_mode="history", generate_kwargs=sampling)
        start = time.monotonic()
        td = policy(TensorDict(history=ChatHistory(prompt=History.from_chats(chats)), batch_size=[prompts]))
        seconds = time.monotonic() - start
    return td, sum(row["tokens", "response"].numel() for row in td.unbind(0)) / seconds


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
        print(probe_replay(TransformersWrapper(model, replay="R3"), td))
    return 0


if __name__ == "__main__":  # replicas are processes, and import this file
    sys.exit(main())
