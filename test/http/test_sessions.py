"""Sessions against an independent record of full lists, by cases worked out by hand, and at their limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor, lazy_stack

from support.rollouts import GivenActor
from torchrl_moe.data import KeptTokens, RoutingLayout
from torchrl_moe.errors import SessionClosedError, SessionLimitError
from torchrl_moe.http.sessions import Limits, Session, SessionStore
from torchrl_moe.http.trajectories import load_trajectories
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.testing import ByteTokenizer

LAYOUT = RoutingLayout(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=8)
TOKENIZER = ByteTokenizer()
END = TOKENIZER.eos_token_id
RNG = np.random.default_rng(0)


def new_session(**limits: Any) -> Session:
    return SessionStore(TOKENIZER, LAYOUT, Limits(**limits)).get("s")


@pytest.fixture
def session() -> Session:
    return new_session()


def random_rows(count: int) -> NDArray[np.uint8]:
    """Rows as vLLM gives them: zeros where there is no router."""
    rows = np.zeros((count, 3, 2), np.uint8)
    for row in rows:
        for layer in LAYOUT.moe_layers:
            row[layer] = RNG.permutation(8)[:2]
    return rows


def completed(
    prompt: Sequence[int],
    *answers: Sequence[int],
    version: int = 0,
    rows: NDArray[np.uint8] | None = None,
    finish_reason: str = "stop",
    kept: KeptIds | None = None,
) -> Completion:
    """A completion with random log-probs and routes; ``rows``: those of the prompt, and of the answer but its last."""
    outputs = [
        CompletionOutput(
            index=index,
            token_ids=np.array(ids, np.int64),
            text="",
            finish_reason=finish_reason,
            policy_versions=np.full(len(ids), version, np.int32),
            logprobs=-RNG.random(len(ids), np.float32),
            routed_experts=random_rows(len(prompt) + len(ids) - 1) if rows is None else rows,
            kept=kept,
        )
        for index, ids in enumerate(answers)
    ]
    return Completion(
        request_id="r", prompt=None, prompt_token_ids=np.array(prompt, np.int64), num_cached_tokens=3, outputs=outputs
    )


def call(session: Session, prompt: Sequence[int], *answers: Sequence[int], **kwargs: Any) -> Completion:
    completion = completed(prompt, *answers, **kwargs)
    session.record(prompt, completion)
    return completion


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


OPEN = "<|im_start|>assistant\n"


def full(td: TensorDictBase) -> list[int]:
    return td["tokens", "full"].tolist()


def trained(td: TensorDictBase) -> list[int]:
    return td["tokens", "full"][td["masks", "all_assistant_mask"]].tolist()


# -- against full lists -----------------------------------------------------------------------------------------------

Label = tuple[int, int]
"""A token's id, and the number of the answer that it was sampled for; -1: it was given."""


