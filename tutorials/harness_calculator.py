"""An agent with a calculator, trained through a URL: it is a stock client of OpenAI's API, and knows of no trainer.

The agent asks a tiny Mixture of Experts for a sum. What the model says is either its answer, or a call such as ``calc
47+38``, which the agent computes and says to the model before it asks again. A short supervised warm-up teaches the
model both; its own sums are guesses, so GRPO teaches it to use the calculator. Takes four minutes of CPU time.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI
from tqdm.auto import tqdm

from torchrl_moe.http import HarnessEnv
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.arithmetic import CharacterTokenizer
from torchrl_moe.trainers import MoEGRPOTrainer

CALL = re.compile(r"calc (\d+)\+(\d+)")
CALLS = 0.3
"""How often the model uses its calculator before it is trained."""


# -- the agent: nothing here is about training, and it could as well be a program of its own ---------------------------


async def agent(base_url: str, row: dict[str, Any]) -> float:
    """Ask for a sum, with a calculator at hand; return 1 if the answer is right."""
    # plain HTTP on this machine: no proxy, and no certificates, which take long to read
    plain_http = httpx.AsyncClient(trust_env=False, verify=False, timeout=60)
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=plain_http) as client:
        chat: list[Any] = [{"role": "user", "content": row["prompt"]}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=chat, max_completion_tokens=12)
            said = reply.choices[0].message.content or ""
            call = CALL.fullmatch(said)
            if call is None:
                return float(said == row["answer"])
            result = int(call[1]) + int(call[2])
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{result:03}"}]
    return 0.0


# -- the model --------------------------------------------------------------------------------------------------------


def problem(draw: random.Random) -> tuple[str, str]:
    """Return a sum and its answer, written with leading zeros."""
    a, b = draw.randrange(100), draw.randrange(100)
    return f"{a:02}+{b:02}", f"{a + b:03}"


def shown(draw: random.Random) -> list[dict[str, str]]:
    """Return a conversation of the warm-up: a call and what it gave, or a guess."""
    query, answer = problem(draw)
    chat = [{"role": "user", "content": f"{query}="}]
    if draw.random() < CALLS:
        chat += [{"role": "assistant", "content": f"calc {query}"}, {"role": "user", "content": answer}]
        return [*chat, {"role": "assistant", "content": answer}]
    return [*chat, {"role": "assistant", "content": f"{draw.randrange(200):03}"}]


def practised_model(folder: Path, steps: int, seed: int) -> None:
    """Train a tiny Mixture of Experts to call and to guess, and save it with its tokenizer."""
    tokenizer, draw = CharacterTokenizer(), random.Random(seed)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}
    model = make_tiny_moe("qwen3_moe", seed=seed, vocab_size=len(tokenizer), mlp_only_layers=[], **special, **sizes)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in tqdm(range(steps), desc="warm-up", leave=False, disable=None):
        batch = tokenizer.apply_chat_template(
            [shown(draw) for _ in range(64)],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            return_assistant_tokens_mask=True,
        )
        labels = batch["input_ids"].masked_fill(torch.as_tensor(batch["assistant_masks"]) == 0, -100)
        loss = model(batch["input_ids"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for part in (model.eval(), tokenizer):
        part.save_pretrained(folder)


# -- the run ----------------------------------------------------------------------------------------------------------


def train(out: Path, steps: int, warmup: int, prompts: int, seed: int) -> list[float]:
    """Train, and return the mean reward of each step."""
    torch.manual_seed(seed)
    practised_model(out / "start", warmup, seed)
    draw = random.Random(seed + 1)
    rows = [{"prompt": f"{query}=", "answer": answer} for query, answer in (problem(draw) for _ in range(2000))]
    config = {
        "out": str(out / "run"),
        "overwrite": True,
        "steps": steps,
        "seed": seed,
        "data": {"held_out": 64},
        "engine": {"arguments": {"dtype": "bfloat16", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 25}},
        "rollout": {"prompts_per_step": prompts, "group_size": 8, "max_new_tokens": 12},
        "loss": {"arguments": {"clip_epsilon": [0.2, 0.28], "masking_strategy": "rlhf"}},
        "optim": {"lr": 3e-4},
        "log": {"loggers": []},
    }
    with MoEGRPOTrainer(str(out / "start"), env=HarnessEnv(agent), dataset=rows, config=config) as trainer:
        trainer.train()
        return trainer.record.column("reward")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/harness_calculator"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=300, help="steps of the supervised warm-up")
    parser.add_argument("--prompts", type=int, default=8, help="of a step, each with 8 answers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rewards = train(options.out, options.steps, options.warmup, options.prompts, options.seed)
    few = max(1, len(rewards) // 5)
    first, last = (sum(part) / few for part in (rewards[:few], rewards[-few:]))
    print(f"right answers: {first:.2f} in the first steps, {last:.2f} in the last")
    return 0


if __name__ == "__main__":
    sys.exit(main())
