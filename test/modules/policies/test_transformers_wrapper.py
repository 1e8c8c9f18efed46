"""TransformersWrapper: what its arguments mean, what it reads and writes, and that it generates what it can score."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens
from torchrl.modules.llm.policies import TransformersWrapper as TorchRLWrapper
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLvLLMWrapper
from torchrl.objectives.llm import GRPOLoss as TorchRLLoss

from support.families import build
from support.gradients import gradients
from support.routes import experts_seen
from support.scored_rollouts import LAYOUT, LAYOUTS, at, dense, fake_rollouts
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules import RouterReplay, TransformersWrapper
from torchrl_moe.modules.policies.rollout import stack_answers
from torchrl_moe.modules.policies.transformers_wrapper import model_of, tokenizer_of
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")

MOE = LAYOUT.moe_layers
FULL, ROUTES, RECORDED = ("tokens", "full"), ("routed_experts", "full"), ("train_routed_experts", "full")
LOG_PROBS = ("log_probs", "full")
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def rollouts() -> LazyStackedTensorDict:
    return fake_rollouts()


@pytest.fixture
def td(rollouts: LazyStackedTensorDict) -> TensorDictBase:
    return rollouts.clone()


@pytest.fixture(scope="module")
def actor() -> TransformersWrapper:
    return TransformersWrapper(make_tiny_moe(), tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def dense_model() -> nn.Module:
    return make_tiny_moe("qwen3")


def test_a_new_version_keeps_every_argument() -> None:
    """Those that ``vLLMWrapper`` has not; ``test_vllm_wrapper.py`` has a table of the others."""
    changed: dict[str, Any] = {"replay": "R2", "temperature": 0.3, "pad_model_input": False, "measure_agreement": True}
    changed |= {"on_bad_routes": "live", "rerecord": True, "generate": False, "layout": torch.jagged}
    scorer = TransformersWrapper(make_tiny_moe(), **changed)
    again = scorer.get_new_version()
    assert {**vars(again._options), **changed} == vars(again._options) == vars(scorer._options)
    assert {name: getattr(again, name) for name in changed} == changed
    assert again.router_replay is scorer.router_replay is not None
    hotter = scorer.get_new_version(temperature=2.0)
    assert (hotter.temperature, hotter.replay, scorer.temperature) == (2.0, "R2", 0.3)
    with pytest.raises(TypeError, match=r"unknown arguments \['temprature'\]; known: \['attention_mask_key'"):
        scorer.get_new_version(temprature=1.0)


def test_a_new_version_of_another_model_has_a_handle_of_its_own(actor: TransformersWrapper) -> None:
    other = make_tiny_moe(seed=1)
    again = actor.get_new_version(model=other)
    assert again.router_replay is not actor.router_replay
    assert again.router_replay.model is other
    with pytest.raises(UnsupportedRouterError, match="it is a dense model"):
        TransformersWrapper(make_tiny_moe("qwen3"), replay="R3")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize("replay", ["R3", "R2"])
def test_a_copy_scores_alike_and_is_on_its_own(td: TensorDictBase, replay: Any, copied: Any) -> None:
    scorer = TransformersWrapper(make_tiny_moe(), replay=replay)
    with torch.no_grad():
        wanted = scorer.score(td)[0]
    again = copied(scorer)
    assert again.router_replay.model is again.model is not scorer.model
    with experts_seen(scorer.model) as untouched:
        assert torch.equal(again.score(td)[0], wanted)
        assert torch.equal(again.get_new_version().score(td)[0], wanted)
    assert not untouched


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_bad_routes": "skip"}, r"on_bad_routes must be one of \('raise', 'live'\), got 'skip'"),
        ({"input_mode": "chat"}, r"input_mode must be one of \('history', 'text', 'tokens'\), got 'chat'"),
        ({"input_mode": "text", "generate": False, "replay": "R3"}, "'R3' .* Use input_mode='tokens'"),
        ({"generate": True, "replay": "R3"}, "replay='R3' is for scoring"),
        ({"generate": True, "temperature": 1.0}, "temperature=1.0 is for scoring.* Sampling is set by generate_kwargs"),
        ({"generate": True, "pad_model_input": True}, "pad_model_input=True is for scoring"),
        ({"generate": False, "return_log_probs": False}, "return_log_probs must be True"),
        ({"pad_output": None}, r"pad_output must be True or False"),
        ({"inplace": "full"}, "inplace must be one of"),
        ({"layout": torch.sparse_coo}, "layout must be one of"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"num_samples": 4}, "num_samples is for generation, and tokens are scored by default"),
        ({"generate_kwargs": {"max_new_tokens": 3}}, "generate_kwargs is for generation"),
        ({"generate": True, "num_samples": 2, "inplace": True}, "inplace must be False .or None. when generating more"),
        ({"generate": True, "num_samples": 2, "generate_kwargs": {"n": 3}}, r"num_samples=2 differs from .*=3"),
        ({"min_batch_size": 2}, "min_batch_size must be None, got 2: .* pass one batch"),
        ({"replay": "r3"}, r"replay must be one of \(None, 'R3', 'R2', 'none'\), got 'r3'"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersWrapper("no/such/folder", **arguments)


def test_models_and_tokenizers_are_given_or_loaded(tmp_path: Path, td: TensorDictBase, dense_model: nn.Module) -> None:
    make_tiny_moe().save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    scorer = TransformersWrapper(tmp_path)
    assert scorer.device == torch.device("cpu")
    assert torch.equal(scorer.score(td)[0], TransformersWrapper(make_tiny_moe()).score(td)[0])
    assert next(model_of(tmp_path, "meta").parameters()).device == torch.device("meta")
    assert model_of(dense_model, "cpu") is dense_model
    for device in ("cuda:1", "meta"):
        with pytest.raises(ValueError, match=f"device='{device}', and the model is on 'cpu'"):
            TransformersWrapper(dense_model, device=device)
    with pytest.raises(TypeError, match="a folder or a hub name, got int"):
        TransformersWrapper(3)
    foreign = nn.Linear(1, 1)
    assert model_of(foreign) is foreign
    with pytest.raises(TypeError, match=r"Linear has no generate\(\)"):
        model_of(foreign, generate=True)

    assert TransformersWrapper(str(tmp_path), input_mode="text").tokenizer.encode("hi") == TOKENIZER.encode("hi")
    assert TransformersWrapper(dense_model, tokenizer=str(tmp_path)).tokenizer.eos_token_id == 258
    assert tokenizer_of(TOKENIZER, None, None, "text") is TOKENIZER
    assert tokenizer_of(None, "no/such/folder", None, "tokens") is None
    assert tokenizer_of(None, object(), SimpleNamespace(get_tokenizer=lambda: "its own"), "text") == "its own"
    for mode in ("text", "history"):
        with pytest.raises(ValueError, match=f"input_mode='{mode}' makes tokens of text: pass tokenizer="):
            TransformersWrapper(dense_model, input_mode=mode)


def test_it_is_a_wrapper_of_torchrl(actor: TransformersWrapper) -> None:
    assert isinstance(actor, LLMWrapperBase)
    assert not isinstance(actor, TorchRLvLLMWrapper)
    assert actor.in_keys == [FULL, ROUTES]
    scores = ["masks", "tokens", "log_probs"]
    assert actor.out_keys == [*scores, "routing"]
    assert actor.get_new_version(replay="R2").out_keys == [*scores, "routing", "train_routed_experts"]
    assert actor.get_new_version(replay="none").in_keys == [FULL]


def assert_rows(out: TensorDictBase, log_probs: Tensor) -> None:
    for i, one in enumerate(out.unbind(0)):
        row = one[LOG_PROBS]
        assert torch.equal(row, log_probs[i, len(log_probs[i]) - len(row) :])
        assert isinstance(one["log_probs"], LogProbs)


def test_forward_writes_log_probs_as_long_as_the_tokens(actor: TransformersWrapper, td: TensorDictBase) -> None:
    batch, log_probs = dense(td), actor.score(td.copy())[0].detach()
    with torch.no_grad():
        assert actor(td) is td
        actor(batch)
    assert_rows(td, log_probs)
    assert [len(one[LOG_PROBS]) for one in td.unbind(0)] == [len(one[FULL]) for one in td.unbind(0)]
    assert ("log_probs", "response") not in td.keys(True)  # the engine's do not stay beside the trainer's
    assert td["routing", "fallback"].tolist() == [1, 1, 1]
    assert batch[LOG_PROBS].shape == batch[FULL].shape
    assert not batch[LOG_PROBS][~batch["masks", "all_attention_mask"]].any()


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_forward_can_leave_its_input_alone(actor: TransformersWrapper, td: TensorDictBase, inplace: Any) -> None:
    before = td.clone()
    with torch.no_grad():
        out = actor.get_new_version(inplace=inplace)(td)
    assert set(out.keys()) == {"masks", "tokens", "log_probs", "routing"}
    assert_rows(out, actor.score(td.copy())[0].detach())
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    mine = lazy_stack([TensorDict({"mine": i}) for i in range(3)])
    with torch.no_grad():  # or written where the caller says
        assert actor.get_new_version(inplace=inplace)(td, tensordict_out=mine) is mine
    assert set(mine.keys()) == {"mine", "masks", "tokens", "log_probs", "routing"}
    for one, old in zip(td.unbind(0), before.unbind(0), strict=True):
        torch.testing.assert_close(one[LOG_PROBS], old[LOG_PROBS], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_takes_any_batch_size(actor: TransformersWrapper, td: TensorDictBase, layout: str) -> None:
    batch = LAYOUTS[layout](td)
    scorer = actor.get_new_version(replay="R2")
    with torch.no_grad():
        wanted = [scorer(lazy_stack([one.copy()]))[0][LOG_PROBS] for one in batch.unbind(0)]
        single = batch[0].copy()
        assert scorer(single) is single
        torch.testing.assert_close(single[LOG_PROBS], wanted[0], atol=1e-5, rtol=0)
        assert single[RECORDED].shape == (len(single[FULL]), 4, 4)
        ones = [batch[i].copy() for i in (0, 1, 2, 1)]
        square = stack_answers(ones, [2, 2]) if layout == "ragged" else torch.stack(ones).view(2, 2)
        assert scorer(square) is square
        for i, k in enumerate((0, 1, 2, 1)):
            got = square[i // 2][i % 2]
            torch.testing.assert_close(got[LOG_PROBS], wanted[k], atol=1e-5, rtol=0)
            assert len(got[RECORDED]) == len(got[FULL])
        with pytest.raises(ValueError, match=r"batch size \[B\] with B >= 1, got \[2, 2\]"):
            scorer.score(square)


def test_torchrls_own_wrapper_gives_the_same(actor: TransformersWrapper, td: TensorDictBase) -> None:
    options: dict[str, Any] = {"input_mode": "tokens", "generate": False, "pad_output": False}
    theirs = TorchRLWrapper(make_tiny_moe(), tokenizer=TOKENIZER, return_log_probs=True, **options)
    ours = actor.get_new_version(replay="none")
    with torch.no_grad():
        wanted, got = theirs(td.copy()), ours(td.copy())
        for one, other in zip(got.unbind(0), wanted.unbind(0), strict=True):
            torch.testing.assert_close(one[LOG_PROBS], other[LOG_PROBS], atol=1e-5, rtol=0)
        attended: dict[str, Any] = {"mask_key": ("masks", "all_attention_mask"), "padding_side": "left"}
        wanted, got = theirs.get_dist(td.copy(), **attended), ours.get_dist(td.copy(), **attended)
        logits = ours(td, logits_only=True).get("logits")
    torch.testing.assert_close(got.logits[got.mask], wanted.logits[got.mask], atol=1e-4, rtol=1e-4)
    assert torch.equal(logits, got.logits)
    assert logits.shape == (*got.mask.shape, 259)
    with pytest.raises(NotImplementedError, match="this wrapper generates"):
        ours.get_new_version(generate=True)(td, logits_only=True)


def trainable(td: TensorDictBase, actor: TransformersWrapper) -> TensorDictBase:
    """A batch to train on: sample log-probs near the actor's, all but the first known, and an advantage each."""
    torch.manual_seed(0)
    with torch.no_grad():
        near = actor.get_new_version(inplace=False)(td)
    for i, one in enumerate(td.unbind(0)):
        row = near[i][LOG_PROBS] + 0.3 * torch.randn(len(one[FULL]))
        one["log_probs"] = LogProbs(full=torch.cat([torch.tensor([torch.nan]), row[1:]]), padded=False)
        one["advantage"] = torch.randn(1, 1)
    return td


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize("strategy", ["sft", "rlhf", "generic"])
def test_torchrls_loss_and_ours_agree_where_torchrl_is_right(
    td: TensorDictBase, strategy: Any, aggregation: Any
) -> None:
    """Its other numbers are divided by prompts and pads as well; ours are in ``test_grpo.py``, by hand."""
    scorer = TransformersWrapper(make_tiny_moe())
    batch, results = trainable(at(0.7, td), scorer), []
    for kind in (TorchRLLoss, GRPOLoss):
        how: dict[str, Any] = {"masking_strategy": strategy, "aggregation": aggregation}
        out = kind(scorer, clip_epsilon=(0.2, 0.28), entropy_coeff=0.1, **how)(batch.copy())
        (out.loss_objective.squeeze() + out.loss_entropy.squeeze()).backward()
        results.append((out, gradients(scorer.model)))
    (theirs, their_grads), (out, grads) = results
    for key in ("loss_objective", "loss_entropy", "ESS"):
        torch.testing.assert_close(out.get(key).squeeze(), theirs.get(key).squeeze(), atol=1e-6, rtol=1e-5)
    assert grads.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-4)
    assert all(grads[f"model.layers.{layer}.mlp.gate.weight"].any() for layer in MOE)


