"""Log-probs of rollouts by an engine, as ``vLLMWrapper(generate=False)`` writes them: the fake one, and real vLLM.

At the end: full sequences of every kind, as tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens
from transformers import AutoModelForCausalLM

from support.engines import EngineShelf
from support.prompt_sources import TOKENIZER, source_of
from torchrl_moe.data import KeptTokens
from torchrl_moe.errors import ReplayError, RequestRefusedError
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.modules.policies.scoring_wrapper import encode, refuse_other_tokens
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM


@pytest.fixture
def fake() -> FakeAsyncVLLM:
    return FakeAsyncVLLM()


def prompts(*lengths: int) -> TensorDictBase:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (length,), generator=generator) for length in lengths]
    return lazy_stack([TensorDict(tokens=Tokens(prompt=row)) for row in rows])


def rollout(engine: Any, *lengths: int, pad: bool = False, **params: Any) -> TensorDictBase:
    kwargs = {"max_new_tokens": 6, "ignore_eos": True, **params}
    policy = vLLMWrapper(engine, input_mode="tokens", generate_kwargs=kwargs, inplace=False, pad_output=pad)
    return policy(prompts(*lengths))


def scorer(engine: Any, **kwargs: Any) -> vLLMWrapper:
    return vLLMWrapper(engine, **{"generate": False, "input_mode": "tokens", "log_probs_key": "old", **kwargs})


def check(batch: TensorDictBase, bound: float = 1e-6) -> None:
    """What was sampled has the log-probs that it was sampled with; pads and first tokens have 0."""
    for row in batch.unbind(0):
        sampled, scored = row["log_probs", "full"], row["old", "full"]
        real, answer = row["masks", "all_attention_mask"], row["masks", "all_assistant_mask"]
        assert scored.dtype == torch.float32
        assert scored.shape == sampled.shape
        torch.testing.assert_close(scored[answer], sampled[answer], rtol=0, atol=bound)
        assert not scored[~real].any()
        assert scored[real][0] == 0
        assert (scored[real][1:] < 0).all()


@pytest.mark.parametrize("pad", [False, True])
def test_scores_are_written_as_long_as_a_samples_tokens(pad: bool, fake: FakeAsyncVLLM) -> None:
    batch = rollout(fake, 3, 9, 1, pad=pad)
    before = set(batch.keys())
    assert scorer(fake)(batch) is batch
    assert set(batch.keys()) == before | {"old"}
    check(batch)
    out = scorer(fake, pad_output=True, inplace=False)(rollout(fake, 1, 3))
    assert out["old", "full"].shape == out["tokens", "full"].shape == out["masks", "all_attention_mask"].shape == (2, 9)
    assert out["old", "full"][0, :2].eq(0).all()
    assert out["old"].padded is True


@pytest.mark.parametrize("pad", [False, True])
def test_what_the_batch_says_reaches_the_engine_and_no_pads_do(pad: bool, fake: FakeAsyncVLLM) -> None:
    """Prompts are padded on the left, answers on the right; routes and kept tokens with them."""
    (replica,) = fake.replicas
    batch = rollout(fake, 3, 5, pad=pad, temperature=0.5, top_k=2)
    batch["min_version"] = torch.tensor([-1, 0])
    replica.submitted.clear()
    scorer(fake)(batch)
    for row, request in zip(batch.unbind(0), replica.submitted, strict=True):
        real, kept = row["masks", "all_attention_mask"], row["sampling", "kept"]
        assert request.prompt_token_ids.tolist() == row["tokens", "full"][real].tolist()
        assert request.scoring.temperature == 0.5
        assert request.scoring.kept.ids.tolist() == kept.ids.tolist()
        assert request.scoring.kept.sizes.tolist() == kept.sizes[real].tolist()
        assert torch.equal(torch.from_numpy(request.routed_experts.copy()), row["routed_experts", "full"][real])


def test_without_replay_the_engine_routes(fake: FakeAsyncVLLM) -> None:
    (replica,) = fake.replicas
    batch = rollout(fake, 3)
    replica.submitted.clear()
    bare = lazy_stack([row.exclude("routed_experts", "sampling") for row in batch.unbind(0)])
    with pytest.warns(UserWarning, match="no 'sampling' entry"), pytest.raises(ReplayError, match="replay='none'"):
        scorer(fake)(bare)
    scorer(fake, replay="none", temperature=2.0)(bare)
    (request,) = replica.submitted
    assert request.routed_experts is None
    assert request.scoring.temperature == 2.0
    unable = FakeAsyncVLLM(forced_routing_unavailable_reason="FancyRouter")
    with pytest.raises(RequestRefusedError, match="FancyRouter"):
        scorer(unable)(batch)
    scorer(unable, replay="none")(batch)


def test_a_batch_that_cannot_be_scored_is_named(fake: FakeAsyncVLLM) -> None:
    batch, pads = rollout(fake, 3, 5), rollout(fake, 3, 5)
    for row in pads.unbind(0):
        row["masks", "all_attention_mask"][:] = False
    for policy, given, call, message in (
        (scorer(fake, temperature=2.0), batch, {}, "is to be scored at 2"),
        (scorer(fake), batch, {"max_new_tokens": 3}, "are for generation"),
        (scorer(fake), pads, {}, "sample 0 has no tokens but pads"),
    ):
        with pytest.raises(ValueError, match=message):
            policy(given, **call)


PAD, END = 256, 258
TEXTS = {
    "text": ["ab", "cdefg"],
    "history": [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for question, answer in (("hi", "ab"), ("hello", "c"))
    ],
}
CHATS = History.from_chats(
    [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}],
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "c"}],
    ]
)


def words(mode: str) -> TensorDictBase:
    """Two full sequences of other lengths than each other's."""
    if mode == "history":
        return TensorDict(history=ChatHistory(full=CHATS, batch_size=[2]), batch_size=[2])
    return TensorDict(text=Text(full=["ab", "cdefg"], batch_size=[2]), batch_size=[2])