class FullLists:
    """What a session should know, kept as one full list per answer: quadratic, and without a tree."""

    def __init__(self) -> None:
        self.answers: list[tuple[Label, ...]] = []
        self.rows: dict[tuple[Label, ...], Any] = {}  # all tokens up to one -> the experts that it was first read by
        self.by: dict[tuple[Label, ...], int] = {}  # and the version of the weights
        self.values: list[tuple[Completion, int, float]] = []
        self.resume: list[str] = []

    def record(self, completion: Completion, temperature: float) -> None:
        prompt = completion.prompt_token_ids.tolist()
        asked = self.labelled(prompt)
        for output in completion.outputs:
            number = len(self.answers)
            labels = (*asked, *((token, number) for token in output.token_ids.tolist()))
            self.answers.append(labels)
            self.values.append((completion, output.index, temperature))
            version, how = int(output.policy_versions[0]), "none"
            for t, row in enumerate(output.routed_experts.tolist()):
                before = labels[: t + 1]
                had = self.rows.setdefault(before, row)
                by = self.by.setdefault(before, version)
                if any(set(one) != set(other) for one, other in zip(had, row, strict=True)):
                    how = "live"
                elif by != version and how == "none":
                    how = "forced"
            self.resume.append(how)

    def labelled(self, prompt: list[int]) -> tuple[Label, ...]:
        """The prompt, with the answers that it repeats whole."""
        best: tuple[Any, tuple[Label, ...]] = ((0, 0, ()), ())
        for known in self.answers:
            shared = 0
            while shared < min(len(known), len(prompt)) and known[shared][0] == prompt[shared]:
                shared += 1
            while 0 < shared < len(known) and known[shared][1] == known[shared - 1][1] != -1:  # half of an answer
                shared -= 1
            owners = tuple(dict.fromkeys(number for _, number in known[:shared] if number >= 0))
            best = max(best, ((len(owners), shared, owners), known[:shared]), key=lambda one: one[0])
        return (*best[1], *((token, -1) for token in prompt[len(best[1]) :]))

    def rows_of(self, labels: Sequence[Label]) -> list[Any]:
        """The experts of each token, as they are kept: none in layer 0, which is dense."""
        found = [self.rows.get(tuple(labels[: t + 1])) for t in range(len(labels))]
        return [[[-1, -1], *(row[1:] if row else [[-1, -1]] * 2)] for row in found]

    def known(self, prompt: list[int], version: int | None) -> tuple[int, list[Any]]:
        """How many first tokens of a prompt have rows, and those up to the last one that other weights have read."""
        labels = self.labelled(prompt)
        by = [self.by.get(labels[: t + 1]) for t in range(len(labels))]
        follow = [t + 1 for t, one in enumerate(by) if one is not None and one != version]
        known = next((t for t, one in enumerate(by) if one is None), len(by))
        return known, self.rows_of(labels)[: max(follow, default=0)]

    def trajectories(self, shared: str) -> list[dict[str, Any]]:
        found, taken = [], set()
        for number, labels in enumerate(self.answers):
            if any(number in {owner for _, owner in other[: len(labels)]} for other in self.answers if other != labels):
                continue
            owners = [one for one in dict.fromkeys(owner for _, owner in labels) if one >= 0 and one not in taken]
            if shared == "first":
                taken.update(owners)
            for temperature in dict.fromkeys(self.values[owner][2] for owner in owners):
                counted = [one for one in owners if self.values[one][2] == temperature]
                found.append(self.trajectory(labels, counted, temperature))
        return found

    def trajectory(self, labels: tuple[Label, ...], counted: list[int], temperature: float) -> dict[str, Any]:
        log_probs, versions = [], []
        for t, (_, owner) in enumerate(labels):
            at = t - next(i for i, label in enumerate(labels) if label[1] == owner)
            completion, index, _ = self.values[owner]
            output = completion.outputs[index]
            log_probs.append(float(output.logprobs[at]) if owner in counted else None)
            versions.append(int(output.policy_versions[at]) if owner >= 0 else -1)
        made_by = [version for version, (_, owner) in zip(versions, labels, strict=True) if owner in counted]
        prompt = next(t for t, (_, owner) in enumerate(labels) if owner in counted)
        return {
            "full": [token for token, _ in labels],
            "prompt": [token for token, _ in labels[:prompt]],
            "mask": [owner in counted for _, owner in labels],
            "log_probs": log_probs,
            "response": log_probs[prompt:],
            "versions": versions,
            "version": (min(made_by), 1 + sum(a != b for a, b in pairwise(made_by))),
            "routes": self.rows_of(labels),
            "temperature": temperature,
            "resume": max((self.resume[one] for _, one in labels if one >= 0), key=["none", "forced", "live"].index),
        }


def plain(td: TensorDictBase) -> dict[str, Any]:
    whole, response = (td["log_probs", name].tolist() for name in ("full", "response"))
    return {
        "full": full(td),
        "prompt": td["tokens", "prompt"].tolist(),
        "mask": td["masks", "all_assistant_mask"].tolist(),
        "log_probs": [None if value != value else value for value in whole],
        "response": [None if value != value else value for value in response],
        "versions": td["policy_versions", "full"].tolist(),
        "version": (int(td["policy_version"]), int(td["num_segments"])),
        "routes": td["routed_experts", "full"].tolist(),
        "temperature": float(td["sampling", "temperature"]),
        "resume": td["resume"],
    }


