"""The scores of a model are those of its logits, through everything that may be wrapped around it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from support.families import build
from support.flash import flash_attention
from support.gradients import gradients
from support.ranks import run_as_ranks
from torchrl_moe.modules.policies.scoring_model import ScoringModel, Selection
from torchrl_moe.testing import make_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.tensor([[9, 3, 200, 41, 5], [77, 3, 3, 250, 8]])
ROWS = torch.tensor([0, 2, 3, 6, 8])
"""Of the flat input; 1, 5 and 7 are left out."""
INPUTS = {"input_ids": IDS, "position_ids": torch.arange(5).expand(2, -1)}
FULL_WARNING = "is scored from its dense logits"


def selection(entropy: bool = True, temperature: float = 0.7, ids: Tensor = IDS) -> Selection:
    return Selection(rows=ROWS, tokens=ids.flatten()[ROWS + 1], temperature=temperature, entropy=entropy)


TEMPERATURES = torch.tensor([0.5, 2.0, 0.5, 1.0, 2.0])


def sampled(entropy: bool = True) -> Selection:
    """The tokens at several temperatures: over 3 words, over all but 2, over all, over 1 and over all but 1."""
    chosen = IDS.flatten()[ROWS + 1]
    lists = [[int(chosen[0]), 0, 258], [2, 100], [], [int(chosen[3])], [7]]
    kept = torch.tensor([word for row in lists for word in row]), torch.tensor([3, -2, 0, 1, -1])
    return replace(selection(entropy), temperature=TEMPERATURES, kept=kept)


def dense(model: nn.Module, chosen: Selection | None = None) -> tuple[Tensor, Tensor]:
    """Row by row over the words that were kept; by default, all at one temperature."""
    chosen = chosen or selection()
    logits = model(**INPUTS, use_cache=False).logits.flatten(0, 1)[ROWS].float()
    ids, at = ([], 0) if chosen.kept is None else (chosen.kept[0].tolist(), 0)
    scores = []
    for n, (row, token) in enumerate(zip(logits, chosen.tokens.tolist(), strict=True)):
        size = 0 if chosen.kept is None else int(chosen.kept[1][n])
        named, at = ids[at : at + abs(size)], at + abs(size)
        words = named if size > 0 else [word for word in range(len(row)) if word not in named]
        temperature = chosen.temperature if isinstance(chosen.temperature, float) else float(chosen.temperature[n])
        distribution = torch.distributions.Categorical(logits=row[words] / temperature)
        scores.append((distribution.log_prob(torch.tensor(words.index(token))), distribution.entropy()))
    log_probs, entropies = zip(*scores, strict=True)
    return torch.stack(log_probs), torch.stack(entropies)


def scored(model: nn.Module) -> ScoringModel:
    """One that splits; anything else is a warning here, and so an error."""
    scoring = ScoringModel(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{FULL_WARNING}")
        scoring.check()
    assert scoring.splits
    return scoring


def assert_like_dense(
    model: nn.Module, atol: float = 2e-6, grad_atol: float = 1e-5, chosen: Selection | None = None, splits: bool = True
) -> None:
    """Scores and gradients."""
    results, scoring, chosen = [], scored(model), chosen or selection()
    scoring.splits = splits
    for scores in (scoring(INPUTS, chosen)[:2], dense(model, chosen)):
        (scores[0].sum() + 0.3 * scores[1].sum()).backward()
        results.append((*(s.detach() for s in scores), gradients(model)))
    (*ours, our_grads), (*theirs, their_grads) = results
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-6)
    assert our_grads.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        torch.testing.assert_close(our_grads[name], grad, atol=grad_atol, rtol=1e-4, msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_scores_and_gradients_are_those_of_the_logits(family: str, tied: bool) -> None:
    model = make_tiny_moe(family, num_hidden_layers=2, tie_word_embeddings=tied)
    assert_like_dense(model)
    for splits in (True, False):
        assert_like_dense(model, chosen=sampled(), splits=splits, atol=4e-6)
    assert "forward" not in model.__dict__
    assert "forward" not in model.lm_head.__dict__


SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 256, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gemma2", {"final_logit_softcapping": 1.5}),
        ("cohere", {"logit_scale": 0.25}),
        ("granitemoe", {"logits_scaling": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("phi", {}),  # its head has a bias
    ],
)
def test_what_a_model_does_to_its_logits_is_done_to_its_scores(family: str, config: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **config)).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
    logits = model(IDS).logits
    assert logits.abs().max() > 0.9  # so that a soft cap of 1.5 bites
    assert_like_dense(model, atol=1e-5, grad_atol=2e-4)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("choose", [selection, sampled])
def test_without_rows_every_parameter_stays_in_the_graph(choose: Any, splits: bool) -> None:
    """Under FSDP, a rank without tokens takes part in backward too."""
    model, chosen = make_tiny_moe(num_hidden_layers=2), choose(entropy=False)
    scoring = scored(model)
    scoring.splits = splits
    log_probs, entropy, routers = scoring(INPUTS, chosen)
    assert entropy is routers is None
    torch.testing.assert_close(log_probs, dense(model, chosen)[0], atol=4e-6, rtol=1e-6)
    none = ROWS[:0]
    several: dict[str, Any] = {"temperature": TEMPERATURES[:0], "kept": (none, none)} if choose is sampled else {}
    log_probs, entropy, _ = scoring(INPUTS, replace(selection(), rows=none, tokens=none, **several))
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    grads = gradients(model)
    assert grads["lm_head.weight"].shape == model.lm_head.weight.shape
    assert not any(grad.any() for grad in grads.values())


def test_a_compiled_model_with_graph_breaks_is_scored() -> None:
    """Such as those of activation checkpointing under replay, or of adapters on experts."""
    model = make_tiny_moe("qwen3", num_hidden_layers=1)
    wanted = dense(model)
    torch.compiler.reset()
    model.lm_head.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(model, backend="eager")
    log_probs, entropy, _ = scored(compiled)(INPUTS, selection())
    torch.testing.assert_close((log_probs, entropy), wanted, atol=2e-6, rtol=1e-6)


def test_a_compiled_model_is_one_graph() -> None:
    model = make_tiny_moe("qwen3", num_hidden_layers=1)
    wanted, wanted_of_sampled = dense(model), dense(model, sampled())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(scored(compiled)(INPUTS, selection())[:2], wanted, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(dense(compiled), wanted)  # its logits are still there
    torch.testing.assert_close(scored(compiled)(INPUTS, sampled())[:2], wanted_of_sampled, atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_within_its_noise(autocast: bool) -> None:
    model = make_tiny_moe(num_hidden_layers=2, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        ours, theirs = scored(model)(INPUTS, selection())[:2], dense(model)
    assert ours[0].dtype == torch.float32
    assert 0 < (ours[0] - theirs[0]).abs().max() < 0.05  # the logits that ours never rounded to bfloat16
    assert (ours[1] - theirs[1]).abs().max() < 0.05


def test_a_model_that_was_converted_scores_as_its_saved_folder(tmp_path: Any) -> None:
    model = make_tiny_moe("qwen3_moe").bfloat16()  # rounds the frequencies of rotary embeddings too
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    inputs = {"input_ids": IDS, "position_ids": 500 + INPUTS["position_ids"] ** 4}
    one, other = (ScoringModel(each)(inputs, selection())[0] for each in (model, loaded))
    assert torch.equal(one, other)


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["q_proj"]])
def test_a_peft_model_is_scored_as_its_logits_say(targets: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    saved = [] if "lm_head" in targets else ["lm_head"]
    config = LoraConfig(r=4, target_modules=targets, modules_to_save=saved)
    model: Any = get_peft_model(make_tiny_moe(num_hidden_layers=2), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert_like_dense(model)
    scoring, plain = scored(model), make_tiny_moe(num_hidden_layers=2)
    with model.disable_adapter():
        without = scoring(INPUTS, selection())[0]
    torch.testing.assert_close(without, dense(plain)[0], atol=2e-6, rtol=1e-6)
    assert (scoring(INPUTS, selection())[0] - without).abs().max() > 1e-2


def doubling(model: nn.Module) -> str:
    model.lm_head.register_forward_hook(lambda _, __, logits: 2 * logits)
    return "scores are off by"


def indexing(model: Any) -> str:
    """As models do that forbid some words."""
    native = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = native(*args, **kwargs)
        output.logits = output.logits.index_fill(-1, torch.tensor([256]), -1e4)
        return output

    model.__class__ = type("Indexing", (type(model),), {"forward": lambda _, *a, **k: forward(*a, **k)})
    return "IndexError"


def headless(model: Any) -> str:
    model.get_output_embeddings = lambda: None
    return "it has no output embeddings"


@pytest.mark.parametrize("change", [doubling, indexing, headless])
def test_such_a_model_is_scored_from_its_logits_with_one_warning(change: Callable[[nn.Module], str]) -> None:
    model = make_tiny_moe(num_hidden_layers=2)
    reason = change(model)
    scoring = ScoringModel(model)
    with pytest.warns(UserWarning, match=rf"{FULL_WARNING} \[B, T, V\].*{reason}"):
        scoring.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scoring.check()
    assert not scoring.splits
    log_probs, entropy, _ = scoring(INPUTS, selection())
    torch.testing.assert_close((log_probs, entropy), dense(model), atol=1e-6, rtol=1e-6)
    assert log_probs.requires_grad


def test_another_thread_sees_the_model_as_it_is() -> None:
    model = make_tiny_moe(num_hidden_layers=2)
    scoring, other = scored(model), scored(model)
    wanted, found = dense(model)[0], []

    def elsewhere() -> tuple[torch.Size, Tensor]:
        shape = model(**INPUTS).logits.shape
        done.set()
        other.check()
        assert other.splits
        return shape, other(INPUTS, selection())[0]

    def start(*_: Any) -> None:
        if not begun.is_set():  # the other thread comes here, too
            begun.set()
            found.append(pool.submit(elsewhere))
            assert done.wait(60)

    begun, done = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        hook = model.model.register_forward_hook(start)  # between the body and the head of a scoring pass
        ours = scoring(INPUTS, selection())[0]
        hook.remove()
    shape, theirs = found[0].result()
    assert shape == (2, 5, 259)
    torch.testing.assert_close((ours, theirs), (wanted, wanted), atol=2e-6, rtol=1e-6)


def test_router_logits_come_without_the_auxiliary_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.qwen3_moe.modeling_qwen3_moe as modeling

    given: list[Any] = []
    monkeypatch.setattr(modeling, "load_balancing_loss_func", lambda logits, *_: given.append(logits) or 0)
    model = make_tiny_moe(num_hidden_layers=3)
    routers = scored(model)(INPUTS, selection(), router_logits=True)[2]
    assert len(routers) == 2 and all(logits.requires_grad for logits in routers)
    assert given == [None]  # transformers' own loss over layers x tokens x K x E has nothing to work on
    assert not model.model._forward_hooks


@pytest.mark.parametrize("strength", [1.0, 1e-4])
def test_a_model_whose_tokens_see_their_neighbours_is_found(strength: float) -> None:
    """A convolution over the row, as state space models have, and a look ahead; a weak one is as wrong as a strong."""
    causal, behind, ahead = (make_tiny_moe(num_hidden_layers=2) for _ in range(3))
    behind.model.embed_tokens.register_forward_hook(lambda _, __, out: out + strength * out.roll(1, 1))
    ahead.model.embed_tokens.register_forward_hook(lambda _, __, out: out + strength * out.roll(-1, 1))
    assert not ScoringModel(behind).packs
    assert ScoringModel(ahead).sees_pads
    assert not ScoringModel(causal).sees_pads


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "minimax"])
def test_state_space_and_linear_attention_models_do_not_pack(family: str) -> None:
    model = build(family)
    torch.manual_seed(0)
    model.apply(model._init_weights)  # transformers' own weights are small, and so is what leaks
    assert not ScoringModel(model).packs


def test_a_model_that_scales_queries_by_their_place_in_the_row_does_not_pack() -> None:
    """Llama 4 counts places in the row, whatever the positions, and from ``floor_scale`` on they matter."""
    assert not ScoringModel(build("llama4", attn_temperature_tuning=True)).packs
    assert ScoringModel(build("llama4", attn_temperature_tuning=False)).packs


@pytest.mark.parametrize("rows", ["one", "several"])
def test_flash_attention_is_tried_as_it_is_used(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps the sequences of a batch of one row apart, and lets those of two rows see each other."""
    model = make_tiny_moe(num_hidden_layers=2)
    with flash_attention(model):
        assert ScoringModel(model).packs_in_one_row
        if rows == "several":
            monkeypatch.setattr(ScoringModel, "packs_in_one_row", False)
        assert ScoringModel(model).packs == (rows == "one")