@pytest.mark.parametrize(
    ("arguments", "mode", "generates", "reads"),
    [
        ({}, "tokens", False, ("tokens", "full")),
        ({"generate": False, "num_samples": 4, "generate_kwargs": {"n": 4}}, "tokens", False, ("tokens", "full")),
        ({"generate": True}, "history", True, ("history", "prompt")),
        ({"chat_template_name": "qwen"}, "history", True, ("history", "prompt")),
        ({"chat_template_name": "qwen", "generate": False}, "history", False, ("history", "full")),
        ({"input_mode": "text"}, "text", True, ("text", "prompt")),
        ({"input_mode": "text", "generate": False}, "text", False, ("text", "full")),
        ({"input_mode": "tokens", "generate": True, "input_key": "ids"}, "tokens", True, "ids"),
    ],
)
def test_what_is_read_and_done_by_default(
    dense_model: nn.Module, arguments: dict[str, Any], mode: str, generates: bool, reads: Any
) -> None:
    wrapper = TransformersWrapper(dense_model, tokenizer=TOKENIZER, **arguments)
    for one in (wrapper, wrapper.get_new_version()):
        assert (one.input_mode, one.generate, one.input_key, one.in_keys) == (mode, generates, reads, [reads])


def test_routes_are_followed_by_default(actor: TransformersWrapper, dense_model: nn.Module) -> None:
    assert actor.replay == "R3"
    assert actor.get_new_version(input_mode="text", generate=False).replay == "none"
    policy = actor.get_new_version(generate=True)
    assert (policy.replay, policy.return_routed_experts) == ("none", True)
    assert policy.get_new_version(generate=False).replay == "R3"
    ours = TransformersWrapper(dense_model)
    assert (ours.replay, ours.router_replay) == ("none", None)
    assert actor.get_new_version(replay="R2").get_new_version(generate=True).replay == "none"
    assert actor.get_new_version(generate=True, replay="none").return_routed_experts
    policy = TransformersWrapper(dense_model, tokenizer=TOKENIZER, input_mode="text", input_key="question")
    assert policy.get_new_version(num_samples=2).input_key == "question"
    assert policy.get_new_version(generate=False).input_key == ("text", "full")
    assert policy.get_new_version(generate=False, input_key="all").input_key == "all"