FEW = st.integers(0, 2)  # few ids, so that prompts and answers begin alike
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "base": st.integers(0, 30),
            "cut": st.integers(0, 12),
            "whole": st.booleans(),
            "more": st.lists(FEW, max_size=4),
            "answers": st.lists(st.lists(FEW, min_size=1, max_size=4), min_size=1, max_size=2),
            "version": st.integers(0, 2),
            "temperature": st.sampled_from([0.5, 1.0]),
            "same_rows": st.booleans(),
        }
    ),
    min_size=1,
    max_size=9,
)


@given(CALLS)
@settings(max_examples=50)
def test_trajectories_equal_those_of_full_lists(calls: list[dict[str, Any]]) -> None:
    session, lists = new_session(), FullLists()
    for one in calls:
        known = [[token for token, _ in labels] for labels in lists.answers] or [[]]
        base = known[one["base"] % len(known)]
        prompt = (base if one["whole"] else base[: one["cut"]]) + one["more"] or [7]
        completion = completed(prompt, *one["answers"], version=one["version"])
        if one["same_rows"]:  # as they are known, in another order
            for output in completion.outputs:
                for t in range(len(prompt)):
                    row = lists.rows.get(lists.labelled(prompt)[: t + 1])
                    if row is not None:
                        output.routed_experts[t] = np.array(row)[:, ::-1]
        session.record(prompt, completion, sampling_params={"temperature": one["temperature"]})
        lists.record(completion, one["temperature"])
    for shared in ("first", "all"):
        assert [plain(td) for td in session.trajectories(shared)] == lists.trajectories(shared)
        for td in session.trajectories(shared):
            assert full(td) == td["tokens", "prompt"].tolist() + td["tokens", "response"].tolist()
            td["routed_experts"].validate(LAYOUT, num_tokens=len(full(td)))
    for prompt in known:
        for version in (None, 0, 1, 2):
            count, rows = lists.known([*prompt, 9], version)
            assert session.known_rows([*prompt, 9]) == count
            found = session.routes_to_follow([*prompt, 9], version)
            assert ([] if found is None else found.tolist()) == rows
    # each token once: as many as there are different beginnings
    assert session.num_tokens == len({labels[: t + 1] for labels in lists.answers for t in range(len(labels))})
    counted = [int(td["masks", "all_assistant_mask"].sum()) for td in session.trajectories()]
    assert sum(counted) == sum(len(answer) for one in calls for answer in one["answers"])
    assert_equal(load_trajectories(session.to_safetensors()), session.trajectories())


