"""Answers sampled by a transformers model itself: tokens, the distribution of each, and the recorded experts.

``model.generate`` does the work. Two of its lists are replaced by observing ones: the logits processors, whose output
is the distribution of a token, and the stopping criteria. Routes are recorded in every forward pass.

Letters: B prompts, n answers to each, N = B * n, P tokens of a prompt, G of an answer, V vocabulary, L decoder layers,
K experts per token.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from torchrl_moe._compat_transformers import sample_by, standard_names
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds, name_kept
from torchrl_moe.modules.policies.scoring import pad_left
from torchrl_moe.modules.policies.scoring_model import unwrap
from torchrl_moe.modules.replay.binding import Recording
from torchrl_moe.modules.replay.discovery import computing_device
from torchrl_moe.modules.replay.router_replay import RouterReplay, evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Translates TorchRL's ``generate_kwargs`` to a transformers ``GenerationConfig``, and reads its sampling settings.


BEAMS: Mapping[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "diversity_penalty": (None, 0, 0.0),
    "force_words_ids": (None,),
}
"""Settings of beam search -> values that switch it off."""
KEEPS_ALL: Mapping[str, tuple[object, ...]] = {
    "top_k": (None, 0),
    "top_p": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "top_h": (None,),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
}
"""Settings that exclude token ids from sampling -> values that switch them off."""
BANS: Mapping[str, tuple[object, ...]] = {
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}
"""The same for settings that also apply to greedy answers."""
CHANGES: Mapping[str, tuple[object, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "sequence_bias": (None, {}, []),
    "guidance_scale": (None, 1, 1.0),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
}
"""Settings that change logits -> values that switch them off."""
OURS = ("output_scores", "output_logits", "return_dict_in_generate", "tokenizer")
"""Names that TorchRL's wrapper sets in its own ``generate_kwargs``; they are ignored here."""
MODES = ("greedy_search", "sample")
LEAST_TEMPERATURE = 0.01
"""As in an engine, a lower temperature means this one, except for 0."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How a wrapper generates."""

    named: dict[str, Any]
    fields: dict[str, Any]
    samples: int
    skip_special_tokens: bool

    @classmethod
    def of(cls, generate_kwargs: Mapping[str, object] | None) -> GenerationSettings:
        """Read ``generate_kwargs``: TorchRL's common names, its older ones, or fields of a ``GenerationConfig``.

        A temperature of 0 is greedy. Any sampling setting, such as a temperature, implies sampling; transformers itself
        would ignore it and stay greedy without ``do_sample=True``.

        >>> GenerationSettings.of({"max_tokens": 8, "temperature": 0.7, "n": 2}).fields
        {'temperature': 0.7, 'max_new_tokens': 8, 'do_sample': True}
        """
        # TorchRL's names first, then what is switched off, then what transformers must know
        named = standard_names(dict(generate_kwargs or {}))
        fields = {name: value for name, value in named.items() if value is not None and name not in OURS}
        for name, off in BEAMS.items():
            if fields.get(name) not in off:
                raise ValueError(
                    f"generate_kwargs[{name!r}]={named[name]!r}: beam search draws from no distribution, so its "
                    "answers have neither log-probs nor routes; leave it out, or call model.generate()"
                )
            if name != "num_beams":  # which may have to override the model's own
                fields.pop(name, None)
        if fields.pop("logprobs", None) not in (None, False, True):
            raise ValueError(
                f"generate_kwargs['logprobs']={named['logprobs']!r}: log-probs are of the sampled tokens alone; leave "
                "it out, and pass return_log_probs"
            )
        samples, skip = fields.pop("num_return_sequences", 1), fields.pop("skip_special_tokens", False)
        if "stop_sequences" in fields:
            fields["stop_strings"] = fields.pop("stop_sequences")
        unknown = sorted(name for name in fields if not hasattr(GenerationConfig(), name))
        if unknown:
            raise ValueError(f"generate_kwargs has {unknown}, which transformers' GenerationConfig does not know")
        # a temperature of 0 is greedy, and other settings imply sampling
        temperature = fields.get("temperature")
        if temperature == 0:
            if fields.get("do_sample"):
                raise ValueError("do_sample=True samples, and temperature=0 is greedy: pass one of them")
            del fields["temperature"]
            fields["do_sample"] = False
        elif temperature is not None:
            fields["temperature"] = max(temperature, LEAST_TEMPERATURE)
        if any(name in fields for name in ("temperature", *KEEPS_ALL)):
            fields.setdefault("do_sample", True)
        return cls(named, fields, samples, bool(skip))

    def changed(self, generate_kwargs: Mapping[str, object]) -> GenerationSettings:
        """Return the settings as the ``generate_kwargs`` of one call change them."""
        if not generate_kwargs:
            return self
        changes = standard_names(dict(generate_kwargs))
        before = dict(self.named)
        if "do_sample" in changes or changes.get("temperature") is not None:
            # only one of the two decides whether to be greedy
            before = {name: value for name, value in before.items() if name not in ("do_sample", "temperature")}
        return type(self).of({**before, **changes})

    def config(self, model: PreTrainedModel) -> GenerationConfig:
        """Return the complete configuration: the given settings, then those of the model's own configuration.

        If neither sets ``top_k``, the whole vocabulary is sampled from; transformers would use 50.
        """
        # given settings win over the model's own
        config = GenerationConfig(**self.fields)
        own = getattr(model, "generation_config", None)
        if own is not None:
            config.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
        if config.top_k is None and config.do_sample:  # for a greedy one transformers would warn
            config.top_k = 0
        mode = str(config.get_generation_mode().value)
        if mode not in MODES:
            raise ValueError(
                f"generate_kwargs, or the model's own generation_config, ask for {mode}: {' and '.join(MODES)} have "
                "log-probs and routes. Switch off the setting that causes it, for example with num_beams=1"
            )
        config.return_dict_in_generate = config.output_scores = config.output_logits = False
        return config


