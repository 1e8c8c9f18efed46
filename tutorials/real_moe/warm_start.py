"""Supervised steps before GRPO: a model that never answers a task right has nothing to be rewarded for.

    python tutorials/real_moe/warm_start.py runs/real_moe runs/real_moe_warm_15 \\
        --steps 15 --batch-size 48 --lr 2e-5 --options chat=false max_terms=2 max_digits=2

It learns the form of answers from a task's own questions and answers, and stops there. Say so where you report what
GRPO reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from torchrl_moe.trainers.prompt_sources import read_source

INSTRUCTION = "Answer with the number only."


def examples(rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Return the ids of each question with its answer, and where the answer begins."""
    found = []
    for row in rows:
        if row["answer"] is None or row["answer"] == "":
            raise SystemExit(
                f"a question of {row.get('task', 'the data')} has no answer to learn from: {row['prompt']}"
            )
        asked, answer = row["prompt"], str(row["answer"])
        if isinstance(asked, str):  # of chat=false: the answer continues the text
            prompt, answer = tokenizer(asked)["input_ids"], f" {answer}"
        else:
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = tokenizer(answer, add_special_tokens=False)["input_ids"]
        found.append(([*prompt, *answer, tokenizer.eos_token_id], len(prompt)))
    return found


def padded(batch: Sequence[tuple[list[int], int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, attention mask and labels (-100 where nothing is learned), ``[B, T]`` each, padded on the right."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (tokens, start) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, start : len(tokens)] = torch.tensor(tokens[start:])
    return ids.to(device), mask.to(device), labels.to(device)


def train(
    model: nn.Module,
    data: Sequence[tuple[list[int], int]],
    steps: int,
    batch_size: int,
    lr: float,
    bfloat16: bool = False,
) -> float:
    """Take supervised steps, with float32 weights; return the last loss."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    random, loss = torch.Generator().manual_seed(0), torch.zeros(())
    for _ in (progress := tqdm(range(steps), desc="supervised", unit="step")):
        chosen = torch.randint(len(data), (batch_size,), generator=random).tolist()
        ids, mask, labels = padded([data[place] for place in chosen], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(ids, attention_mask=mask).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="the folder of the model")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--source", default="reasoning_gym:chain_sum", help="data, as data.source of a run")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the task, such as max_terms=2"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--bfloat16", action="store_true", help="compute in it, as a GPU does by default")
    asked = parser.parse_args(arguments)
    if asked.steps < 1 or asked.batch_size < 1 or asked.lr <= 0:
        parser.error("--steps, --batch-size and --lr must be positive")

    options: dict[str, Any] = {}
    for each in asked.options:
        name, _, value = each.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    # the rows that a run with the same options trains on: what it holds out is held out here, too
    if asked.source.startswith("reasoning_gym:"):
        options = {"instruction": "" if options.get("chat") is False else INSTRUCTION, **options}
    rows, _ = read_source(asked.source, options or None)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).to(device).train()
    loss = train(
        model, examples(rows, tokenizer), asked.steps, asked.batch_size, asked.lr, asked.bfloat16 or device == "cuda"
    )
    print(f"loss of the last step: {loss:.3f}")
    model.save_pretrained(asked.out)
    if isinstance(rows[0]["prompt"], str):
        tokenizer.chat_template = None  # a run applies it to texts, too, where there is one
        (Path(asked.out) / "chat_template.jinja").unlink(missing_ok=True)  # of an earlier warm start
    tokenizer.save_pretrained(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