CHATS = [
    [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "two"}],
    [{"role": "user", "content": "and a longer one?"}, {"role": "assistant", "content": "yes"}],
]
TEXTS = ["1+1=", "and a longer one?"]


def spoken(mode: str) -> TensorDict:
    if mode == "history":
        return TensorDict(history=ChatHistory(full=History.from_chats(CHATS)), batch_size=[2])
    return TensorDict(text=Text(full=TEXTS), batch_size=[2])


@pytest.mark.parametrize("mode", ["history", "text"])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_chats_and_text_score_as_in_torchrl(dense_model: nn.Module, mode: str, pad_output: bool, packed: bool) -> None:
    arguments: dict[str, Any] = {"tokenizer": TOKENIZER, "input_mode": mode, "generate": False}
    ours = TransformersWrapper(dense_model, pad_model_input=not packed, pad_output=pad_output, **arguments)
    theirs = TorchRLWrapper(dense_model, pad_output=pad_output, **arguments)
    assert ours.out_keys == theirs.out_keys
    with torch.no_grad():
        got, wanted = ours(spoken(mode)), theirs(spoken(mode))
    assert set(got.keys()) == set(wanted.keys())
    for key, kind in {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs, "text": Text}.items():
        assert isinstance(got[key], kind)
    for key in (FULL, LOG_PROBS, ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")):
        rows = [one.get(key, as_list=True) for one in (got, wanted)]
        assert (rows[0] is None) == (rows[1] is None)
        mine, other = ([] if row is None else list(row) for row in rows)
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    assert got["text"].full == wanted["text"].full
    assert (got["text"].response, got["tokens"].get("response", None)) == (None, None)
    assert all(one["tokens"].padded is pad_output for one in got.unbind(0))


def test_losses_score_the_tokens_that_a_batch_has(dense_model: nn.Module) -> None:
    scorer = TransformersWrapper(dense_model, tokenizer=TOKENIZER, input_mode="text", generate=False)
    td = spoken("text")
    with torch.no_grad():
        made = scorer.score(td)[0]
        assert td[0][FULL].tolist() == list(b"1+1=")  # for the loss, which reads tokens
        td["tokens"] = lazy_stack([Tokens(full=torch.tensor([7, 8, 9])), Tokens(full=torch.tensor([7, 8]))])
        td["masks"] = lazy_stack([Masks(all_attention_mask=torch.ones(n).bool()) for n in (3, 2)])
        own = scorer.score(td)[0]
        wanted = dense_model(torch.tensor([[7, 8, 9]])).logits[0].log_softmax(-1)
    assert made.shape == (2, 17)
    torch.testing.assert_close(own[0, 1:], torch.stack([wanted[0, 8], wanted[1, 9]]), atol=1e-5, rtol=0)
    assert scorer(td)[1][FULL].tolist() == list(b"and a longer one?")  # a call reads what input_mode says


def test_what_is_not_there_is_named(dense_model: nn.Module) -> None:
    scorer = TransformersWrapper(dense_model, tokenizer=TOKENIZER)
    with pytest.raises(KeyError, match=r"no \('tokens', 'full'\), and there are chats: input_mode='history'"):
        scorer(spoken("history"))
    chats = scorer.get_new_version(input_mode="history")
    with pytest.raises(ValueError, match=r"Expected \('history', 'full'\) key in sample 0"):
        chats(spoken("text"))
    with pytest.raises(TypeError, match="Expected History object"):
        chats.get_new_version(input_key=("text", "full"))(spoken("text"))
    with pytest.raises(TypeError, match=r"\['temperature'\] are for generation, but this wrapper has generate=False"):
        scorer(spoken("text"), temperature=1.0)


SAMPLED = {"max_new_tokens": 5, "do_sample": True}
WORDS = {"temperature": 0.7, "top_p": 0.8}


def asked(mode: str) -> TensorDict:
    if mode == "history":
        return TensorDict(history=ChatHistory(prompt=History.from_chats([chat[:1] for chat in CHATS])), batch_size=[2])
    if mode == "text":
        return TensorDict(text=Text(prompt=TEXTS), batch_size=[2])
    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(TOKENIZER.encode(text)))) for text in TEXTS])


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize(("num_samples", "sampling"), [(None, {}), (None, WORDS), (2, WORDS)])
def test_its_answers_are_scored_as_they_were_sampled(
    actor: TransformersWrapper, mode: Any, pad_output: bool, num_samples: int | None, sampling: dict[str, float]
) -> None:
    torch.manual_seed(0)
    layout: dict[str, Any] = {"pad_output": pad_output, "num_samples": num_samples}
    policy = actor.get_new_version(generate=True, input_mode=mode, generate_kwargs={**SAMPLED, **sampling}, **layout)
    text = ["text"] if mode != "tokens" else []
    history = ["history"] if mode == "history" else []
    extra = ["sampling"] if sampling else []
    assert policy.out_keys == [*text, "masks", "tokens", "log_probs", *history, "routed_experts", *extra]
    td = asked(mode)
    out = policy(td)
    assert (out is td) == (num_samples is None)
    assert out.batch_size == ((2,) if num_samples is None else (2, num_samples))
    assert set(out.keys()) == set(policy.out_keys)
    flat = out.reshape(-1)
    with torch.no_grad():
        scores = actor.score(flat.copy())[0]
    for one, row in zip(flat.unbind(0), scores, strict=True):
        mask = one["masks", "all_attention_mask"]
        answered = one["masks", "all_assistant_mask"]
        log_probs = one[LOG_PROBS]
        assert torch.equal(torch.cat([one["tokens", "prompt"], one["tokens", "response"]]), one[FULL])
        known = one[ROUTES][mask]
        assert (known[:-1, list(MOE)] >= 0).all() and known.dtype == torch.int8
        assert (known[-1] == -1).all() and (known[:, 0] == -1).all()  # the last token, and a dense layer
        assert torch.equal(log_probs[answered], one["log_probs", "response"][: int(answered.sum())])
        assert log_probs[mask & ~answered].isnan().all()
        torch.testing.assert_close(row[-len(answered) :][answered], log_probs[answered], atol=1e-5, rtol=0)
        if mode != "tokens":
            assert one["text"].full == one["text"].prompt + one["text"].response
        if mode == "history":
            assert one["history"].response.content == [one["text"].response.removesuffix("<|im_end|>")]
            assert one["history"].full.role == ["user", "assistant"]