def assert_equal(left: list[TensorDict], right: list[TensorDict]) -> None:
    """Every leaf is the same bit for bit, and of the same class."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert {key: type(one[key]) for key in one.keys()} == {key: type(other[key]) for key in other.keys()}  # noqa: SIM118
        leaves = [dict(td.items(True, True, is_leaf=is_leaf_nontensor)) for td in (one, other)]
        assert leaves[0].keys() == leaves[1].keys()
        for key, value in leaves[0].items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == leaves[1][key].dtype
                assert value.numpy().tobytes() == leaves[1][key].numpy().tobytes(), key
            else:
                assert value.data == leaves[1][key].data, key


# -- by hand ----------------------------------------------------------------------------------------------------------


# Two ids for one text: byte 200 alone is no UTF-8, and decodes to U+FFFD, whose own three bytes do so too.
BAD, REPLACEMENT = [200], list("\ufffd".encode())


SAID = st.lists(st.integers(0, 255), min_size=1, max_size=6)
TURN = st.tuples(SAID, st.booleans(), st.text(max_size=4))


@given(st.text(max_size=4), st.lists(TURN, min_size=1, max_size=4))
@settings(max_examples=50)
def test_any_bytes_that_were_sampled_are_sent_again(asked: str, turns: list[tuple[list[int], bool, str]]) -> None:
    """Whatever they decode to; the client sends text, and the template writes the end of a turn that was cut."""
    session = new_session()
    sent = ids(turn("user", asked) + OPEN)
    text = TOKENIZER.decode(sent)
    for answer, is_cut, then in turns:
        sampled = answer if is_cut else [*answer, END]
        call(session, sent, sampled)
        rest = ("<|im_end|>" if is_cut else "") + "\n" + turn("user", then) + OPEN
        sent, text = sent + sampled + ids(rest), text + TOKENIZER.decode(sampled) + rest
        assert session.prompt_ids(ids(text)) == sent
    (td,) = session.trajectories()
    assert trained(td) == [token for answer, is_cut, _ in turns for token in (answer if is_cut else [*answer, END])]


def test_of_answers_that_begin_alike_the_one_that_came_back_is_continued(session: Session) -> None:
    """The first was cut inside a character; the second has a marker that no message shows."""
    sent = ids(turn("user", "hi") + OPEN)
    answers = [([32, 0xC3], " "), ([*ids(" é"), TOKENIZER.pad_token_id], " é"), (ids(" é!"), " é!")]
    for sampled, content in answers:
        session.record(sent, completed(sent, sampled), messages=[user("hi")], message_returned=said(content))
    more = "<|im_end|>\n" + turn("user", "and?") + OPEN
    for sampled, content in answers:
        messages = [user("hi"), said(content), user("and?")]
        assert session.prompt_ids([*sent, *ids(content + more)], messages) == [*sent, *sampled, *ids(more)]
    # of text alone it is the longest that the prompt begins with
    assert session.prompt_ids([*sent, *ids(" é!" + more)]) == [*sent, *ids(" é!" + more)]


@pytest.mark.parametrize("half", [[0xEF], [0xEF, 0xBF]])
def test_half_a_character_at_the_end_is_not_the_mark_that_stands_for_it(half: list[int]) -> None:
    """Its bytes are also the first ones of the mark, which its text shows and which a client encodes."""
    session, sent = new_session(), ids("hi")
    call(session, sent, [*ids(" a"), *half])
    assert session.prompt_ids([*sent, *ids(" a\ufffdand?")]) == [*sent, *ids(" a"), *half, *ids("and?")]
    whole = [*sent, *ids(" a"), *half, *[0xBF] * (3 - len(half)), *ids("and?")]  # as the first bytes of another one
    assert session.prompt_ids(whole) == whole


@pytest.mark.parametrize("letters", [11, 12, 13, 14])
def test_a_long_answer_is_known_wherever_its_first_part_is_cut(letters: int) -> None:
    """Texts are compared by their first 16 tokens before all of them: those may end inside of a character."""
    session, sent, rest = new_session(), ids("hi"), "a" * letters + "éé"
    call(session, sent, [*BAD, *ids(rest)])
    assert session.prompt_ids([*sent, *REPLACEMENT, *ids(rest + "and?")]) == [*sent, *BAD, *ids(rest + "and?")]


def test_an_answer_that_another_text_follows_is_left_as_rendered(session: Session) -> None:
    call(session, ids("ab"), [*BAD, 99])
    for other in (ids("ab") + REPLACEMENT, ids("ax") + REPLACEMENT + [99], ids("b"), ids("ab") + REPLACEMENT + [98]):
        assert session.prompt_ids(other) == other


def test_a_rest_that_no_token_begins_is_encoded_again() -> None:
    """In a prompt of text, the answer's last character and the next one may be one token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}, merges=[("a", "b"), ("b", "c")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, clean_up_tokenization_spaces=False)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    session = SessionStore(tokenizer, LAYOUT).get("s")
    call(session, [2], [0])  # "c", then "a"
    assert tokenizer("cabc", add_special_tokens=False)["input_ids"] == [2, 3, 2]
    assert session.prompt_ids([2, 3, 2]) == [2, 0, 4]  # "a" stays, and "bc" is encoded


# -- by messages ------------------------------------------------------------------------------------------------------