def scored_ids(fake: FakeAsyncVLLM, count: int) -> list[list[int]]:
    return [request.prompt_token_ids.tolist() for request in fake.replicas[0].submitted[-count:]]


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("mode", ["text", "history"])
def test_text_and_chats_are_encoded_and_written(mode: str, pad: bool, fake: FakeAsyncVLLM) -> None:
    """Masks and text are those of the other wrapper; ``test_transformers_wrapper.py`` compares them with TorchRL's."""
    td, one = words(mode), words(mode)[0]
    policy = scorer(fake, input_mode=mode, log_probs_key="log_probs", pad_output=pad)
    own = ["history"] if mode == "history" else []
    assert (policy.in_keys, policy.out_keys) == ([(mode, "full")], ["text", "masks", "tokens", "log_probs", *own])
    out = policy(td)
    assert out is td and set(out.keys()) == set(policy.out_keys)
    asked = scored_ids(fake, 2)
    assert all(request.routed_experts is None for request in fake.replicas[0].submitted[-2:])
    assert asked == [TOKENIZER.encode(text) for text in TEXTS[mode]]
    for i, (ids, scores) in enumerate(zip(asked, fake.score(asked), strict=True)):
        row, pads = out[i], max(map(len, asked)) - len(ids) if pad else 0
        assert row["tokens", "full"].tolist() == [PAD] * pads + ids
        assert row["log_probs", "full"].tolist() == [0.0] * (pads + 1) + scores[1:].tolist()
        if mode == "history":
            spoken = row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()
            said = [token for token in spoken if token < PAD]
            assert bytes(said).decode() == row["history"].full.content[1] == CHATS[i].content[1]
    assert policy(one) is one and one.batch_size == torch.Size([])
    assert one["log_probs", "full"].shape == one["tokens", "full"].shape == (len(asked[0]),)


def test_what_a_sample_says_of_its_tokens_is_not_used_for_others(fake: FakeAsyncVLLM) -> None:
    (replica,) = fake.replicas
    policy = scorer(fake, input_mode="text")
    td = words("text")
    td["sampling"] = TensorDict(temperature=torch.tensor([0.5, 2.0]), batch_size=[2])
    policy(td.copy())  # a temperature is the whole sample's
    assert [request.scoring.temperature for request in replica.submitted[-2:]] == [0.5, 2.0]
    scorer(fake, input_mode="text", temperature=3.0)(words("text"))
    assert replica.submitted[-1].scoring.temperature == 3.0
    cut = vLLMWrapper(fake, input_mode="text", generate_kwargs={"max_new_tokens": 2, "top_k": 2}, inplace=False)
    rollouts = cut(TensorDict(text=Text(prompt=["ab"], batch_size=[1]), batch_size=[1]))
    with pytest.raises(ValueError, match=r"sample 0 says which vocabulary entries each token .*exclude 'sampling'"):
        policy(rollouts)
    assert policy(rollouts.exclude("sampling"))[0]["old", "full"].shape == (4,)


def test_a_dense_model_scores_tokens_without_being_told_to() -> None:
    with FakeAsyncVLLM(layout=None) as dense:
        policy = scorer(dense)
        assert policy.in_keys == [("tokens", "full")]
        out = policy(TensorDict(tokens=Tokens(full=torch.tensor([[5, 6, 7]]), batch_size=[1]), batch_size=[1]))
        assert out["masks", "all_attention_mask"].all()
        assert out["old", "full"].tolist() == [[0.0, *dense.score([5, 6, 7])[1:].tolist()]]


