"""Real vLLM rollouts of a tiny MoE as TensorDicts, with the experts of every token, checked against transformers.

Builds the model, starts the replicas, rolls out chat prompts, and shows what came back. Everything is local: no
download, no GPU. ``python tutorials/grpo/rollout.py --help`` lists the knobs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchrl_moe.data import RoutedExperts
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
from torchrl_moe.testing.tiny_moe import TINY_MOE_FAMILIES, save_tiny_moe

console = Console(highlight=False)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; bad input is one line and exit code 2."""
    families = sorted(name for name, family in TINY_MOE_FAMILIES.items() if family.experts_key is not None)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", default="qwen3_moe", choices=families)
    parser.add_argument("--replicas", type=int, default=1, help="vLLM engines, each of its own process (default 1)")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=Path("runs/rollout"), help="folder of the saved batch")
    options = parser.parse_args(arguments)
    for name in ("replicas", "prompts", "max_new_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.temperature <= 0:
        parser.error(f"--temperature must be positive, got {options.temperature}: greedy answers have no distribution")
    return options


def chat_prompts(count: int) -> TensorDict:
    """Return sums as one-turn chats, batch size ``[count]``."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, 100, (count, 2), generator=generator).tolist()
    history = History.from_chats([[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in pairs])
    return TensorDict(history=ChatHistory(prompt=history), batch_size=[count])


@torch.no_grad()
def reference(model: PreTrainedModel, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a stock transformers forward over known tokens.

    Args:
        model: the model that the engine serves.
        ids: int64 ``[T]``.
        temperature: that of sampling.

    Returns:
        Log-probs of tokens 1 to T-1, ``[T - 1]``, and the chosen experts of every MoE layer, ``[T, MoE layers, K]``.
    """
    chosen: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[-1])) for router in routers]
    try:
        logits = model(ids[None]).logits[0, :-1]
    finally:
        for hook in hooks:
            hook.remove()
    log_probs = (logits / temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return log_probs, torch.stack(chosen, 1)


def check_parity(td: TensorDictBase, model: PreTrainedModel, temperature: float, moe_layers: Sequence[int]) -> str:
    """Compare every answer with the reference; return one line."""
    worst, wrong, total = 0.0, 0, 0
    for sample in tqdm(td.unbind(0), desc="check against transformers", unit="seq", disable=None):
        log_probs, chosen = reference(model, sample["tokens", "full"], temperature)
        got = sample["log_probs", "full"][1:]
        known = got.isfinite()
        worst = max(worst, (got - log_probs)[known].abs().max().item())
        routes = sample["routed_experts", "full"][:-1, list(moe_layers)].long()
        differ = (routes.sort(-1).values != chosen[:-1].sort(-1).values).any(-1)
        wrong, total = wrong + int(differ.sum()), total + differ.numel()
    return f"max |dlogp| {worst:.1e}, route mismatches {wrong} of {total}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the whole tour."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="torchrl_moe-") as folder:
        path = save_tiny_moe(folder, options.family)
        console.print(f"starting {options.replicas} vLLM replica(s) of a tiny {options.family}")
        engine = AsyncVLLM.from_pretrained(
            path,
            num_replicas=options.replicas,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 27,
            max_model_len=512,
        )
        with engine:
            policy = vLLMWrapper(
                engine,
                generate_kwargs={"max_new_tokens": options.max_new_tokens, "temperature": options.temperature},
                use_tqdm=True,
            )
            started = time.perf_counter()
            td = policy(chat_prompts(options.prompts))
            seconds = time.perf_counter() - started
            layout, tokenizer = engine.routing_layout, engine.get_tokenizer()
        assert layout is not None
        print(td[0])
        first = td[0]["routed_experts"].validate(layout, num_tokens=len(td[0]["tokens", "full"]))
        console.print("experts of the first answer's tokens (rows) in each layer (columns):")
        tokens = [repr(tokenizer.decode([i])) for i in td[0]["tokens", "full"].tolist()]
        print(first.route_table(tokens))
        generated = sum(int(sample["masks", "all_assistant_mask"].sum()) for sample in td.unbind(0))
        console.print(f"{generated} tokens in {seconds:.2f} s: {generated / seconds:.0f} tokens/s")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        console.print("parity with transformers:", check_parity(td, model, options.temperature, layout.moe_layers))
    td.memmap(str(options.out))
    loaded = TensorDict.load_memmap(str(options.out))
    assert isinstance(loaded[0]["routed_experts"], RoutedExperts)
    console.print(f"saved {loaded.shape[0]} answers to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