class Chat:
    """A client, and a template that drops reasoning from all answers but the one that is being made."""

    def __init__(self, session: Session, system: str = "sys") -> None:
        self.session, self.system = session, system

    def rendered(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        said = [turn(one["role"], one.get("content") or json.dumps(one.get("tool_calls"))) for one in messages]
        return ids(turn("system", self.system) + "".join(said) + OPEN)

    def sent(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self.session.prompt_ids(self.rendered(messages), messages)

    def ask(self, messages: Sequence[dict[str, Any]], answer: str, returned: dict[str, Any]) -> list[int]:
        sent = self.sent(messages)
        self.session.record(sent, completed(sent, ids(answer)), messages=messages, message_returned=returned)
        return sent


@pytest.fixture
def chat(session: Session) -> Chat:
    return Chat(session)


NEXT = turn("user", "b") + OPEN
THOUGHT = "<think>hm</think>yes<|im_end|>"
YES = {**said("yes"), "reasoning": "hm", "tool_calls": [], "refusal": None}
SENT_BACK = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}


def test_reasoning_that_the_template_drops_stays_in_what_is_sent(chat: Chat) -> None:
    first = chat.ask([user("a")], THOUGHT, YES)
    second = chat.ask([user("a"), SENT_BACK, user("b")], "<think>so</think>no<|im_end|>", {**YES, "content": "no"})
    assert second == first + ids(THOUGHT + "\n" + NEXT)
    third = chat.ask([user("a"), YES, user("b"), said("no"), user("c")], "ok<|im_end|>", said("ok"))
    assert third == second + ids("<think>so</think>no<|im_end|>\n" + turn("user", "c") + OPEN)
    (td,) = chat.session.trajectories()
    assert trained(td) == ids(THOUGHT + "<think>so</think>no<|im_end|>" + "ok<|im_end|>")


def test_of_answers_that_say_the_same_the_one_with_the_reasoning_that_came_back_goes_on(chat: Chat) -> None:
    other = {**YES, "reasoning": "so"}
    first = chat.ask([user("a")], THOUGHT, YES)
    assert chat.ask([user("a")], "<think>so</think>yes<|im_end|>", other) == first
    for message, thought in ((YES, "hm"), (other, "so"), (SENT_BACK, "so")):  # without any: the newest
        kept = first + ids(f"<think>{thought}</think>yes<|im_end|>\n" + NEXT)
        assert chat.sent([user("a"), message, user("b")]) == kept
    for message in (YES, other):  # and so does what follows each
        second = chat.ask([user("a"), message, user("b")], "ok<|im_end|>", said("ok"))
        third = chat.sent([user("a"), message, user("b"), said("ok"), user("c")])
        assert third == second + ids("ok<|im_end|>\n" + turn("user", "c") + OPEN)
    for message in (YES, other):  # also once both have an answer of the same words
        start = first + ids(f"<think>{message['reasoning']}</think>yes")
        assert chat.sent([user("a"), message, user("b"), said("ok"), user("c")])[: len(start)] == start


def test_an_answer_that_only_one_of_two_branches_has_tells_them_apart_where_reasoning_is_left_out(chat: Chat) -> None:
    first = chat.ask([user("a")], THOUGHT, YES)
    second = chat.ask([user("a"), SENT_BACK, user("b")], "ok<|im_end|>", said("ok"))
    assert second == first + ids(THOUGHT + "\n" + NEXT)
    chat.ask([user("a")], "<think>so</think>yes<|im_end|>", {**YES, "reasoning": "so"})
    third = chat.sent([user("a"), SENT_BACK, user("b"), said("ok"), user("c")])
    assert third == second + ids("ok<|im_end|>\n" + turn("user", "c") + OPEN)


@pytest.mark.parametrize(
    ("changed", "system"),
    [
        ([user("a"), {**YES, "content": "yes!"}, user("b")], "sys"),
        ([user("a"), {**YES, "reasoning": "ho"}, user("b")], "sys"),
        ([user("A"), YES, user("b")], "sys"),
        ([{"role": "system", "content": "sys"}, user("a"), YES, user("b")], "sys"),
        ([user("a"), user("b")], "sys"),
        ([user("a"), YES, user("b")], "sys, and a calculator"),
    ],
    ids=["the answer", "its reasoning", "the question", "one more message", "the answer left out", "other tools"],
)
def test_a_history_that_the_client_changed_is_a_branch(
    session: Session, changed: list[dict[str, Any]], system: str
) -> None:
    Chat(session).ask([user("a")], THOUGHT, YES)
    chat = Chat(session, system)
    assert chat.ask(changed, "ok<|im_end|>", said("ok")) == chat.rendered(changed)
    assert [trained(td) for td in session.trajectories()] == [ids(THOUGHT), ids("ok<|im_end|>")]


def test_an_answer_that_was_cut_goes_on_at_the_end_of_its_turn(chat: Chat) -> None:
    first = chat.ask([user("a")], "<think>hm</think>ye", said("ye"))
    sent = chat.sent([user("a"), said("ye"), user("b")])
    assert sent == first + ids("<think>hm</think>ye<|im_end|>\n" + NEXT)


def test_an_answer_with_an_end_inside_is_no_message(chat: Chat) -> None:
    chat.ask([user("a")], "<think><|im_end|>hm</think>yes<|im_end|>", YES)
    history = [user("a"), YES, user("b")]
    assert chat.sent(history) == chat.rendered(history)


def test_a_tool_call_is_the_same_however_its_arguments_are_written(chat: Chat) -> None:
    def calling(arguments: str, **message: Any) -> dict[str, Any]:
        made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [made], **message}

    answer = "<tool_call>f(1, 2)</tool_call><|im_end|>"
    first = chat.ask([user("a")], answer, calling('{"a": 1, "b": 2}', content=None))
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    for arguments in ('{"b":2,"a":1}', '{"b": 2.0, "a": 1e0}'):  # JSON has one kind of number
        history = [user("a"), calling(arguments, content=""), result]
        assert chat.sent(history) == first + ids(answer + "\n" + turn("tool", "3") + OPEN)
    history[1] = calling('{"b":2,"a":2}')
    assert chat.sent(history) == chat.rendered(history)


