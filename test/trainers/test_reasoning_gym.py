"""Tasks of reasoning-gym as data and reward. A stand-in has the interface of the package, which is an extra."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest import LogCaptureFixture, MonkeyPatch

from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.trainers import ConfigError, GRPOConfig
from torchrl_moe.trainers.config import DataConfig
from torchrl_moe.trainers.prompt_sources import load_prompts, reasoning_rows, reasoning_score
from torchrl_moe.trainers.samples import RolloutSource


@dataclass
class SumsConfig:
    size: int = 500
    seed: int = 0
    most: int = 9


class Sums:
    """Sums of two numbers, as the package's data sets are: entries by place, all from the seed."""

    def __init__(self, config: SumsConfig) -> None:
        assert config.most > 0, "most must be positive"
        self.config = config

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place in range(self.config.size):
            draw = random.Random(self.config.seed + place)  # as in the package
            terms = (draw.randint(0, self.config.most), draw.randint(0, self.config.most))
            yield {"question": f"{terms[0]} + {terms[1]} =", "answer": str(sum(terms)), "metadata": {"terms": terms}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        assert isinstance(entry["metadata"]["terms"], tuple)  # some scorers tell tuples from lists
        if answer == "?":
            raise OverflowError("no number")  # as some of the package's do
        return 1.0 if answer == entry["answer"] else 0.0


@pytest.fixture
def gym(monkeypatch: MonkeyPatch) -> None:
    package: Any = ModuleType("reasoning_gym")

    def extract_answer(text: str) -> str | None:
        return text.partition("<answer>")[2].partition("</answer>")[0].strip() if "<answer>" in text else None

    package.factory = SimpleNamespace(DATASETS={"sums": (Sums, SumsConfig), "countdown": (Sums, SumsConfig)})
    package.utils = SimpleNamespace(extract_answer=extract_answer)
    package.create_dataset = lambda name, **options: Sums(SumsConfig(**options))
    scorers = {"sums": Sums(SumsConfig()).score_answer}
    package.get_score_answer_fn = lambda name: scorers[name]  # a KeyError, as the package's ValueError
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)


PARTS = ("train", "held_out")


def rows_of(part: str, **options: Any) -> list[dict[str, Any]]:
    return reasoning_rows("reasoning_gym:sums", **options)[part]


def score(row: dict[str, Any], completion: Any) -> float:
    return reasoning_score(completion, row["answer"], row["task"], row["metadata"])


@pytest.mark.usefixtures("gym")
def test_rows_are_chats_with_an_instruction_and_a_seed_is_a_seed() -> None:
    first, again = (rows_of("train", size=5, held_out=0, seed=3, instruction="Only the number.") for _ in range(2))
    assert first == again
    ((message,),) = [row["prompt"] for row in first[:1]]
    question, instruction = message["content"].split("\n")
    assert message["role"] == "user" and instruction == "Only the number."
    left, right = (int(part) for part in question.removesuffix(" =").split(" + "))
    assert first[0]["answer"] == str(left + right)
    assert rows_of("train", size=5, held_out=0, seed=3, chat=False)[0]["prompt"] == question
    # of the package's own, seeds side by side share all questions but one
    parts = [rows_of(part, size=50, held_out=50, seed=seed, most=10**9) for seed in (0, 1) for part in PARTS]
    questions = [str(row["prompt"]) for rows in parts for row in rows]
    assert len(set(questions)) == len(questions) == 200


@pytest.mark.usefixtures("gym")
def test_no_held_out_question_is_trained_on() -> None:
    """Of 100 questions nearly all are drawn in both parts."""
    train, held_out = ([row["prompt"][0]["content"] for row in rows_of(part, size=400, held_out=60)] for part in PARTS)
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out) > 30
    assert len(set(train)) == len(train) and 100 >= len(train) + len(held_out) > 90
    with pytest.raises(ValueError, match="all questions are held out: lower held_out, which is 5000"):
        rows_of("train", size=10, held_out=5000)


