"""A toy task with verifiable answers: arithmetic as one-turn chats, over a vocabulary of single characters.

The data is generated here, nothing is downloaded; some problems are held out and never used in training. The task is
small enough that a tiny MoE learns it on a CPU in a minute or two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from torchrl_moe._checks import check_number

OPERATIONS = ("sum", "double")
MISTAKES = ("random", "forget_carry")
RAMP = 10  # steps over which the learning rate of either half of a warm-up rises to its value
Problems: TypeAlias = Sequence[tuple[str, str]]
"""Questions with their answers."""
SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>")
CHARACTERS = "0123456789+-*=?., abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    # `generation` marks what the policy samples: an answer and the token that ends it
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
        # all problems there are: the held-out ones are drawn from the same set, and none is in both
        if self.operation == "sum":
            problems = [(f"{a}+{b}=", str(a + b)) for a in range(limit) for b in range(limit)]
        else:
            problems = [(f"2*{a:0{width}}=", f"{2 * a:0{width + 1}}") for a in range(limit)]
        if not 0 < self.held_out < len(problems):
            raise ValueError(f"held_out must be in 1..{len(problems) - 1}, got {self.held_out}")
        random.Random(self.seed).shuffle(problems)
        # the class is frozen, so that no split changes after a run began
        object.__setattr__(self, "test", tuple(problems[: self.held_out]))
        object.__setattr__(self, "train", tuple(problems[self.held_out :]))


def arithmetic_prompts(
    operation: Literal["sum", "double"] = "double", digits: int = 4, held_out: int = 200, seed: int = 0
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the problems of an :class:`ArithmeticTask` as rows: those to train on, and the held-out ones.

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

    >>> exact_answer("09634", "09634"), exact_answer("9634", "09634")
    (1.0, 0.0)
    """
    return float(completion == answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Options of :func:`warm_up`.

    >>> WarmUp(noise=0.7).noise
    0.7
    """

    clean_lr: float = 3e-3
    clean_target: float = 0.9
    noisy_lr: float = 3e-4
    noise: float = 0.6
    noisy_target: float = 0.25
    mistake: Literal["random", "forget_carry"] = "forget_carry"
    batch_size: int = 128
    max_steps: int = 400

    def check(self) -> None:
        """Refuse invalid options.

        >>> WarmUp(noise=2).check()
        Traceback (most recent call last):
        ValueError: noise must be a finite number from 0 to 1, got 2.
        """
        for name in ("clean_lr", "noisy_lr"):
            check_number(name, getattr(self, name), above=0)
        for name in ("clean_target", "noise", "noisy_target"):
            check_number(name, getattr(self, name), 0, 1)
        for name in ("batch_size", "max_steps"):
            check_number(name, getattr(self, name), 1, whole=True)
        if self.mistake not in MISTAKES:
            raise ValueError(f"mistake must be one of {', '.join(MISTAKES)}, got {self.mistake!r}")


def encode(problems: Problems, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Return ids and labels, int64 ``[B, T]`` (-100 outside the answer and its end), padded on the right."""
    rows, labels = [], []
    for query, answer in problems:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": query}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        reply = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append(prompt + reply)
        labels.append([-100] * len(prompt) + reply)
    # on the right: no generation follows, so positions stay those of an unpadded sequence
    length = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    return ids, torch.tensor([row + [-100] * (length - len(row)) for row in labels])


def answer_log_probs(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each whole answer, float32 ``[B]``, of :func:`encode`'s ids and labels."""
    logits = model(ids).logits[:, :-1]
    target = labels[:, 1:]  # logits at a token are those of the next one
    log_probs = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return (log_probs * (target != -100)).sum(-1)


def forget_carry(query: str, forgets: Callable[[], bool] = lambda: True) -> str:
    """Return an answer in which carries are forgotten: ``"47+38="`` gives ``"75"``, ``"2*4817="`` gives
    ``"08624"``.
    """
    doubled = query.startswith("2*")
    first, second = [query[2:-1]] * 2 if doubled else query.rstrip("=").split("+")
    a, b = int(first), int(second)
    # Column by column from the right; the last addition has nowhere to carry to, so it is always right.
    total, place, carry = 0, 1, 0
    while max(a, b) >= 10:
        digit = a % 10 + b % 10 + carry
        carry = int(digit >= 10 and not forgets())
        total += digit % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return str(total + (a + b + carry) * place).zfill(len(first) + 1 if doubled else 0)


def warm_up(
    model: PreTrainedModel, problems: Problems, tokenizer: PreTrainedTokenizerBase, options: WarmUp, seed: int
) -> float:
    """Train until exact answers have the target probability; return the mean probability at the end.

    The policy first learns the answers, then is made uncertain of them. Stopping clean training early instead leaves a
    policy that GRPO can hardly improve: it is confident in its wrong answers.

    Uncertainty is taught with wrong labels. With ``options.mistake="random"``, a share ``options.noise`` of the labels
    are answers of other problems; with ``"forget_carry"``, that share of all carries is forgotten. The second is a
    rule, so it also gives wrong answers to unseen problems, and a policy that unlearns it is right on those too.
    """
    options.check()
    if not problems:
        raise ValueError("there are no problems to warm up on")
    chooser = random.Random(seed)
    answers = [answer for _, answer in problems]

    def errs() -> bool:
        return chooser.random() < options.noise

    def doubtful(query: str, answer: str) -> str:
        if options.mistake == "forget_carry":
            return forget_carry(query, errs)
        return chooser.choice(answers) if errs() else answer

    # First clean labels until the answers are known, then spoilt ones until they are doubted.
    model.train()
    probability = 0.0
    for name, lr, noisy in (
        ("warm-up: learn", options.clean_lr, False),
        ("warm-up: doubt", options.noisy_lr, True),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        # Adam's first steps are as large as any later one: without warm-up they would damage a trained model
        ramp = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / RAMP, total_iters=RAMP - 1)
        with tqdm(desc=name, unit="step", leave=False, disable=None) as bar:
            for _ in range(options.max_steps):
                batch = chooser.sample(problems, min(options.batch_size, len(problems)))
                labelled = [(query, doubtful(query, answer)) for query, answer in batch] if noisy else batch
                log_probs = answer_log_probs(model, *encode(labelled, tokenizer))
                # sequence log-probs, not a mean over tokens: the target is the probability of whole answers
                optimizer.zero_grad()
                (-log_probs.mean()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                ramp.step()
                if noisy:  # how likely the right answers still are
                    with torch.no_grad():
                        log_probs = answer_log_probs(model, *encode(batch, tokenizer))
                probability = log_probs.detach().exp().mean().item()
                bar.set_postfix_str(f"P(answer)={probability:.2f}")
                bar.update()
                if probability <= options.noisy_target if noisy else probability >= options.clean_target:
                    break
    model.eval()
    return probability