def test_of_several_choices_the_one_that_came_back_is_continued(chat: Chat) -> None:
    prompt, returned = chat.rendered([user("a")]), [said("x"), said("y")]
    answers = ["<think>1</think>x<|im_end|>", "<think>2</think>y<|im_end|>"]
    completion = completed(prompt, *map(ids, answers))
    chat.session.record(prompt, completion, messages=[user("a")], message_returned=returned)
    for message, answer in zip(returned, answers, strict=True):
        assert chat.sent([user("a"), message, user("b")]) == prompt + ids(answer + "\n" + NEXT)


# -- what a trajectory is trained with --------------------------------------------------------------------------------


def test_kept_tokens_come_with_the_tokens_they_belong_to(session: Session) -> None:
    kept = KeptIds(np.array([3, 7, 4], np.int32), np.array([2, -1], np.int32))
    call(session, [1, 2], [3, 5], kept=kept)
    call(session, [1, 2, 3, 5, 8], [6])
    (td,) = session.trajectories()
    found: KeptTokens = td["sampling", "kept"].validate(vocabulary=9, num_tokens=6, tokens=td["tokens", "full"])
    assert found.sizes.tolist() == [0, 0, 2, -1, 0, 0]
    assert found.ids.tolist() == [3, 7, 4]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logit_bias", {5: 1.0}),
        ("thinking_token_budget", 3),
    ],
)
def test_what_no_trainer_can_score_is_context_only(session: Session, name: str, value: Any) -> None:
    session.record([1], completed([1], [2]), sampling_params={name: value})
    assert session.trajectories() == []
    call(session, [1, 2, 3], [4])
    assert [trained(td) for td in session.trajectories()] == [[4]]


def test_aborted_and_empty_answers_are_left_out(session: Session) -> None:
    call(session, [1], [2], finish_reason="abort")
    call(session, [1], [], rows=random_rows(0))
    assert session.trajectories() == []
    assert session.num_calls == 2