def test_pads_of_tokens_without_masks_are_found(fake: FakeAsyncVLLM) -> None:
    """By a mask under the wrapper's own key for one, or else by the pad token, as TorchRL's wrapper does."""
    ids = torch.tensor([[PAD, PAD, 7, 8], [5, PAD, 6, PAD]])
    td = TensorDict(tokens=Tokens(full=ids, batch_size=[2]), batch_size=[2])
    policy = scorer(fake, replay="none", inplace=False)
    out = policy(td)
    assert scored_ids(fake, 2) == [[7, 8], [5, PAD, 6]]
    tokenizer = ByteTokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    turn = lazy_stack([TensorDict(tokens=Tokens(full=torch.tensor([5, END, 6, END, END])))])
    scorer(fake, replay="none", tokenizer=tokenizer)(turn)
    assert scored_ids(fake, 1) == [[5, END, 6, END]]  # of pads that end turns, the first one behind the tokens is real
    assert out[0]["masks", "all_attention_mask"].tolist() == [False, False, True, True]
    assert out[0]["old", "full"].tolist() == [0, 0, 0, fake.score([7, 8])[1].item()]
    with pytest.raises(ValueError, match=r"sample 0: 'attention_mask' has shape \[3\] and \('tokens', 'full'\) \[4\]"):
        policy(td.set("attention_mask", torch.ones(2, 3)))
    own = torch.tensor([[False, False, True, True], [True, True, True, False]])
    policy(td.set("masks", TensorDict(all_attention_mask=own, batch_size=[2])))  # a rollout's own come first
    assert scored_ids(fake, 2) == [[7, 8], [5, PAD, 6]]


def test_tokens_elsewhere_replace_those_that_are_there(fake: FakeAsyncVLLM) -> None:
    batch = rollout(fake, 3)
    batch[0]["mine"] = torch.tensor([5, 6, 7])
    policy = scorer(fake, replay="none", input_key="mine", masks_key="others", temperature=1.0)
    out = policy(batch.exclude("sampling"))
    assert out[0]["tokens", "full"].tolist() == [5, 6, 7]
    assert out[0]["tokens"].get("prompt", None) is None
    assert out[0]["others", "all_attention_mask"].tolist() == [True] * 3
    assert out[0]["masks", "all_assistant_mask"].shape == (9,)  # a rollout's, under its own key


@pytest.mark.engine("qwen3_moe")
def test_engine_and_trainer_score_alike(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    batch = rollout(engine, 3, 40, 17, pad=True, temperature=0.6, top_p=0.95, top_k=20)
    scorer(engine)(batch)
    check(batch, 1e-5)
    model = AutoModelForCausalLM.from_pretrained(shelf.folder("qwen3_moe"), dtype=torch.float32)
    with torch.no_grad():
        expected = TransformersWrapper(model, replay="R3").score(batch.copy(), entropy=False)[0]
    torch.testing.assert_close(batch["old", "full"], expected, rtol=0, atol=1e-5)


def one_chat(*turns: str) -> TensorDict:
    roles = ["user", "assistant"] * len(turns)
    chat = [{"role": role, "content": content} for role, content in zip(roles, turns, strict=False)]
    return TensorDict(history=ChatHistory(full=History.from_chats([chat])), batch_size=[1])


PLAIN = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
TRIMMED = PLAIN.replace("m.content", "(m.content | trim)")
ANSWERS = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")


@pytest.mark.parametrize(
    ("template", "turns", "said"),
    [
        (PLAIN, ["yes or no?", "no"], "no"),  # not the question's "no"
        (PLAIN, ["assistant:user", "user", "a", "r:a"], "userr:a"),
        (TRIMMED, ["no? ", " no\n"], "no"),
        (ANSWERS, ["hi", "yo"], "yo"),
        (PLAIN, ["hi", ""], ""),
    ],
)
def test_a_template_without_marks_shows_the_assistants_words(template: str, turns: list[str], said: str) -> None:
    (found,) = encode(one_chat(*turns).unbind(0), source_of("history", "full", chat_template=template))
    mask = found.assistant
    assert mask is not None and TOKENIZER.decode(found.ids[mask]) == said
    after = str(found.text).index(";") + len(";assistant:")  # the first question ends before
    assert not mask[:after].any()


def test_words_that_a_template_changes_are_not_guessed_at() -> None:
    thoughts = one_chat("hi", "<think>no</think>yo")
    (found,) = encode(thoughts.unbind(0), source_of("history", "full", chat_template=ANSWERS))
    assert (found.text, found.assistant) == ("user:hi;assistant:yo;", None)
    (found,) = encode(one_chat("hi", "yo").unbind(0), source_of("history", "full", chat_template_name="qwen"))
    assert str(found.text).startswith("<|im_start|>system\nYou are a helpful assistant.")
    assert TOKENIZER.decode(found.ids[found.assistant]) == "yo"


IDS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize("own", [None, Tokens(full=torch.tensor([1, 2, 4]))])
def test_words_are_known_of_the_sampled_tokens_alone(own: Any) -> None:
    sample = TensorDict(sampling=TensorDict(temperature=torch.tensor(1.0)))
    if own is not None:
        sample["tokens"] = own
    td = lazy_stack([sample])
    refuse_other_tokens(td, "tokens", [IDS])
    td[0]["sampling", "kept"] = KeptTokens(ids=torch.tensor([3]), sizes=torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match="sample 0 says which vocabulary entries"):
        refuse_other_tokens(td, "tokens", [IDS])
    td[0]["tokens"] = Tokens(full=IDS)
    refuse_other_tokens(td, "tokens", [IDS])
