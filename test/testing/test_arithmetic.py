"""The toy task: its tokenizer, its problems, its environment, and rewards counted by hand."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import SelectTransform
from torchrl.modules.llm.policies import ChatHistory
from torchrl.objectives.llm import MCAdvantage
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.arithmetic import (
    CHARACTERS,
    SPECIAL,
    ArithmeticTask,
    CharacterTokenizer,
    arithmetic_prompts,
    exact_answer,
    share_correct,
)

PROMPTS, GROUP = 4, 4
RIGHT = {0, 1, 2, 5, 8, 9, 10, 11}
"""Places in a batch of the answers that are right."""
REWARDS = [float(i in RIGHT) for i in range(PROMPTS * GROUP)]
CHAT = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}, {"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return CharacterTokenizer()


# -- tokenizer --------------------------------------------------------------------------------------------------------


@given(st.text(st.sampled_from(CHARACTERS)))
def test_text_survives_one_id_per_character(text: str) -> None:
    tokenizer = CharacterTokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_specials_come_first_and_nothing_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == len(SPECIAL) + len(CHARACTERS) == 48
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer("<user>3<eos>")["input_ids"] == [2, 7, 1]
    assert tokenizer.decode([2, 7, 1]) == "<user>3<eos>"
    assert tokenizer.decode([2, 7, 1], skip_special_tokens=True) == "3"


def test_a_chat_is_one_token_per_role_and_character(tokenizer: PreTrainedTokenizerFast) -> None:
    def render(messages: Any, **kwargs: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)

    assert render(CHAT) == "<user>3+4=<assistant>7<eos><user>1+1="
    assert render(CHAT, add_generation_prompt=True) == "<user>3+4=<assistant>7<eos><user>1+1=<assistant>"
    assert render(CHAT[:1], add_generation_prompt=True) == "<user>3+4=<assistant>"


def test_the_assistant_mask_holds_the_answer_and_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(tokenizer.convert_ids_to_tokens(out["input_ids"]), out["assistant_masks"], strict=True)
    assert [token for token, mine in pairs if mine] == ["7", "<eos>"]


def test_it_survives_a_folder_and_a_pickle(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    for other in (AutoTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        ids = other.apply_chat_template(CHAT, tokenize=True, return_dict=False)
        assert ids == tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
        assert other.decode(ids) == "<user>3+4=<assistant>7<eos><user>1+1="


# -- problems ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("digits", "held_out"), [(1, 20), (1, 1), (1, 99), (2, 500)])
def test_the_split_is_disjoint_and_whole_and_the_same_for_a_seed(digits: int, held_out: int) -> None:
    task = ArithmeticTask(digits=digits, held_out=held_out, seed=3)
    assert len(task.test) == held_out
    assert not set(task.train) & set(task.test)
    assert len({*task.train, *task.test}) == 100**digits
    assert all(str(sum(map(int, query[:-1].split("+")))) == answer for query, answer in task.train + task.test)
    again = ArithmeticTask(digits=digits, held_out=held_out, seed=3)
    assert (again.train, again.test) == (task.train, task.test)
    assert set(ArithmeticTask(digits=2, held_out=500, seed=4).test) != set(task.test)


def test_numbers_are_doubled_at_a_fixed_width() -> None:
    task = ArithmeticTask(operation="double", digits=3, held_out=100)
    problems = dict(task.train + task.test)
    assert (len(task.train), len(task.test), len(problems)) == (900, 100, 1000)
    assert (problems["2*047="], problems["2*500="], problems["2*999="]) == ("0094", "1000", "1998")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operation": "halve"}, "operation must be one of sum, double, got 'halve'"),
        ({"operation": "double", "held_out": 10}, r"held_out must be in 1\.\.9, got 10"),
        ({"digits": 0}, "digits must be at least 1, got 0"),
        ({"digits": -1}, "digits must be at least 1, got -1"),
        ({"held_out": 0}, r"held_out must be in 1\.\.99, got 0"),
        ({"held_out": 100}, r"held_out must be in 1\.\.99, got 100"),
        ({"digits": 2, "held_out": 10_000}, r"held_out must be in 1\.\.9999"),
    ],
)
def test_a_task_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArithmeticTask(**arguments)


@given(start=st.integers(0, 400), count=st.integers(0, 200), seed=st.integers(0, 9))
def test_problems_continue_exactly_where_they_stopped(start: int, count: int, seed: int) -> None:
    task = ArithmeticTask(held_out=21, seed=seed)
    whole = list(islice(task.problems(0), start + count))
    assert list(islice(task.problems(start), count)) == whole[start:]


def test_each_pass_is_a_new_order_of_all_training_problems() -> None:
    task = ArithmeticTask()
    passes = [list(islice(task.problems(turn * 80), 80)) for turn in range(3)]
    assert all(set(one) == set(task.train) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert passes[0] != list(islice(ArithmeticTask(seed=1).problems(0), 80))


def test_chats_are_one_question_each() -> None:
    task = ArithmeticTask()
    for which, problems in (("test", task.test), ("train", task.train)):
        chats, answers = task.chats(which)
        assert chats == [[{"role": "user", "content": query}] for query, _ in problems]
        assert answers == [answer for _, answer in problems]
    assert task.chats() == task.chats("test")


def test_problems_as_rows() -> None:
    train, held_out = arithmetic_prompts("double", digits=3, held_out=100, seed=7)
    task = ArithmeticTask(operation="double", digits=3, held_out=100, seed=7)
    assert [(row["prompt"], row["answer"]) for row in train] == list(task.train)
    assert [(row["prompt"], row["answer"]) for row in held_out] == list(task.test)
    assert {"prompt": "2*047=", "answer": "0094"} in train + held_out
    with pytest.raises(ValueError, match=r"held_out must be in 1\.\.9, got 10"):
        arithmetic_prompts("double", digits=1, held_out=10)


@pytest.mark.parametrize(("completion", "reward"), [("7", 1.0), ("07", 0.0), ("7 ", 0.0), ("", 0.0), ("77", 0.0)])
def test_only_the_exact_answer_is_rewarded(completion: str, reward: float) -> None:
    assert exact_answer(completion, answer="7") == reward


# -- environment ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lists_are_stacks() -> Iterator[None]:
    """As TorchRL's environments demand."""
    with set_list_to_stack(True):
        yield


