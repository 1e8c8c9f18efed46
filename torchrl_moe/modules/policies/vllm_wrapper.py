"""``vLLMWrapper``: prompts in a TensorDict become answers in a TensorDict, with the experts of every token.

Name, arguments and keys are TorchRL's, the engine is ours. Prompts are read in ``prompts``, answers are laid out in
``rollout``. From the top: how arguments become sampling parameters, what a batch asks for besides its prompts, which
arguments are refused, and the wrapper.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import (
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    set_list_to_stack,
)
from torch import Tensor
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLWrapper

from torchrl_moe._compat_transformers import standard_names
from torchrl_moe.data import KeptTokens
from torchrl_moe.data.kept_tokens import select_rows
from torchrl_moe.errors import EngineError, ReplayError
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput
from torchrl_moe.modules.policies.prompts import PolicyWrapper, Prompts, WrapperOptions, no_distribution
from torchrl_moe.modules.policies.rollout import (
    SAMPLING,
    RolloutKeys,
    answer_tensordict,
    check_prompts,
    flat_samples,
    refuse_changed_values,
)
from torchrl_moe.modules.policies.scoring import read_batch, read_routes
from torchrl_moe.modules.policies.scoring_model import UNSAID, read_sampling, says_nothing
from torchrl_moe.modules.policies.scoring_wrapper import read_sequences
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.modules.serving.requests import SamplingParameters
from torchrl_moe.modules.serving.service import GenerationService

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.lora.request import LoRARequest


# Translates TorchRL's ``generate_kwargs`` to vLLM's sampling parameters, as a mapping, and engine arguments.


# Common name -> vLLM's. If both are given, vLLM's own wins, as in TorchRL.
RENAMED = {"max_new_tokens": "max_tokens", "num_return_sequences": "n", "stop_sequences": "stop"}
# Beam search is not supported here; a value that means "off" is accepted.
BEAM_ONLY = {"num_beams": (None, 1), "length_penalty": (None, 1.0), "early_stopping": (None, False)}
# Not sampling parameters, but arguments of the engine's own ``generate``.
FOR_ENGINE = ("actor_index", "lora_request", "on_resume")


def engine_arguments_of(generate_kwargs: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the engine's ``generate`` among ``generate_kwargs``, and the others.

    >>> engine_arguments_of({"actor_index": 1, "max_new_tokens": 8})
    ({'actor_index': 1}, {'max_new_tokens': 8})
    """
    others = dict(generate_kwargs or {})
    return {name: others.pop(name) for name in FOR_ENGINE if name in others}, others


