"""Answers sampled by a transformers model itself: tokens, the distribution of each, and the recorded experts.

``model.generate`` does the work. Two of its lists are replaced by observing ones: the logits processors, whose output
is the distribution of a token, and the stopping criteria. Routes are recorded in every forward pass.

Letters: B prompts, n answers to each, N = B * n, P tokens of a prompt, G of an answer, V vocabulary, L decoder layers,
K experts per token.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from torchrl_moe import _compat_generation
from torchrl_moe.modules.backends.kept_ids import KeptIds, name_kept
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.policies.generation_settings import changes_of, temperature_of
from torchrl_moe.modules.policies.scoring import pad_left
from torchrl_moe.modules.policies.scoring_model import unwrap
from torchrl_moe.modules.replay.binding import Recording
from torchrl_moe.modules.replay.parallelism import computing_device
from torchrl_moe.modules.replay.router_replay import RouterReplay, evaluating

__all__ = ["generate_answers"]

_LOCKS: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
"""A model runs one generation at a time: otherwise the steps of two would be recorded together."""


def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    samples: int = 1,
    *,
    log_probs: bool = True,
    replay: RouterReplay | None = None,
    tokenizer: Any = None,
) -> list[Completion]:
    """Sample ``samples`` answers to each prompt, in eval mode and without gradients.

    Args:
        model: a transformers causal language model, including its wrappers.
        prompts: token ids.
        config: of sampling; ``pad_token_id`` must be set, and ``num_return_sequences`` is set here.
        samples: n.
        log_probs: whether to return log-probs under the distributions that were sampled from.
        replay: records the experts; ``None`` for none.
        tokenizer: finds ``stop_strings``.

    Returns:
        One completion per prompt, with n outputs; ``kept`` holds the words that each token was sampled from, if any
        were excluded. ``routed_experts`` is int16 ``[P + G - 1, L, K]``, a row for each token that was fed to the
        model, -1 where a layer has no router. Weight versions are -1, because they are not counted here.

    Raises:
        ValueError: a prompt without tokens, ``stop_strings`` without a tokenizer, several greedy answers to one
            prompt, or log-probs of changed logits, for example by a penalty, which no trainer can compute.
    """
    config.num_return_sequences = samples
    for i, ids in enumerate(prompts):
        if not len(ids):
            raise ValueError(f"the prompt of sample {i} has no tokens: there is nothing to continue from")
    if samples > 1 and not config.do_sample:
        raise ValueError(f"{samples} greedy answers to a prompt would be identical. Pass do_sample=True")
    device = computing_device(model)
    rows = [torch.tensor(ids) for ids in prompts]
    inputs = pad_left(rows, int(config.pad_token_id or 0)).to(device)
    mask = pad_left([torch.ones_like(row) for row in rows], 0).to(device)
    ends = StoppingCriteriaList()
    if config.stop_strings:
        if tokenizer is None:
            raise ValueError(f"stop_sequences={config.stop_strings!r} are found by a tokenizer: pass tokenizer=")
        # generate() drops its tokenizer if its loop is replaced (5.23)
        ends.append(StopStringCriteria(tokenizer, config.stop_strings))
        config.stop_strings = None
    draws = _Draws(config, len(prompts) * samples, log_probs)
    with ExitStack() as stack:
        stack.enter_context(_LOCKS.setdefault(unwrap(model), threading.Lock()))
        stack.enter_context(evaluating(model))
        steps = stack.enter_context(_recorded(model, replay)) if replay is not None else None
        sequences = model.generate(
            inputs,
            attention_mask=mask,
            generation_config=config,
            custom_generate=draws.run,
            stopping_criteria=ends,
        )
    draws.close(sequences)
    routes = None if steps is None else _joined(steps)
    return [
        Completion(
            request_id=str(i),
            prompt=None,
            prompt_token_ids=np.asarray(ids, np.int64),
            num_cached_tokens=0,
            outputs=[
                draws.output(row - i * samples, row, sequences, len(ids), routes)
                for row in range(i * samples, (i + 1) * samples)
            ],
        )
        for i, ids in enumerate(prompts)
    ]


class _Draws:
    """The distributions that ``N`` answers were sampled from, step by step."""

    def __init__(self, config: GenerationConfig, rows: int, log_probs: bool) -> None:
        self.config = config
        self.temperature = temperature_of(config) or 1.0
        self.wants_log_probs = log_probs
        self.width = 0  # of the prompts
        self.most: float = 0  # tokens that an answer may have
        self.lengths = torch.zeros(rows, dtype=torch.long)  # of answers that have ended
        self.log_probs: list[Tensor] = []  # [N] each
        self.values: Tensor | None = None  # [N, G], in the end
        self.kept: list[tuple[NDArray[np.int32], NDArray[np.int64]] | None] = []
        self._drawn_from: Tensor | None = None

    def run(self, model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        """Run transformers' loop with the observing lists."""
        self.width = input_ids.shape[1]
        self.most = (kwargs["stopping_criteria"].max_length or math.inf) - self.width
        kwargs["logits_processor"] = _Processors(kwargs["logits_processor"], self)
        kwargs["stopping_criteria"] = _Criteria(kwargs["stopping_criteria"], self)
        return _compat_generation.sample_by(model, input_ids, **kwargs)

    def note(self, input_ids: Tensor, logits: Tensor, processed: Tensor) -> None:
        """Record the distribution of the next token of each answer; both are ``[N, V]``."""
        self.settle(input_ids)
        kept = processed > float("-inf")
        if self.wants_log_probs:
            moved = processed - logits / self.temperature  # a constant shift of a row changes nothing
            most, least = (moved.masked_fill(~kept, value) for value in (float("-inf"), float("inf")))
            if float((most.amax(-1) - least.amin(-1)).max()) > 1e-4 * max(1.0, float(logits.abs().max())):
                raise ValueError(
                    f"{', '.join(changes_of(self.config)) or 'a logits processor'} changes logits, and log-probs with "
                    "them, in a way that a trainer does not replay: switch it off in generate_kwargs (it may come from "
                    "the model's generation_config), or pass return_log_probs=False"
                )
            self._drawn_from = processed.log_softmax(-1)
        self.kept.append(None if bool(kept.all()) else name_kept(processed, [len(self.kept)] * len(processed)))

    def settle(self, input_ids: Tensor) -> None:
        """Record the log-probs of the tokens that were sampled last, if they are still in ``input_ids``."""
        column = self.width + len(self.log_probs)
        if self._drawn_from is not None and column < input_ids.shape[1]:
            chosen = input_ids[:, column, None]
            self.log_probs.append(self._drawn_from.gather(-1, chosen)[:, 0].cpu())
        self._drawn_from = None

    def close(self, sequences: Tensor) -> None:
        """Record the last step, when the loop has ended."""
        self.settle(sequences)
        if self.wants_log_probs:
            self.values = torch.stack(self.log_probs, 1)

    def end(self, input_ids: Tensor, ended: Tensor) -> None:
        """Record which answers end with the last token, bool ``[N]``; the rest of their rows is padding."""
        first = ended.cpu() & (self.lengths == 0)
        self.lengths[first] = input_ids.shape[1] - self.width

    def output(self, index: int, row: int, sequences: Tensor, prompt: int, routes: Tensor | None) -> CompletionOutput:
        """Return one answer.

        Args:
            index: of the answer among those to its prompt.
            row: of ``sequences`` ``[N, T]``, and of ``routes`` ``[N, T - 1, L, K]``.
            sequences: prompts, padded on the left, and answers.
            prompt: P.
            routes: of all tokens that were fed.
        """
        count = int(self.lengths[row])
        ids = sequences[row, self.width : self.width + count].cpu().numpy()
        steps = [
            said[0][said[1][row] : said[1][row + 1]] if said is not None else np.empty(0, np.int32)
            for said in self.kept[:count]
        ]
        fed = slice(self.width - prompt, self.width + count - 1)
        ends = self.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return CompletionOutput(
            index=index,
            token_ids=ids,
            text="",
            finish_reason="stop" if ids[-1] in ends or count < self.most else "length",
            policy_versions=np.full(count, -1, np.int32),
            logprobs=None if self.values is None else self.values[row, :count].numpy(),
            routed_experts=None if routes is None else routes[row, fed].numpy(),
            kept=KeptIds.of_steps(steps, count),
        )