def test_a_dense_model_writes_what_torchrl_writes(dense_model: nn.Module) -> None:
    policy = TransformersWrapper(dense_model, tokenizer=TOKENIZER, input_mode="history", generate_kwargs=SAMPLED)
    assert policy.out_keys == ["text", "masks", "tokens", "log_probs", "history"]
    out = policy(asked("history"))
    assert set(out.keys()) == set(policy.out_keys)
    silent = policy.get_new_version(return_log_probs=False)
    assert silent.out_keys == ["text", "masks", "tokens", "history"]
    assert "log_probs" not in silent(asked("history"))
    for ask in (policy.get_dist, policy.score):
        with pytest.raises(NotImplementedError, match=r"this wrapper generates: get_new_version\(generate=False\)"):
            ask(out)
    ended = {**SAMPLED, "forced_eos_token_id": 258, "skip_special_tokens": True}
    out = policy.get_new_version(generate_kwargs=ended)(asked("history"))[0]
    assert int(out["tokens", "response"][-1]) == 258
    assert "<|im_end|>" not in out["text"].response


def test_one_call_may_be_sampled_otherwise_and_leaves_nothing_of_an_older_answer(actor: TransformersWrapper) -> None:
    policy = actor.get_new_version(generate=True, input_mode="text", generate_kwargs={"max_new_tokens": 3})
    wanted, one = policy(asked("text")), policy(asked("text")[0])
    assert one.batch_size == () and one["text"].response == wanted[0]["text"].response
    assert float(one["sampling", "temperature"]) == 0  # greedy, unless told to sample
    out = lazy_stack([TensorDict({"mine": i}) for i in range(2)])
    assert policy(asked("text"), max_new_tokens=2, temperature=0.5, tensordict_out=out) is out and "mine" in out
    assert [len(row) for row in out.get(("tokens", "response"), as_list=True)] == [2, 2]
    assert out["sampling", "temperature"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="num_return_sequences=3 differs from num_samples=1"):
        policy(asked("text"), num_return_sequences=3)
    with torch.no_grad():
        td = actor(policy(asked("text"), temperature=0.5))
    plain = policy.get_new_version(generate_kwargs=SAMPLED, return_routed_experts=False)
    assert set(plain(td).keys()) == {"text", "masks", "tokens", "log_probs"}