class Calculator(FakeAsyncVLLM):
    """An engine that answers the questions it lists, by their place in the batch, and gets others nearly right."""

    def get_tokenizer(self) -> Any:
        return CharacterTokenizer()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        tokenizer = CharacterTokenizer()
        completions = super().generate(*args, **kwargs)
        for i, completion in enumerate(completions):
            query = tokenizer.decode(completion.prompt_token_ids, skip_special_tokens=True)
            true = str(sum(map(int, query[:-1].split("+"))))
            answer = true if i in RIGHT else (f"{true} ", f"0{true}", f" {true}", "", true + true)[i % 5]
            ids = np.array(tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id], np.int64)
            count, (output,) = len(ids), completion.outputs
            completion.outputs[0] = replace(
                output,
                token_ids=ids,
                finish_reason="stop",
                logprobs=output.logprobs[:count],
                policy_versions=output.policy_versions[:count],
                routed_experts=output.routed_experts[: len(completion.prompt_token_ids) + count - 1],
            )
        return completions


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerFast) -> Iterator[vLLMWrapper]:
    with Calculator() as engine:
        yield vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6})


def collect(policy: vLLMWrapper, batches: int, start: int = 0, **kwargs: Any) -> list[TensorDictBase]:
    """Each batch as it lies in the buffer, with advantages."""
    buffer = ReplayBuffer(
        storage=LazyStackStorage(PROMPTS * GROUP),
        sampler=SamplerWithoutReplacement(),
        batch_size=PROMPTS * GROUP,
        transform=MCAdvantage(grpo_size=GROUP),
    )
    collector = LLMCollector(
        ArithmeticTask().env(PROMPTS, GROUP, policy.tokenizer, start),
        policy=policy,
        dialog_turns_per_batch=PROMPTS * GROUP,
        replay_buffer=buffer,
        **kwargs,
    )
    taken = []
    for _ in islice(collector, batches):
        taken.append(buffer[:].clone())
        assert buffer.sample().batch_size == (PROMPTS * GROUP,)
        buffer.empty()
    collector.shutdown()
    return taken


SLIM = ("query", "answer", "tokens", "masks", "log_probs", "routed_experts", ("next", "reward"), ("next", "done"))
WIRINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slim": {
        "yield_completed_trajectories": True,
        "postproc": SelectTransform(*SLIM, keep_rewards=False, keep_dones=False),
    },
}