def sampling_params_of(generate_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams`` that ``generate_kwargs`` ask for.

    >>> sampling_params_of({"max_new_tokens": 8, "do_sample": False})
    {'max_tokens': 8, 'temperature': 0.0}
    """
    given = dict(generate_kwargs or {})
    if given.get("temperature", 0.0) is None:
        del given["temperature"]  # TorchRL treats it as a temperature other than 0
    # TorchRL's own checks, then vLLM's names
    given = standard_names(given)
    for name, off in BEAM_ONLY.items():
        value = given.pop(name, None)
        if value not in off:
            raise ValueError(f"generate_kwargs[{name!r}]={value!r}: vLLM samples and has no beam search; leave it out")
    params = {RENAMED.get(name, name): value for name, value in given.items() if RENAMED.get(name) not in given}
    if params.pop("do_sample", None) is False:
        params["temperature"] = 0.0
    if isinstance(params.get("logprobs"), bool):
        params["logprobs"] = 0 if params["logprobs"] else None
    return params


def overridden(params: Mapping[str, Any], generate_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters as the ``generate_kwargs`` of one call change them.

    >>> overridden({"max_tokens": 8, "temperature": 0.0}, {"do_sample": True, "max_new_tokens": 4})
    {'max_tokens': 4}
    """
    changes = sampling_params_of(generate_kwargs)
    merged = {**params, **changes}
    if generate_kwargs.get("do_sample") and "temperature" not in changes and not params.get("temperature", 1.0):
        del merged["temperature"]  # it made the old parameters greedy
    return merged


# What a batch says about its requests besides their prompts: keys at its root, one value per sample, read if present.
#
# Numbers are an int tensor [B] or [B, 1]; text, and anything else, a list or NonTensorStack of B entries, or one
# NonTensorData for all. Unset are None and, for all but the priority, -1. docs/service.md has the table of keys.


UNSET = -1
ARGUMENTS = {
    "session_id": "session_ids",
    "group_id": "group_ids",
    "priority": "priority",
    "min_version": "min_version",
    "request_context": "request_context",
}
"""Key -> the argument of the engine's ``generate`` that it becomes."""


def request_arguments(samples: Sequence[TensorDictBase]) -> dict[str, list[Any]]:
    """Return arguments of the engine's ``generate``, one entry per sample, for each key that any sample has."""
    found: dict[str, list[Any]] = {}
    for i, sample in enumerate(samples):
        for key in ARGUMENTS.keys() & set(sample.keys()):
            values = found.setdefault(ARGUMENTS[key], [0 if key == "priority" else None] * len(samples))
            value = _plain(sample.get(key), key, i)
            if key == "priority":
                values[i] = 0 if value is None else value
            elif not (isinstance(value, int) and value == UNSET):
                values[i] = value
    return found


def request_argument(sample: TensorDictBase) -> dict[str, Any]:
    """Return the same for one sample, as arguments of ``agenerate``: ``session_id``, ``group_id`` and so on."""
    found = request_arguments([sample])
    return {key: found[name][0] for key, name in ARGUMENTS.items() if name in found}


def _plain(value: object, key: str, sample: int) -> object:
    """Return a sample's value as plain Python."""
    if isinstance(value, NonTensorData):
        value = value.data
    if isinstance(value, NonTensorStack | Tensor | np.ndarray):
        value = value.tolist()
    elif isinstance(value, TensorDictBase):
        return value.to_dict()
    while isinstance(value, list) and len(value) == 1:  # of a batch [B, 1]
        (value,) = value
    if isinstance(value, list):
        raise ValueError(
            f"sample {sample}: {key!r} is {value!r}; give each sample one value: a tensor [B] or [B, 1], or a list or "
            "NonTensorStack of B entries"
        )
    return value.item() if isinstance(value, np.generic) else value


def tokenizer_of(tokenizer: PreTrainedTokenizerBase | str | None, engine: GenerationService) -> Any:
    """Return the tokenizer: as given, by its name, or the engine's."""
    if tokenizer is None:
        return engine.get_tokenizer()
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    assert not isinstance(tokenizer, str)
    try:
        # a tokenizer of another model would make other tokens of the same text
        own = {number: token for token, number in engine.get_tokenizer().get_vocab().items()}
        given = [pair for pair in tokenizer.get_vocab().items() if pair[1] in own]
    except (AttributeError, ValueError, EngineError):  # the engine has none that can be sent, or it lists no tokens
        return tokenizer
    others = [(number, token) for token, number in given if own[number] != token]
    if 2 * len(others) > len(given):  # a few may be renamed: those that a model has in reserve
        number, token = min(others)
        raise ValueError(
            f"tokenizer: {len(others)} of {len(given)} ids stand for other tokens in the engine's, such as "
            f"{number}: {token!r}, there {own[number]!r}. Pass the tokenizer of the engine's model, or none"
        )
    return tokenizer


OF_SCORING = ("replay", "temperature")
OF_GENERATING = ("num_samples", "return_routed_experts")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(WrapperOptions):
    """The arguments of :class:`~torchrl_moe.modules.vLLMWrapper`, as they were given."""

    model: GenerationService | str | os.PathLike[str]
    timeout_seconds: float | None
    use_tqdm: bool
    actor_index: int | None
    lora_request: LoRARequest | Mapping[str, object] | None


class _CompletionClass:
    """The TensorClass that TorchRL makes of vLLM's ``CompletionOutput``, as an attribute of a class."""

    def __get__(self, wrapper: object, kind: type) -> type[TensorClass]:
        return TorchRLWrapper.CompletionOutput_tc


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The request for one sample of a batch, for callers that send requests to the engine themselves."""

    sample: TensorDictBase
    prompts: Prompts
    index: int
    keys: RolloutKeys
    arguments: dict[str, Any]


OURS = (
    "policy_versions", "policy_version", "num_segments", "resume", "finish_reason", "num_cached_tokens", SAMPLING,
)  # fmt: skip
"""Keys that it writes beside TorchRL's and the routes."""


class vLLMWrapper(PolicyWrapper):
    """Generates with an :class:`AsyncVLLM`, or scores with it.

    Args:
        model: an engine; or a folder or hub name, from which an :class:`AsyncVLLM` is started.
        tokenizer: default: the engine's own; a string is loaded by name.
        input_mode: kind of input: ``"history"``, ``"text"`` or ``"tokens"``.
        input_key: where to read it; default ``(input_mode, "prompt")``, and ``(input_mode, "full")`` to score.
        attention_mask_key: mask of padded tokens, if there is one.
        generate: False: do not generate, but write the log-probs of everything in ``input_key`` under the engine's
            current weights, with its tokens and masks; sampling settings are then ignored.
        generate_kwargs: TorchRL's common names (``max_new_tokens``, ``temperature``, ...) or vLLM's own; also
            ``actor_index``, ``lora_request`` and the engine's ``on_resume``.
        tokenizer_kwargs: for text prompts; ``padding`` and ``return_tensors`` are ignored.
        pad_output: dense output, prompts padded left and responses right, instead of a lazy stack.
        pad_model_input: must be ``None``; vLLM takes no padding.
        inplace: write into the input (default), a new TensorDict (``False``), or an empty one like it (``"empty"``).
            Several answers to a prompt can only come in a new one.
        device: where the output goes.
        layout: accepted for compatibility with TorchRL; only ``torch.strided`` is written.
        num_samples: answers per prompt; the output then has batch size ``[B, n]``.
        chat_template_name: one of TorchRL's templates.
        chat_template: a template of your own. Without one, or a name, the tokenizer must have one.
        chat_template_kwargs: arguments of the template, such as ``{"enable_thinking": False}``.
        return_log_probs: whether to write log-probs; ``None`` means True.
        return_routed_experts: whether to write routes (default: if the engine captures them).
        history_key, text_key, tokens_key, masks_key, log_probs_key, routed_experts_key: where to write.
        batching, min_batch_size, max_batch_size: TorchRL's; refused if set: the engine batches the requests of all
            threads. batching_timeout has no effect.
        prefer_tokens: in history mode, use the ids in ``"tokens"`` instead of encoding again: the ids of an earlier
            turn for the part that they cover, else the caller's own ``("tokens", "prompt")`` or ``"full"``, unchanged.
        timeout_seconds: per request; a late batch raises :class:`GenerationTimeout`.
        actor_index: the replica to use, instead of the balancer's choice.
        lora_request: vLLM's ``LoRARequest``, or a mapping of its fields.
        use_tqdm: whether to show a progress bar.
        replay: with ``generate=False``: whether tokens follow recorded experts: ``"R3"`` or ``"none"``. Default:
            ``"R3"`` if the engine captures routes; text and chats never follow any.
        temperature: with ``generate=False``: of samples that do not name theirs (default: 1); one that names another is
            a ``ValueError``.

    Every key of ``docs/loop.md`` is written in every input mode; sequences of unequal length are a lazy stack.
    ``out_keys`` are TorchRL's keys, in its order; ``extra_keys`` are ours. Code that copies only ``out_keys``, such as
    TorchRL's collector with a policy on another device, copies both after ``policy.out_keys += policy.extra_keys``.

    A batch may have more entries for its requests, for admission and balancing: ``"session_id"``, ``"group_id"``,
    ``"priority"``, ``"min_version"`` and ``"request_context"`` at its root, one value per sample, are read if present.
    Numbers are an int tensor ``[B]`` or ``[B, 1]``, anything else a list or a ``NonTensorStack``; ``None``, or -1
    except for a priority, counts as absent. The ``n`` answers of a sample share its values. Chats are rendered with a
    sample's ``"tools"`` (JSON schemas) and ``"chat_template_kwargs"``, ``NonTensorData`` each; one whose last message
    is the assistant's is continued.

    Example::

        policy = vLLMWrapper(engine, input_mode="text", generate_kwargs={"max_new_tokens": 64, "temperature": 0.7})
        td = policy(TensorDict(text=Text(prompt=["1+1="]), batch_size=[1]))
        td[0]["routed_experts", "full"]  # [T, L, K]
    """

    CompletionOutput_tc = _CompletionClass()

    engine: GenerationService

    def __init__(
        self,
        model: GenerationService | str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase = None,
        input_mode: Literal["history", "text", "tokens"] = "history",
        input_key: NestedKey | None = None,
        attention_mask_key: NestedKey = "attention_mask",
        generate: bool = True,
        generate_kwargs: dict[str, object] | None = None,
        tokenizer_kwargs: dict[str, object] | None = None,
        pad_output: bool = False,
        pad_model_input: bool | None = None,
        inplace: Literal["empty"] | bool | None = None,
        device: torch.device | str | None = None,
        layout: torch.layout | None = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, object] | None = None,
        return_log_probs: bool | None = None,
        return_routed_experts: bool | None = None,
        history_key: str = "history",
        text_key: str = "text",
        tokens_key: str = "tokens",
        masks_key: str = "masks",
        log_probs_key: str = "log_probs",
        routed_experts_key: str = "routed_experts",
        batching: bool | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        batching_timeout: float = 10.0,
        prefer_tokens: bool = False,
        timeout_seconds: float | None = None,
        use_tqdm: bool = False,
        actor_index: int | None = None,
        lora_request: LoRARequest | Mapping[str, object] | None = None,
        replay: Literal["R3", "none"] | None = None,
        temperature: float | None = None,
    ) -> None:
        options = EngineOptions(
            model=model, tokenizer=tokenizer, input_mode=input_mode, input_key=input_key,
            attention_mask_key=attention_mask_key, generate=generate, generate_kwargs=generate_kwargs,
            tokenizer_kwargs=tokenizer_kwargs, pad_output=pad_output, pad_model_input=pad_model_input, inplace=inplace,
            device=device, layout=layout, num_samples=num_samples, chat_template_name=chat_template_name,
            chat_template=chat_template, chat_template_kwargs=chat_template_kwargs, return_log_probs=return_log_probs,
            return_routed_experts=return_routed_experts, history_key=history_key, text_key=text_key,
            tokens_key=tokens_key, masks_key=masks_key, log_probs_key=log_probs_key,
            routed_experts_key=routed_experts_key, batching=batching, min_batch_size=min_batch_size,
            max_batch_size=max_batch_size, batching_timeout=batching_timeout, prefer_tokens=prefer_tokens,
            timeout_seconds=timeout_seconds, use_tqdm=use_tqdm, actor_index=actor_index, lora_request=lora_request,
            replay=replay, temperature=temperature,
        )  # fmt: skip
        super().__init__()
        # bad arguments are refused before an engine is started
        if pad_model_input is not None:
            raise ValueError("pad_model_input must be None: vLLM takes prompts without padding")
        if layout not in (None, torch.strided):
            raise ValueError(f"layout must be None or torch.strided, got {layout}")
        if replay not in (None, "R3", "none"):
            raise ValueError(f"replay must be 'R3' or 'none', got {replay!r}: an engine records no R2")
        options.check("the engine batches the requests of all threads")
        for name in OF_SCORING if generate else OF_GENERATING:
            if (value := getattr(options, name)) is not None:
                kind, now = ("scoring", "generate=False") if generate else ("generation", "generate=True")
                raise ValueError(f"{name}={value!r} is for {kind}: leave it out, or pass {now}")
        # nothing is started before this line; a new version shares the engine
        if isinstance(model, str | os.PathLike):
            model = AsyncVLLM.from_pretrained(model)
        if not isinstance(model, GenerationService):
            raise TypeError(
                "model must be an AsyncVLLM, a folder or a hub name, got "
                f"{type(model).__module__}.{type(model).__qualname__}. AsyncVLLM.from_pretrained(path, ...) takes the "
                "arguments of a vllm.LLM or of TorchRL's engine; AsyncVLLM.connect(name) reaches an engine in Ray."
            )
        self.model = self.engine = model
        self.tokenizer = tokenizer_of(tokenizer, model)
        self._set_options(replace(options, model=model))
        self.layout, self.timeout_seconds, self.use_tqdm = layout, timeout_seconds, use_tqdm
        self.return_log_probs = return_log_probs is not False
        self._device = None if device is None else torch.device(device)
        # routes are written, and followed by scores of tokens, if the engine captures them
        captured = model.routing_layout is not None
        if return_routed_experts and not captured:
            raise ValueError(
                "return_routed_experts=True, but the engine captures no routes: its model is dense, or it was started "
                "with enable_return_routed_experts=False"
            )
        self.return_routed_experts = captured if return_routed_experts is None else return_routed_experts
        self.replay, self.temperature = None, temperature
        if not generate:
            self.replay = replay or ("R3" if input_mode == "tokens" and captured else "none")
        # the arguments of the engine's generate() may also be among generate_kwargs
        asked, sampling = engine_arguments_of(generate_kwargs)
        own = {"actor_index": actor_index, "lora_request": lora_request}
        if twice := sorted(name for name in asked if own.get(name) is not None):
            raise ValueError(f"{', '.join(twice)}: given twice, also in generate_kwargs. Leave it out of one.")
        self.engine_arguments = {**own, **asked}
        params = sampling_params_of(sampling)
        if num_samples is not None and params.setdefault("n", num_samples) != num_samples:
            raise ValueError(f"num_samples={num_samples} differs from generate_kwargs['n']={params['n']}")
        if self.return_log_probs:
            params.setdefault("logprobs", 0)
        params.setdefault("include_stop_str_in_output", True)
        params.setdefault("skip_special_tokens", False)
        self.sampling_params = SamplingParameters(params)
        # several answers to a prompt have another batch size than the input, so they cannot be written into it
        count = num_samples or params.get("n", 1)
        self.num_samples = num_samples or (count if count > 1 and generate else None)
        self.inplace = (self.num_samples is None) if inplace is None else inplace
        if self.num_samples is not None and self.inplace is not False:
            raise ValueError(
                f"inplace must be False (or None) when generating more than one sample, got inplace={inplace!r}"
            )
        self._set_keys(input_key or (input_mode, "prompt" if generate else "full"))
        routes = [] if self.keys.routed_experts is None else [self.keys.routed_experts]
        self.extra_keys = [*routes, *OURS] if generate else []

    @property
    def device(self) -> torch.device | None:
        """Where the output goes; ``None`` leaves it on the CPU."""
        return self._device

    @property
    def padding_value(self) -> int | None:
        """The padding token; the end-of-turn token if there is no separate one."""
        return self._pad

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use another tokenizer from now on, in new versions too."""
        self.tokenizer = tokenizer
        self._options = replace(self._options, tokenizer=tokenizer)

    def get_new_version(self, **kwargs: object) -> vLLMWrapper:
        """Return a wrapper of the same engine with some arguments changed and all others kept.

        If ``generate`` or ``input_mode`` changes, ``input_key`` is reset to its default; if ``generate`` changes, so
        are the arguments that only the other kind of wrapper has.
        """
        kind = kwargs.get("generate", self.generate) != self.generate
        of_one_kind = (*OF_GENERATING, *OF_SCORING, "return_log_probs")
        return type(self)(**self._options.changed(kwargs, of_one_kind if kind else ()))

    # -- forward ----------------------------------------------------------------------------------------------------

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        return_routed_experts: bool = True,
        **generate_kwargs: Any,
    ) -> TensorDictBase:
        """Generate for every sample of ``tensordict``, of any batch size.

        Args:
            tensordict: holds the prompts at ``input_key``.
            tensordict_out: where to write; overrides ``inplace``.
            logits_only: must be False; an engine returns no logits.
            return_routed_experts: False omits the routes of this call; evaluation does not need them.
            **generate_kwargs: override the constructor's for this call, engine arguments included.

        Raises:
            ValueError: there is nothing at ``input_key``, the batch or a prompt is empty, an argument is invalid, or a
                prompt continues a turn of another temperature.
            TypeError: the history is not a ``History``, or an entry for requests is of a wrong type.
            EngineError: a request failed, or was aborted: a cut answer is never returned as a complete one.
            RoutingError: with ``generate=False``, routes that ``replay`` needs are missing, or do not fit.
            NotImplementedError: ``logits_only``.
        """
        if logits_only:  # as TorchRL's get_dist and its variants ask
            raise no_distribution(
                "vLLM does not return logits, so there is no distribution: use a TransformersWrapper. generate=False "
                "gives the log-probs of tokens."
            )
        samples = flat_samples(tensordict)
        if not samples:
            raise ValueError(f"the input has no samples: its batch size is {list(tensordict.batch_size)}")
        if not self.generate:
            if generate_kwargs:
                raise ValueError(f"{sorted(generate_kwargs)} are for generation, but this wrapper has generate=False")
            return self._score(samples, tensordict, tensordict_out)
        prompts, keys, common = self._asked(samples, return_routed_experts, generate_kwargs)
        arguments = {**common, **request_arguments(samples)}
        completions = self.engine.generate(prompt_token_ids=prompts.ids, use_tqdm=self.use_tqdm, **arguments)
        assert isinstance(completions, list)  # a list of prompts was passed
        if aborted := [completion.request_id for completion in completions if completion.aborted]:
            message = f"{len(aborted)} of {len(completions)} requests were aborted ({aborted[0]!r}, ...)"
            raise EngineError(message, completions)
        answers = [
            self._answer(SampleRequest(samples[i], prompts, i, keys, common), completion, output)
            for i, completion in enumerate(completions)
            for output in completion.outputs
        ]
        return self._write(tensordict, tensordict_out, self._stacked(answers, tensordict.batch_size, self.num_samples))

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]
    def requests(
        self, tensordict: TensorDictBase, *, return_routed_experts: bool = True, **generate_kwargs: Any
    ) -> list[SampleRequest]:
        """Return the requests that :meth:`forward` would send, sample by sample, for a caller that sends them itself.

        Arguments and errors are those of :meth:`forward`; ``num_samples`` must be ``None``.

        Example::

            (request,) = policy.requests(td)
            answer = policy.answer(request, await engine.agenerate(**request.arguments))
        """
        if self.num_samples is not None:
            raise ValueError(f"requests() asks for one answer per sample, but num_samples={self.num_samples}")
        samples = flat_samples(tensordict)
        prompts, keys, common = self._asked(samples, return_routed_experts, generate_kwargs)
        return [
            SampleRequest(
                sample, prompts, i, keys, {**common, "prompt_token_ids": prompts.ids[i], **request_argument(sample)}
            )
            for i, sample in enumerate(samples)
        ]

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]
    def answer(self, request: SampleRequest, completion: Completion) -> TensorDictBase:
        """Return the answer to one of :meth:`requests`: the keys that :meth:`forward` writes, batch size ``[]``."""
        return self._answer(request, completion, completion.outputs[0])

    def _answer(self, request: SampleRequest, completion: Completion, output: CompletionOutput) -> TensorDictBase:
        params = request.arguments["sampling_params"]
        layout = self.engine.routing_layout
        answer = answer_tensordict(completion, output, layout, request.keys, params, request.sample)
        self._add_text(answer, request.prompts, request.index, bool(params.get("skip_special_tokens")))
        return answer

    def _asked(
        self, samples: Sequence[TensorDictBase], return_routed_experts: bool, generate_kwargs: Mapping[str, Any]
    ) -> tuple[Prompts, RolloutKeys, dict[str, Any]]:
        """Return prompts, keys, and what all requests of one call have in common, as arguments of the engine."""
        keys = self.keys if return_routed_experts else replace(self.keys, routed_experts=None)
        prompts = self._prompts(samples)
        params, given = dict(self.sampling_params), self.engine_arguments
        if generate_kwargs:
            asked, sampling = engine_arguments_of(generate_kwargs)
            params, given = overridden(params, sampling), {**given, **asked}
        if params.get("n", 1) != (self.num_samples or 1):
            raise ValueError(f"n={params['n']} differs from the wrapper's num_samples={self.num_samples}")
        if keys.log_probs is not None and params.get("logprobs") is None:
            raise ValueError("logprobs is off, but return_log_probs=True: leave logprobs out, or set it to 0")
        if params.get("routed_experts_prompt_start"):
            raise ValueError("routed_experts_prompt_start: a rollout has the experts of all its tokens: leave it out")
        if keys.log_probs is not None:
            refuse_changed_values(params)
        # text is decoded here from the ids; the engine needs it only to find a stop string
        params.setdefault("detokenize", bool(params.get("stop")))
        # before anything is generated: an answer that cannot be joined to an earlier turn would be lost
        check_prompts(prompts.ids, keys, params, samples)
        common = {
            **given,
            "sampling_params": params,
            "timeout_seconds": self.timeout_seconds,
            "return_routed_experts": keys.routed_experts is not None,
        }
        return prompts, keys, common

    # -- scores, and where results are written ----------------------------------------------------------------------

    def _score(
        self, samples: Sequence[TensorDictBase], source: TensorDictBase, target: TensorDictBase | None
    ) -> TensorDictBase:
        """Score the samples of ``source``, and write the results.

        Tokens of a rollout follow the recorded experts (R3), at the temperature and over the tokens that the batch
        gives. Text and chats are encoded, perhaps to tokens other than those sampled, so the routes and kept tokens of
        the sampled tokens do not apply. No gradient flows through it: it gives old log-probs from a replica that is
        serving anyway, or those of a reference policy from an engine that is never synced, in place of a second model
        in the trainer.
        """
        sequences = read_sequences(samples, self)
        # each sample with its sequence at input_key, and the other entries that are read
        rows: list[TensorDictBase] = []
        for i, (sample, sequence) in enumerate(zip(samples, sequences, strict=True)):
            if sequence.text is not None and sample.get((SAMPLING, "kept"), None) is not None:
                raise ValueError(
                    f"sample {i} says which vocabulary entries each token was sampled from, and text may be encoded to "
                    f"other tokens: score it with input_mode='tokens', or exclude {SAMPLING!r}"
                )
            read = sample if sequence.text is None else sample.select(SAMPLING, "min_version", strict=False)
            row = read.copy().set(self.input_key, sequence.ids)
            rows.append(row.set((self.masks_key, "all_attention_mask"), sequence.mask))
        td = lazy_stack(rows)
        # read what is scored, and how it was sampled
        batch = read_batch(td, self.input_key, (self.masks_key, "all_attention_mask"))
        # an engine's own log-probs, wherever the scores are written
        if self.temperature is None and (unsaid := says_nothing(td, ("log_probs", "full"))) is not None:
            warnings.warn(UNSAID.format(unsaid), stacklevel=2)
        sampled_from = read_sampling(td, batch, self.temperature)
        routes = None
        if self.replay != "none":
            layout = self.engine.routing_layout
            if layout is None:
                raise ReplayError("replay='R3' needs an engine that captures routes: pass replay='none' for this one")
            tail = (layout.num_layers, layout.top_k)
            routes = read_routes(td, (self.routed_experts_key, "full"), batch, tail, "raise")
        real = batch.split(batch.mask)
        if empty := [i for i, mask in enumerate(real) if not mask.any()]:
            raise ValueError(f"sample {empty[0]} has no tokens but pads")
        given: dict[str, Any] = {name: self.engine_arguments[name] for name in ("actor_index", "lora_request")}
        kept = []
        for one, mask in zip(sampled_from.kept, real, strict=True):
            pair = None if one is None else select_rows(one.ids, one.sizes, mask)
            kept.append(None if pair is None else KeptTokens(ids=pair[0], sizes=pair[1]))
        # pads stay here: the engine gets the real tokens of each sample
        scores = self.engine.score(
            [ids[mask] for ids, mask in zip(batch.split(batch.ids), real, strict=True)],
            None if routes is None else [one[mask] for one, mask in zip(batch.split(routes), real, strict=True)],
            temperature=sampled_from.temperatures.tolist(),
            kept=kept,
            min_version=request_arguments(td.unbind(0)).get("min_version"),
            timeout_seconds=self.timeout_seconds,
            use_tqdm=self.use_tqdm,
            **given,
        )
        assert isinstance(scores, list)  # a list of sequences was passed
        log_probs = [torch.zeros(len(mask)) for mask in real]  # 0 on pads and on first tokens
        for row, of_sample, mask in zip(log_probs, scores, real, strict=True):
            row[mask] = of_sample.nan_to_num(0.0)
        answers = []
        for sequence, of_tokens in zip(sequences, log_probs, strict=True):
            masks = {"all_attention_mask": sequence.mask}
            if sequence.assistant is not None:
                masks["all_assistant_mask"] = sequence.assistant
            answer = TensorDict(
                {
                    self.tokens_key: Tokens(full=sequence.ids, padded=False),
                    self.masks_key: Masks(**masks, padded=False),
                    self.log_probs_key: LogProbs(full=of_tokens, padded=False),
                }
            )
            if sequence.text is not None:
                answer.set(self.text_key, Text(full=sequence.text))
            if sequence.history is not None:
                answer.set(self.history_key, ChatHistory(full=sequence.history))
            answers.append(answer)
        out = self._stacked(answers, source.batch_size, None)
        # tokens stay if those that were read are those that would be written
        stays = self.input_mode == "tokens" and self.input_key == (self.tokens_key, "full")
        stays = stays and (not self.pad_output or len({len(one.ids) for one in sequences}) == 1)
        if not stays or target is not None or self.inplace is not True:
            return self._write(source, target, out, self.out_keys)
        # other entries of the rollout have the layout of these tokens
        masked = all(sample.get((self.masks_key, "all_attention_mask"), None) is not None for sample in samples)
        out = out.exclude(self.tokens_key, *([self.masks_key] if masked else []))
        return self._write(source, None, out, [self.log_probs_key])

    def _write(
        self,
        source: TensorDictBase,
        target: TensorDictBase | None,
        out: TensorDictBase,
        stale: Sequence[NestedKey] = (),
    ) -> TensorDictBase:
        """Put the output where it belongs."""
        out = out if self._device is None else out.to(self._device)
        if target is None:
            if self.inplace is False:
                return out
            target = source.empty() if self.inplace == "empty" else source
        # entries of an earlier turn that this one does not write would be of other tokens
        stale = stale or [*self.out_keys, *self.extra_keys]
        return target.exclude(*stale, inplace=True).update(out)