def temperature_of(config: GenerationConfig) -> float:
    """Return the sampling temperature of a configuration; 0 if it is greedy."""
    if not config.do_sample:
        return 0.0
    return 1.0 if config.temperature is None else float(config.temperature)


def leaves_ids_out(config: GenerationConfig) -> bool:
    """Whether a configuration may exclude token ids from the distribution that a token is sampled from."""
    names = {**(KEEPS_ALL if config.do_sample else {}), **BANS}
    return any(getattr(config, name, None) not in values for name, values in names.items())


def changes_of(config: GenerationConfig) -> list[str]:
    """Return the settings that change the model's logits, with their values."""
    values = {name: getattr(config, name, None) for name in CHANGES}
    return [f"{name}={value!r}" for name, value in values.items() if value not in CHANGES[name]]


NO_PADS_BEFORE = ("deepseek_v4", "minimax")
"""Model types whose blocks of tokens begin at the pads: only prompts of one length are generated from together."""
_LOCKS: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
"""A model runs one generation at a time: otherwise the steps of two would be recorded together."""


def generate_answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    samples: int = 1,
    *,
    log_probs: bool = True,
    replay: RouterReplay | None = None,
    tokenizer: PreTrainedTokenizerBase = None,
) -> list[Completion]:
    """Sample ``samples`` answers to each prompt, in eval mode and without gradients."""
    config.num_return_sequences = samples
    for i, ids in enumerate(prompts):
        if not len(ids):
            raise ValueError(f"the prompt of sample {i} has no tokens: there is nothing to continue from")
    lengths = sorted(set(map(len, prompts)))
    if len(lengths) > 1 and getattr(unwrap(model).config, "model_type", "") in NO_PADS_BEFORE:
        each: dict[int, Completion] = {}
        for length in lengths:
            rows = [i for i, ids in enumerate(prompts) if len(ids) == length]
            answers = generate_answers(
                model,
                [prompts[i] for i in rows],
                copy.deepcopy(config),
                samples,
                log_probs=log_probs,
                replay=replay,
                tokenizer=tokenizer,
            )
            each |= {i: replace(answer, request_id=str(i)) for i, answer in zip(rows, answers, strict=True)}
        return [each[i] for i in range(len(prompts))]
    if samples > 1 and not config.do_sample:
        raise ValueError(f"{samples} greedy answers to a prompt would be identical. Pass do_sample=True")
    device = computing_device(model)
    # transformers generates from prompts that are padded on the left
    tensors = [torch.tensor(ids) for ids in prompts]
    inputs = pad_left(tensors, int(config.pad_token_id or 0)).to(device)
    mask = pad_left([torch.ones_like(row) for row in tensors], 0).to(device)
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
    routes, values = None, torch.stack(draws.log_probs, 1) if log_probs else None  # [N, G]
    if steps is not None:  # int16 [N, T, L, K]: a token's row is that of when it was first fed
        parts: list[Tensor] = []
        count = 0
        for step in steps:
            found = step.routed_experts.cpu()
            again = count if found.shape[1] > count else 0  # without a cache, all are fed again
            parts.append(found[:, again:])
            count += found.shape[1] - again
        routes = torch.cat(parts, 1)
    # one answer each, without the prompt's padding, and without the rows of padding after it
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    answers = []
    for i, prompt in enumerate(prompts):
        outputs = []
        for row in range(i * samples, (i + 1) * samples):
            count = int(draws.lengths[row])
            chosen = sequences[row, draws.width : draws.width + count].cpu().numpy()
            fed = slice(draws.width - len(prompt), draws.width + count - 1)  # the last token is never fed
            outputs.append(
                CompletionOutput(
                    index=row - i * samples,
                    token_ids=chosen,
                    text="",
                    finish_reason="stop" if chosen[-1] in stops or count < draws.most else "length",
                    policy_versions=np.full(count, -1, np.int32),
                    logprobs=None if values is None else values[row, :count].numpy(),
                    routed_experts=None if routes is None else routes[row, fed].numpy(),
                    kept=KeptIds.of_masks([masks[row] for masks in draws.kept[:count]], count),
                )
            )
        answers.append(
            Completion(
                request_id=str(i),
                prompt=None,
                prompt_token_ids=np.asarray(prompt, np.int64),
                num_cached_tokens=0,
                outputs=outputs,
            )
        )
    return answers


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
        self.kept: list[list[NDArray[np.int32]]] = []  # the masks of each step's tokens
        self._drawn_from: Tensor | None = None

    def run(self, model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> object:
        """Run transformers' loop with the observing lists."""
        self.width = input_ids.shape[1]
        self.most = (kwargs["stopping_criteria"].max_length or math.inf) - self.width
        kwargs["logits_processor"] = _Processors(kwargs["logits_processor"], self)
        kwargs["stopping_criteria"] = _Criteria(kwargs["stopping_criteria"], self)
        return sample_by(model, input_ids, **kwargs)

    def note(self, logits: Tensor, processed: Tensor) -> None:
        """Record the distribution of the next token of each answer; both are ``[N, V]``."""
        if self.wants_log_probs:
            kept = processed > float("-inf")  # the others were excluded
            moved = processed - logits / self.temperature  # a constant shift of a row changes nothing
            most, least = (moved.masked_fill(~kept, value) for value in (float("-inf"), float("inf")))
            if float((most.amax(-1) - least.amin(-1)).max()) > 1e-4 * max(1.0, float(logits.abs().max())):
                raise ValueError(
                    f"{', '.join(changes_of(self.config)) or 'a logits processor'} changes logits, and log-probs with "
                    "them, in a way that a trainer does not replay: switch it off in generate_kwargs (it may come from "
                    "the model's generation_config), or pass return_log_probs=False"
                )
            self._drawn_from = processed.log_softmax(-1)
        self.kept.append(name_kept(processed))

    def end(self, input_ids: Tensor, ended: Tensor) -> None:
        """Record the log-probs of the tokens that were sampled last, and which answers end with them, bool ``[N]``."""
        # transformers may take a step more than it returns (DeferredStopCheck, on mps): answers end at ``lengths``
        if self._drawn_from is not None:
            self.log_probs.append(self._drawn_from.gather(-1, input_ids[:, -1:])[:, 0].cpu())
            self._drawn_from = None
        # an answer that ended before goes on as padding
        first = ended.cpu() & (self.lengths == 0)
        self.lengths[first] = input_ids.shape[1] - self.width


class _Processors(LogitsProcessorList):
    """Logits processors, followed by the observer."""

    def __init__(self, processors: LogitsProcessorList, draws: _Draws) -> None:
        super().__init__(processors)
        self.draws = draws

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        processed: Tensor = super().__call__(input_ids, scores.clone(), **kwargs)
        self.draws.note(scores, processed)
        return processed


class _Criteria(StoppingCriteriaList):
    """Stopping criteria, followed by the observer."""

    def __init__(self, criteria: StoppingCriteriaList, draws: _Draws) -> None:
        super().__init__(criteria)
        self.draws = draws

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        ended = super().__call__(input_ids, scores, **kwargs)
        self.draws.end(input_ids, ended)
        return ended


# -- routes -----------------------------------------------------------------------------------------------------------


@contextmanager
def _recorded(model: PreTrainedModel, replay: RouterReplay) -> Iterator[list[Recording]]:
    """Record each forward pass of this thread, in the list that is yielded."""
    steps: list[Recording] = []
    contexts: list[AbstractContextManager[Recording]] = []
    thread = threading.get_ident()

    def begin(*_: object) -> None:
        if threading.get_ident() == thread:
            contexts.append(replay.record())
            steps.append(contexts[-1].__enter__())

    def finish(*_: object) -> None:
        if threading.get_ident() == thread and contexts:
            contexts.pop().__exit__(*sys.exc_info())

    called = unwrap(model)
    hooks = [called.register_forward_pre_hook(begin), called.register_forward_hook(finish, always_call=True)]
    try:
        yield steps
    finally:
        for hook in hooks:
            hook.remove()