@pytest.mark.usefixtures("gym")
def test_the_score_is_the_task_s_of_what_stands_in_tags_or_of_all(caplog: LogCaptureFixture) -> None:
    (row,) = rows_of("train", size=1, held_out=0)
    right = row["answer"]
    for completion in (right, f" {right}\n", f"I think <answer> {right} </answer>, or 5"):
        assert score(row, completion) == 1.0
        assert score(row, [{"role": "assistant", "content": completion}]) == 1.0
    assert score(row, f"The answer is {right}.") == score(row, "") == score(row, []) == 0.0
    # on these the task's scorer raises
    assert [score(row, "?"), score(row, "<answer>?</answer>")] == [0.0, 0.0]
    (record,) = caplog.records
    assert "the scorer of sums cannot read '?' (OverflowError: no number): the reward is 0" in record.message


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("sum", {}, "reasoning_gym:sum: there is no such task; near it are sums"),
        ("", {}, "reasoning_gym:: there is no such task; there are 2, such as sums, countdown"),
        ("sums", {"least": 1}, "reasoning_gym:sums has no option 'least'; it has most"),
        ("sums", {"most": 0}, "reasoning_gym:sums: most must be positive"),
        ("sums", {"size": 0}, "size must be"), ("sums", {"held_out": 1.5}, "held_out must be"),
        ("sums", {"chat": "no"}, "chat must be"), ("sums", {"seed": None}, "seed must be"),
        ("sums", {"seed": 1.5}, "seed must be"), ("sums", {"instruction": 5}, "instruction must be text, got 5"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        load_prompts(f"reasoning_gym:{task}", arguments=options)


@pytest.mark.usefixtures("gym")
def test_a_task_that_runs_answers_is_refused_unless_that_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"runs what a model writes as Python.* set data\.arguments\.run_answers=true"):
        reasoning_rows("reasoning_gym:countdown", size=3)
    assert reasoning_rows("reasoning_gym:countdown", size=3, run_answers=True)["train"]
    config = GRPOConfig(data=DataConfig(source="reasoning_gym:countdown", arguments={"run_answers": True}))
    RolloutSource(config).check_names()
    config.data.arguments["run_answers"] = 1  # only true accepts it
    with pytest.raises(ConfigError, match="runs what a model writes as Python"):
        RolloutSource(config).check_names()


@pytest.mark.usefixtures("gym")
def test_a_run_takes_data_and_reward_from_the_task() -> None:
    arguments = {"size": 20, "held_out": 4, "chat": False}
    config = GRPOConfig(data=DataConfig(source="reasoning_gym:sums", arguments=arguments))
    RolloutSource(config).check_names()
    source = RolloutSource(config).load(ByteTokenizer())
    assert source.env is not None and 0 < source.held_out <= 4
    given = RolloutSource(GRPOConfig(), dataset="reasoning_gym:sums", rewards=[lambda completion: 1.0])
    given.check_names()  # one's own reward is taken
    wrong = RolloutSource(GRPOConfig(data=DataConfig(source="reasoning_gym:sum")))
    for check in (wrong.check_names, lambda: wrong.load(ByteTokenizer())):
        with pytest.raises(ConfigError, match="there is no such task; near it are sums"):
            check()  # the first of them before a model is loaded


def test_a_missing_package_names_the_line_that_installs_it(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install .torchrl_moe\[real\]'"):
        reasoning_rows("reasoning_gym:chain_sum")


@pytest.mark.parametrize(
    "task", ["chain_sum", "letter_counting", "simple_equations", pytest.param("arc_agi", marks=pytest.mark.parity)]
)
def test_the_package_itself(task: str) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install 'torchrl_moe[real]'")
    rows = reasoning_rows(f"reasoning_gym:{task}", size=3, held_out=2)["train"]
    for row in rows:
        assert score(row, row["answer"]) == 1.0
        assert score(row, "nonsense") < 0.1