class _Processors(LogitsProcessorList):
    """Logits processors, followed by the observer."""

    def __init__(self, processors: LogitsProcessorList, draws: _Draws) -> None:
        super().__init__(processors)
        self.draws = draws

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        processed: Tensor = super().__call__(input_ids, scores.clone(), **kwargs)
        self.draws.note(input_ids, scores, processed)
        return processed


class _Criteria(StoppingCriteriaList):
    """Stopping criteria, followed by the observer."""

    def __init__(self, criteria: StoppingCriteriaList, draws: _Draws) -> None:
        super().__init__(criteria)
        self.draws = draws

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        ended = super().__call__(input_ids, scores, **kwargs)
        self.draws.end(input_ids, ended)
        return ended


# -- routes -----------------------------------------------------------------------------------------------------------


@contextmanager
def _recorded(model: Any, replay: RouterReplay) -> Iterator[list[Recording]]:
    """Record each forward pass of this thread, in the list that is yielded."""
    steps: list[Recording] = []
    contexts: list[AbstractContextManager[Recording]] = []
    thread = threading.get_ident()

    def begin(*_: Any) -> None:
        if threading.get_ident() == thread:
            contexts.append(replay.record())
            steps.append(contexts[-1].__enter__())

    def finish(*_: Any) -> None:
        if threading.get_ident() == thread and contexts:
            contexts.pop().__exit__(*sys.exc_info())

    called = unwrap(model)
    hooks = [called.register_forward_pre_hook(begin), called.register_forward_hook(finish, always_call=True)]
    try:
        yield steps
    finally:
        for hook in hooks:
            hook.remove()


def _joined(steps: Sequence[Recording]) -> Tensor:
    """Return int16 ``[N, T, L, K]``, a row for each token when it was first fed: without a cache, all are fed again."""
    parts: list[Tensor] = []
    count = 0
    for step in steps:
        routes = step.routed_experts.cpu()
        again = count if routes.shape[1] > count else 0
        parts.append(routes[:, again:])
        count += routes.shape[1] - again
    return torch.cat(parts, 1)