@pytest.mark.usefixtures("lists_are_stacks")
def test_a_reset_asks_each_problem_as_often_as_its_group_is_large(tokenizer: PreTrainedTokenizerFast) -> None:
    env = ArithmeticTask().env(PROMPTS, GROUP, tokenizer, start=77)  # three before the second pass
    for start in (77, 77 + PROMPTS):
        td = env.reset()
        problems = [one for one in islice(ArithmeticTask().problems(start), PROMPTS) for _ in range(GROUP)]
        assert list(zip(td["query"], td["answer"], strict=True)) == problems
        assert td["history"].prompt.batch_size == (PROMPTS * GROUP, 1)
        assert td["history"].prompt[:, 0].content == [query for query, _ in problems]


@pytest.mark.usefixtures("lists_are_stacks")
@pytest.mark.parametrize("wiring", WIRINGS)
def test_rewards_and_advantages_are_those_counted_by_hand(policy: vLLMWrapper, wiring: str) -> None:
    """Groups with 3, 1, 4 and 0 right answers of 4, in stock TorchRL from end to end."""
    (batch,) = collect(policy, 1, **WIRINGS[wiring])
    assert batch["next", "reward"].shape == batch["advantage"].shape == (PROMPTS * GROUP, 1, 1)
    assert batch["next", "reward"].flatten().tolist() == REWARDS
    # a collector resets the environment when it is built, and again for its first batch
    problems = islice(ArithmeticTask().problems(PROMPTS), PROMPTS)
    assert list(batch["query"]) == [query for query, _ in problems for _ in range(GROUP)]
    rewards = torch.tensor(REWARDS).view(PROMPTS, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    wanted = centred / torch.tensor([0.5, 0.5, 1.0, 1.0])[:, None]  # the deviation of 3 or 1 ones in 4, unbiased
    torch.testing.assert_close(batch["advantage"].view(PROMPTS, GROUP), wanted, atol=1e-4, rtol=0)
    for one in batch.unbind(0):
        assert len(one["routed_experts", "full"]) == len(one["tokens", "full"])
        assert one["next", "done"].all()


@pytest.mark.usefixtures("lists_are_stacks")
def test_fewer_keys_reach_the_buffer_with_the_same_values(policy: vLLMWrapper) -> None:
    plain, slim = (collect(policy, 2, **wiring) for wiring in WIRINGS.values())
    for wide, narrow in zip(plain, slim, strict=True):
        assert "history" in wide[0].keys()  # noqa: SIM118  a TensorDict iterates over its batch
        assert set(narrow[0].keys()) == {key for key in SLIM if isinstance(key, str)} | {"next", "advantage"}
        for one, other in zip(wide.unbind(0), narrow.unbind(0), strict=True):
            for key in other.keys(True, True):
                torch.testing.assert_close(other[key], one[key], atol=0, rtol=0, equal_nan=True)


@pytest.mark.usefixtures("lists_are_stacks")
def test_a_later_start_continues_with_the_next_problems(policy: vLLMWrapper) -> None:
    whole = [batch["query"] for batch in collect(policy, 3)]
    late = [batch["query"] for batch in collect(policy, 2, start=PROMPTS)]
    assert [list(queries) for queries in late] == [list(queries) for queries in whole[1:]]
    assert list(whole[0]) != list(whole[1])


@pytest.mark.usefixtures("lists_are_stacks")
def test_share_correct_counts_whole_answers(policy: vLLMWrapper) -> None:
    chats, answers = ArithmeticTask().chats("test")
    count = PROMPTS * GROUP
    prompts = History.from_chats(chats[:count])
    greedy = policy.get_new_version(inplace=False, return_routed_experts=None)
    rollout = greedy(TensorDict({"history": ChatHistory(prompt=prompts)}, batch_size=[count]))
    assert share_correct(answers[:count], rollout) == len(RIGHT) / count
    assert share_correct(["?"] * count, rollout) == 0.0
    with pytest.raises(ValueError, match="zip"):
        share_correct(answers[:3], rollout)


def test_share_correct_reads_the_content_of_the_response() -> None:
    def answer(content: str) -> TensorDict:
        return TensorDict({"history": ChatHistory(response=lazy_stack([History(role="assistant", content=content)]))})

    assert share_correct(["7", "8", "9"], lazy_stack([answer("7"), answer("8 "), answer("9")])) == pytest.approx(2 / 3)
