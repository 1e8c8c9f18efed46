"""A toy task with verifiable answers: arithmetic as one-turn chats, over a vocabulary of single characters.

The data is generated here, nothing is downloaded; some problems are held out and never used in training. The task is
small enough that a tiny MoE learns it on a CPU in a minute or two.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader, IterableDataset
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv
from transformers import PreTrainedTokenizerFast

__all__ = [
    "ArithmeticTask",
    "CharacterTokenizer",
    "ExactAnswerReward",
    "arithmetic_prompts",
    "exact_answer",
    "share_correct",
]

OPERATIONS = ("sum", "double")

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")
CHARACTERS = "0123456789+-*=?., abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<assistant>{% generation %}"
    "{{ message['content'] }}<eos>{% endgeneration %}{% else %}<user>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def CharacterTokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one id per character, 48 in all, with a chat template of one token per role.

    >>> tokenizer = CharacterTokenizer()
    >>> tokenizer("3+4=")["input_ids"], len(tokenizer)
    ([7, 14, 8, 17], 48)
    """
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticTask:
    """Sums of two numbers of up to ``digits`` digits, or doubling such a number.

    Doubling is quick to learn and generalises to unseen numbers: a digit of the answer depends on two digits of the
    question. Numbers are written with leading zeros, so that those two digits are always at the same distance.

    Args:
        operation: ``"sum"``, ``"3+4="`` gives ``"7"``; ``"double"``, ``"2*0470="`` gives ``"00940"``.
        digits: of the numbers. For sums, 1 gives 100 problems and 2 gives 10 000; for doubling, 4 gives 10 000.
        held_out: number of held-out problems, chosen by ``seed``.
        seed: of the split, and of the order of training problems.

    >>> task = ArithmeticTask(digits=1, held_out=20)
    >>> len(task.train), len(task.test), set(task.train) & set(task.test)
    (80, 20, set())
    """

    operation: Literal["sum", "double"] = "sum"
    digits: int = 1
    held_out: int = 20
    seed: int = 0
    train: tuple[tuple[str, str], ...] = field(init=False, repr=False)
    test: tuple[tuple[str, str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise ValueError(f"digits must be at least 1, got {self.digits}")
        if self.operation not in OPERATIONS:
            raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, got {self.operation!r}")
        limit, width = 10**self.digits, self.digits
        if self.operation == "sum":
            problems = [(f"{a}+{b}=", str(a + b)) for a in range(limit) for b in range(limit)]
        else:
            problems = [(f"2*{a:0{width}}=", f"{2 * a:0{width + 1}}") for a in range(limit)]
        if not 0 < self.held_out < len(problems):
            raise ValueError(f"held_out must be in 1..{len(problems) - 1}, got {self.held_out}")
        random.Random(self.seed).shuffle(problems)
        object.__setattr__(self, "test", tuple(problems[: self.held_out]))
        object.__setattr__(self, "train", tuple(problems[self.held_out :]))

    def problems(self, start: int) -> Iterator[tuple[str, str]]:
        """Yield training problems endlessly from position ``start``: each pass has its own order, set by the seed."""
        position = start
        while True:
            turn, place = divmod(position, len(self.train))
            order = random.Random(f"{self.seed}-{turn}").sample(range(len(self.train)), len(self.train))
            for index in order[place:]:
                yield self.train[index]
                position += 1

    def env(self, prompts: int, group_size: int, tokenizer: Any, start: int = 0) -> DatasetChatEnv:
        """Return a chat environment over training problems, each repeated ``group_size`` times in a row.

        Args:
            prompts: problems per batch.
            group_size: repetitions of each problem.
            tokenizer: of the policy, for its chat template.
            start: position of the first problem, to continue where an earlier run stopped.
        """
        env = DatasetChatEnv.from_dataloader(
            DataLoader(_Problems(self, start), batch_size=1, collate_fn=_stack),
            repeats=group_size,
            batch_size=(prompts * group_size,),
            tokenizer=tokenizer,
        )
        # one turn per problem
        return env.append_transform(StepCounter(max_steps=1)).append_transform(ExactAnswerReward())

    def chats(self, which: str = "test") -> tuple[list[list[dict[str, str]]], list[str]]:
        """Return the problems of ``"train"`` or ``"test"`` as chats, and their answers."""
        problems = {"train": self.train, "test": self.test}[which]
        return [[{"role": "user", "content": query}] for query, _ in problems], [answer for _, answer in problems]


def arithmetic_prompts(
    operation: Literal["sum", "double"] = "double", digits: int = 4, held_out: int = 200, seed: int = 0
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the problems of an :class:`ArithmeticTask` as rows: those to train on, and the held-out ones.

    Args:
        operation: see :class:`ArithmeticTask`, also for the others.
        digits: of the numbers.
        held_out: number of held-out problems.
        seed: of the split.

    Raises:
        ValueError: there is no such task.

    >>> train, held_out = arithmetic_prompts()
    >>> len(train), len(held_out)
    (9800, 200)
    >>> sorted(train + held_out, key=lambda row: row["prompt"])[4817]
    {'prompt': '2*4817=', 'answer': '09634'}
    """
    task = ArithmeticTask(operation=operation, digits=digits, held_out=held_out, seed=seed)
    train, test = ([{"prompt": query, "answer": answer} for query, answer in part] for part in (task.train, task.test))
    return train, test


def exact_answer(completion: str, answer: str) -> float:
    """Reward an exactly correct answer with 1, any other with 0.

    Args:
        completion: the text that was generated, without the token that ends it.
        answer: the correct answer.

    >>> exact_answer("09634", "09634"), exact_answer("9634", "09634")
    (1.0, 0.0)
    """
    return float(completion == answer)


class _Problems(IterableDataset[dict[str, str]]):
    def __init__(self, task: ArithmeticTask, start: int) -> None:
        self._task = task
        self._start = start

    def __iter__(self) -> Iterator[dict[str, str]]:
        for query, answer in self._task.problems(self._start):
            yield {"query": query, "answer": answer}


def _stack(rows: list[dict[str, str]]) -> TensorDict:
    return torch.stack([TensorDict.from_dict(row) for row in rows])


class ExactAnswerReward(Transform):
    """Rewards an exactly correct answer with 1, any other with 0; ``("next", "reward")`` is ``(*B, 1, 1)``."""

    def __init__(self) -> None:
        super().__init__(in_keys=[("history", "full"), "answer"], out_keys=["reward"])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        contents = tensordict.get(("history", "full"))[..., -1].content
        answers = tensordict.get("answer").tolist()
        right = [float(content == answer) for content, answer in zip(contents, answers, strict=True)]
        return next_tensordict.set("reward", torch.tensor(right).view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare the reward."""
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1), dtype=torch.float32)
        return reward_spec


def share_correct(answers: list[str], rollout: TensorDictBase) -> float:
    """Return the share of a rollout's answers that are exactly correct.

    Args:
        answers: the correct answers.
        rollout: of a policy with ``input_mode="history"``, batch size ``[B]``.
    """
    contents = [sample["history", "response"].content[0] for sample in rollout.unbind(0)]
    return sum(content == answer for content, answer in zip(contents, answers, strict=True)) / len(answers)