def test_losses_take_trajectories_as_they_are(session: Session) -> None:
    call(session, [1], [2, 3])
    call(session, [1, 2, 3, 4], [5])
    call(session, [1, 2, 3, 6], [7])
    batch = lazy_stack(session.trajectories())
    batch.set("advantage", torch.ones(2, 1, 1))
    rows = [row.nan_to_num() for row in batch.get(("log_probs", "full"), as_list=True)]
    log_probs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    for masking in ("sft", "rlhf"):
        actor = GivenActor(log_probs.clone())
        out = GRPOLoss(actor, masking_strategy=masking, entropy_bonus=False)(batch)
        out.loss_objective.backward()
        # four sampled tokens of advantage 1 and ratio 1: the mean over them is -1
        assert float(out.loss_objective.detach()) == pytest.approx(-1.0)
        assert float(actor.log_probs.grad.sum()) == pytest.approx(-1.0)


# -- reading again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "followed", "how"), [(1, 0, "none"), (2, 3, "forced"), (2, 2, "live"), (2, 0, "live")]
)
def test_rows_that_were_cached_are_not_sent_and_are_of_the_same_weights_or_were_followed(
    version: int, followed: int, how: str
) -> None:
    session = new_session()
    call(session, [1, 2], [3, 4], version=1)
    before = session.trajectories()[0]["routed_experts", "full"]
    rows = random_rows(3)
    sent = completed([1, 2, 3, 4, 5], [6], version=version, rows=rows[-2:])
    session.record([1, 2, 3, 4, 5], sent, followed=followed)
    (td,) = session.trajectories()
    assert (td["resume"], int(td["num_cached_tokens"])) == (how, 3)
    routes = td["routed_experts", "full"]
    assert torch.equal(routes[:3], before[:3])
    np.testing.assert_array_equal(routes[3:5, 1:], rows[-2:, 1:])


def test_an_engine_without_routes() -> None:
    session = SessionStore(TOKENIZER).get("s")
    call(session, [1], [2])
    call(session, [1, 2, 3], [4])
    (td,) = session.trajectories()
    assert "routed_experts" not in td.keys()  # noqa: SIM118
    assert (session.routes_to_follow([1, 2]), session.known_rows([1, 2])) == (None, 0)
    assert_equal(load_trajectories(session.to_safetensors()), [td])


# -- size -------------------------------------------------------------------------------------------------------------


def test_a_session_grows_with_its_new_tokens_only(session: Session) -> None:
    """40 turns: the prompts add up to 20 times the tokens that are kept, and each token costs its own arrays."""
    prompt, sent, sizes = [1] * 20, 0, []
    for _ in range(40):
        call(session, prompt, [2] * 10)
        sent += len(prompt) + 10
        prompt = prompt + [2] * 10 + [3] * 20
        sizes.append(session.nbytes)
    assert session.num_tokens == 20 + 40 * 10 + 39 * 20
    assert sent > 20 * session.num_tokens
    # id 4 bytes, experts 3 * 2; of a sampled token also log-prob and version
    assert session.nbytes == session.num_tokens * (4 + 6) + 400 * 8
    assert len(set(np.diff(sizes))) == 1
    (td,) = session.trajectories()
    assert len(full(td)) == session.num_tokens


# -- files ------------------------------------------------------------------------------------------------------------


def test_routes_may_stay_with_the_session(session: Session) -> None:
    call(session, [1], [2])
    call(session, [1, 2, 3], [4])
    call(session, [1, 5], [6])
    small, large = session.to_safetensors(routes=False), session.to_safetensors()
    assert len(small) < len(large)
    assert_equal(load_trajectories(small, session.routes_to_safetensors), load_trajectories(large))
    left = load_trajectories(small)
    assert [int(td["routes_of"]) for td in left] == [1, 2]
    assert all("routed_experts" not in td.keys() for td in left)  # noqa: SIM118
    with pytest.raises(KeyError, match="answer 3"):
        session.routes_to_safetensors(3)