def test_a_second_turn_keeps_what_is_known_of_the_first(actor: TransformersWrapper) -> None:
    torch.manual_seed(1)
    policy = actor.get_new_version(generate=True, input_mode="tokens", generate_kwargs={**SAMPLED, "top_k": 20})
    first = policy(asked("tokens"))
    second = first.clone()
    for one in second.unbind(0):
        one["tokens", "prompt"] = torch.cat([one[FULL], torch.tensor([5, 6])])
    with pytest.raises(ValueError, match=r"this turn's temperature is 0.7, that of the turn before 1"):
        policy(second.clone(), temperature=0.7)
    policy(second)
    for one, later in zip(first.unbind(0), second.unbind(0), strict=True):
        length = len(one[FULL])
        torch.testing.assert_close(later[LOG_PROBS][:length], one[LOG_PROBS], equal_nan=True)
        assert torch.equal(later[ROUTES][: length - 1], one[ROUTES][:-1])
        assert (later[ROUTES][length - 1, list(MOE)] >= 0).all()  # its last token is fed now
        assert torch.equal(later["sampling", "kept"].sizes[:length], one["sampling", "kept"].sizes)
    with torch.no_grad():
        scores = actor.score(second.copy())[0]
    for i, one in enumerate(second.unbind(0)):
        sampled = ~one[LOG_PROBS].isnan()
        got = scores[i, -len(sampled) :][sampled]
        torch.testing.assert_close(got, one[LOG_PROBS][sampled], atol=1e-5, rtol=0)


def test_what_records_the_experts_of_an_answer(actor: TransformersWrapper, dense_model: nn.Module) -> None:
    def recorder(model: nn.Module, **given: Any) -> RouterReplay | None:
        return TransformersWrapper(model, tokenizer=TOKENIZER, generate=True, **given).router_replay

    model = actor.model
    found = recorder(model)
    assert found is RouterReplay.of(model)
    assert recorder(model, router_replay=found) is found is actor.router_replay
    assert recorder(model, return_routed_experts=False) is None
    assert recorder(dense_model) is None
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no experts by its config"):
        recorder(dense_model, return_routed_experts=True)
    with pytest.raises(UnsupportedRouterError, match=r"sparsemixer.* return_routed_experts=False"):
        TransformersWrapper(build("phimoe"), input_mode="tokens", generate=True)