def test_a_model_that_asks_for_a_mask_gets_one() -> None:
    model = make_tiny_moe(num_hidden_layers=2)
    forward = type(model).forward

    def masked(*args: Any, attention_mask: Tensor | None = None, **more: Any) -> Any:
        if attention_mask is None:
            raise ValueError("no attention_mask")
        return forward(model, *args, attention_mask=attention_mask, **more)

    model.forward = masked
    assert ScoringModel(model).sees_pads


def loss_of(scoring: ScoringModel, rank: int) -> Tensor:
    ids = torch.randint(0, 250, (2, 5), generator=torch.Generator().manual_seed(rank))
    log_probs, entropy, _ = scoring({"input_ids": ids}, selection(ids=ids))
    return log_probs.sum() + 0.3 * entropy.sum()


def score_sharded(how: str) -> tuple[float, dict[str, Any]]:
    """This rank's loss, and the gradients of both."""
    model: Any = make_tiny_moe(num_hidden_layers=2, tie_word_embeddings=how == "tied")
    for part in (*model.model.layers, *([model.lm_head] if how == "a head of its own" else [])):
        fully_shard(part)
    fully_shard(model, reshard_after_forward=how == "resharded root")
    loss = loss_of(scored(model), dist.get_rank())
    loss.backward()
    grads = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


@pytest.mark.parametrize("how", ["resharded root", "a head of its own", "tied"])
def test_a_model_under_fsdp2_has_its_loss_and_gradients(how: str) -> None:
    """Of unusual placements; the usual one is in ``test_policy_ranks.py``."""
    got = run_as_ranks(score_sharded, how)
    model = make_tiny_moe(num_hidden_layers=2, tie_word_embeddings=how == "tied")
    losses = [loss_of(scored(model), rank) for rank in range(2)]
    (sum(losses) / 2).backward()
    assert [loss for loss, _ in got] == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(torch.from_numpy(got[0][1][name]), grad, atol=1e-6, rtol=1e-4, msg=name)