@pytest.mark.parametrize(
    "data",
    [b"", b"x" * 40, new_session().to_safetensors()[:-1], b"\x02\0\0\0\0\0\0\0{}"],
    ids=["nothing", "text", "cut short", "without sessions"],
)
def test_another_file_is_refused(data: bytes) -> None:
    assert load_trajectories(new_session().to_safetensors()) == []
    with pytest.raises(ValueError, match="not the trajectories"):
        load_trajectories(data)


# -- bad input, and limits --------------------------------------------------------------------------------------------


def test_what_a_session_refuses(session: Session) -> None:
    for prompt in ([], [[1]], [1.5], "ab"):
        with pytest.raises(ValueError, match="token ids"):
            session.prompt_ids(prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mappings"):
        session.prompt_ids([1], ["a"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'first' or 'all'"):
        session.trajectories("none")  # type: ignore[arg-type]
    right, without = completed([1], [2]), completed([1], [2])
    without.outputs[0].logprobs = None
    for told, completion, messages in (
        ("another prompt", completed([2], [3]), {}),
        ("logprobs=0", without, {}),
        ("2 messages", right, {"messages": [user("a")], "message_returned": [YES, YES]}),
        ("rows", completed([1], [2], rows=random_rows(2)), {}),
    ):
        with pytest.raises(ValueError, match=told):
            session.record([1], completion, **messages)  # type: ignore[arg-type]
    assert (session.num_tokens, session.num_calls, session.trajectories()) == (0, 0, [])


def test_a_session_has_room_for_so_many_tokens() -> None:
    session = new_session(tokens_per_session=6)
    call(session, [1, 2], [3])
    with pytest.raises(SessionLimitError, match="has 3 tokens, and this call adds 4: the limit is 6"):
        session.prompt_ids([9, 9, 9, 9])
    assert session.prompt_ids([1, 2, 3, 4]) == [1, 2, 3, 4]  # adds one
    with pytest.raises(SessionLimitError):
        session.record([1, 2, 3, 4], completed([1, 2, 3, 4], [5, 5, 5]))
    assert session.num_tokens == 3
    call(session, [1, 2, 3, 4], [5, 5])
    assert session.num_tokens == 6


def test_a_store_keeps_so_many_sessions_so_long() -> None:
    now = [0.0]
    store = SessionStore(TOKENIZER, LAYOUT, Limits(sessions=2, session_seconds=10.0), clock=lambda: now[0])
    one, two = store.get("1"), store.get("2")
    assert (one is store.get("1"), store.ids()) == (True, ["2", "1"])
    with pytest.raises(SessionLimitError, match=r"as many as Limits\.sessions allows"):
        store.get("3")
    with two.under_way(lambda: None):
        now[0] = 10.0  # nobody has used them since; two has a request
        assert store.get("3") is not one
        assert store.ids() == ["2", "3"]
    assert one.is_closed
    store.close("2")
    store.close("2")
    assert store.get("2") is not two
    for bad in ("", "x" * 257, 3, None):
        with pytest.raises(ValueError, match="session's id"):
            store.get(bad)  # type: ignore[arg-type]
    for limits in ({"sessions": 0}, {"session_seconds": 0.0}, {"tokens_per_session": 0}):
        with pytest.raises(ValueError, match=next(iter(limits))):
            SessionStore(TOKENIZER, LAYOUT, Limits(**limits))


def test_closing_cancels_what_is_under_way_and_keeps_what_was_recorded(session: Session) -> None:
    call(session, [1], [2])
    cancelled = []
    with session.under_way(lambda: cancelled.append("ended")):
        pass
    with session.under_way(lambda: cancelled.append("running")):
        session.close()
        session.close()
    assert cancelled == ["running", "running"]
    with pytest.raises(SessionClosedError, match="has ended"), session.under_way(lambda: None):
        pass
    with pytest.raises(SessionClosedError):
        call(session, [1], [2])
    assert len(session.trajectories()) == 1


def test_threads_may_record_at_once(session: Session) -> None:
    completions = [completed([1, 2, i], [3]) for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda one: session.record(one.prompt_token_ids.tolist(), one), completions))
    assert session.num_tokens == 2 + 2 * 32
    assert sorted(full(td)[2] for td in session.trajectories()) == list(range(32))
