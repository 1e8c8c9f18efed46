"""``vLLMWrapper``: prompts in a TensorDict become answers in a TensorDict, with the experts of every token.

Name, arguments and keys are TorchRL's, the engine is ours. Prompts are read in ``prompts``, other entries for requests
in ``request_keys``, sampling parameters are mapped in ``generate_kwargs``, answers are laid out in ``rollout``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase, set_list_to_stack
from torchrl.modules.llm.policies import LLMWrapperBase
from torchrl.modules.llm.policies import vLLMWrapper as TorchRLWrapper

from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies import prompts as reading
from torchrl_moe.modules.policies.prompts import Prompts, Source, template_options
from torchrl_moe.modules.policies.rollout import (
    SAMPLING,
    RolloutKeys,
    answer_tensordict,
    check_prompts,
    flat_samples,
    pad_answers,
    refuse_changed_values,
    stack_answers,
)
from torchrl_moe.modules.policies.scoring_wrapper import FullSequence, pad_scored, read_sequences
from torchrl_moe.modules.policies.wrapper_arguments import (
    EngineScorer,
    changed_arguments,
    engine_arguments_of,
    engine_of,
    keeps_routes,
    model_of,
    overridden,
    refuse,
    request_argument,
    request_arguments,
    sampling_parameters_of,
    scorer_of,
    split_arguments,
    tokenizer_of,
)

__all__ = ["EngineWrapper", "SampleRequest", "no_logits", "vLLMWrapper"]


# What TorchRL's code uses of an engine's wrapper besides ``forward``, under TorchRL's names: keys, tokenizer, device.
#
# Also how a wrapper reads a batch, and writes answers or scores into it.


PLAIN = (
    "input_mode",
    "generate",
    "prefer_tokens",
    "attention_mask_key",
    "chat_template",
    "chat_template_name",
    "pad_output",
    "layout",
    "timeout_seconds",
    "use_tqdm",
)
"""Arguments that become attributes unchanged."""
NAMES = ("history", "text", "tokens", "masks", "log_probs", "routed_experts")


def no_logits() -> NotImplementedError:
    """Return the error for methods that need logits, as TorchRL's ``get_dist`` and its variants do."""
    return NotImplementedError(
        "vLLM does not return logits, so there is no distribution: use a TransformersWrapper. generate=False gives the "
        "log-probs of tokens."
    )


class _CompletionClass:
    """The TensorClass that TorchRL makes of vLLM's ``CompletionOutput``, as an attribute of a class."""

    def __get__(self, wrapper: Any, kind: Any) -> Any:
        return TorchRLWrapper.CompletionOutput_tc


class EngineWrapper(LLMWrapperBase):
    """A wrapper whose model is an engine.

    Attributes:
        in_keys: keys that it reads.
        out_keys: TorchRL's keys, in TorchRL's order, of what it writes.
        extra_keys: further keys that it writes. return_history, return_text, return_tokens, return_masks,
            return_log_probs: which of these it writes.
    """

    CompletionOutput_tc = _CompletionClass()
    # TorchRL's base class reads them: calls of several threads are not joined
    _min_batch_size = _max_batch_size = None

    scorer: EngineScorer | None
    tokenizer: Any
    input_mode: Literal["history", "text", "tokens"]
    tokenizer_kwargs: dict[str, Any]
    attention_mask_key: NestedKey
    chat_template: str | None
    chat_template_name: str | None
    chat_template_kwargs: dict[str, Any]
    prefer_tokens: bool
    timeout_seconds: float | None
    use_tqdm: bool
    return_log_probs: bool
    return_routed_experts: bool
    history_key: str
    routed_experts_key: str
    keys: RolloutKeys
    _device: torch.device | None

    def _set_plain(self, arguments: Mapping[str, Any]) -> None:
        """Set the attributes that are given by arguments."""
        for name in PLAIN:
            setattr(self, name, arguments[name])
        self.tokenizer_kwargs = dict(arguments["tokenizer_kwargs"] or {})
        self.chat_template_kwargs = template_options(arguments["chat_template_kwargs"])
        self.return_log_probs = arguments["return_log_probs"] is not False
        self._device = None if arguments["device"] is None else torch.device(arguments["device"])

    @property
    def device(self) -> torch.device | None:
        """Where the output goes; ``None`` leaves it on the CPU."""
        return self._device

    @property
    def padding_value(self) -> int | None:
        """The padding token; the end-of-turn token if there is no separate one."""
        pad: int | None = getattr(self.tokenizer, "pad_token_id", None)
        return getattr(self.tokenizer, "eos_token_id", None) if pad is None else pad

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer from now on."""
        self.tokenizer = tokenizer

    def _set_keys(self, arguments: Mapping[str, Any]) -> None:
        """Set all keys, and which entries are read and written."""
        for name in NAMES:
            setattr(self, f"{name}_key", arguments[f"{name}_key"])
        self.return_history, self.return_text = self.input_mode == "history", self.input_mode != "tokens"
        self.return_tokens = self.return_masks = True
        self.keys = RolloutKeys(
            tokens=self.tokens_key,
            masks=self.masks_key,
            log_probs=self.log_probs_key if self.return_log_probs else None,
            routed_experts=self.routed_experts_key if self.return_routed_experts else None,
        )
        leaf = "full" if self.scorer is not None else "prompt"
        self.input_key = arguments["input_key"] or (self.input_mode, leaf)
        self.in_keys = [self.input_key, *([] if self.scorer is None else self.scorer.in_keys)]
        self.out_keys = [self.text_key] if self.return_text else []
        self.out_keys += [self.masks_key, self.tokens_key]
        self.out_keys += [self.log_probs_key] if self.return_log_probs else []
        self.out_keys += [self.history_key] if self.return_history else []
        self.extra_keys = [] if self.scorer is not None else self._extra_keys()

    def _extra_keys(self) -> list[NestedKey]:
        keys: list[NestedKey] = [] if self.keys.routed_experts is None else [self.keys.routed_experts]
        return [
            *keys,
            "policy_versions",
            "policy_version",
            "num_segments",
            "resume",
            "finish_reason",
            "num_cached_tokens",
            SAMPLING,
        ]

    @property
    def _source(self) -> Source:
        return Source(
            input_mode=self.input_mode,
            input_key=self.input_key,
            tokenizer=self.tokenizer,
            tokenizer_kwargs=self.tokenizer_kwargs,
            attention_mask_key=self.attention_mask_key,
            chat_template=self.chat_template,
            chat_template_name=self.chat_template_name,
            prefer_tokens=self.prefer_tokens,
            tokens_key=self.tokens_key,
            masks_key=self.masks_key,
            pad=self.padding_value,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    # -- scores -----------------------------------------------------------------------------------------------------

    def _score(
        self, scorer: EngineScorer, samples: Sequence[TensorDictBase], source: TensorDictBase, target: Any
    ) -> TensorDictBase:
        """Score the samples of ``source``, and write the results."""
        sequences = read_sequences(samples, self._source)
        names = {name: getattr(self, f"{name}_key") for name in NAMES}
        answers = scorer.answers(samples, sequences, names)
        shape = source.batch_size
        if self.pad_output:
            padded = pad_scored(answers, self.padding_value or 0, names)
            out: TensorDictBase = padded.reshape(shape) if shape else padded[0]
        else:
            out = stack_answers(answers, shape)
        stays = self._stays(sequences) and target is None and self.inplace is True
        if stays:  # other entries of the rollout have the layout of these tokens
            out = out.exclude(self.tokens_key, *([self.masks_key] if _have(samples, self.masks_key) else []))
        return self._write(source, target, out, [self.log_probs_key] if stays else self.out_keys)

    def _stays(self, sequences: Sequence[FullSequence]) -> bool:
        """Whether the tokens that were read are those that would be written."""
        if self.input_mode != "tokens" or self.input_key != (self.tokens_key, "full"):
            return False
        return not self.pad_output or len({len(one.ids) for one in sequences}) == 1

    # -- output -----------------------------------------------------------------------------------------------------

    def _write(
        self,
        source: TensorDictBase,
        target: TensorDictBase | None,
        out: TensorDictBase,
        stale: Sequence[NestedKey] | None = None,
    ) -> TensorDictBase:
        """Put the output where it belongs."""
        out = out if self._device is None else out.to(self._device)
        if target is None:
            if self.inplace is False:
                return out
            target = source.empty() if self.inplace == "empty" else source
        stale = [*self.out_keys, *self.extra_keys] if stale is None else stale
        return target.exclude(*stale, inplace=True).update(out)


def _have(samples: Sequence[TensorDictBase], masks_key: str) -> bool:
    """Whether all samples have a mask of non-padding tokens."""
    return all(sample.get((masks_key, "all_attention_mask"), None) is not None for sample in samples)


# The request for one sample of a batch, for callers that send requests to the engine themselves.


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The request for one sample."""

    sample: TensorDictBase
    prompts: Prompts
    index: int
    keys: RolloutKeys
    arguments: dict[str, Any]


NO_SAMPLES = "inplace must be False (or None) when generating more than one sample"


class vLLMWrapper(EngineWrapper):
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
        device: where the output goes.
        layout: accepted for compatibility with TorchRL; only ``torch.strided`` is written.
        num_samples: answers per prompt; the output then has batch size ``[B, n]``.
        chat_template_name: one of TorchRL's templates.
        chat_template: a template of your own. Without one, or a name, the tokenizer must have one.
        chat_template_kwargs: arguments of the template, such as ``{"enable_thinking": False}``.
        return_log_probs: whether to write log-probs; ``None`` means True.
        return_routed_experts: whether to write routes (default: if the engine captures them).
        history_key, text_key, tokens_key, masks_key, log_probs_key, routed_experts_key: where to write.
        batching, min_batch_size, max_batch_size, batching_timeout: TorchRL's; refused if set: the engine batches the
            requests of all threads.
        prefer_tokens: in history mode, use the ids in ``"tokens"`` instead of encoding again: the ids of an earlier
            turn for the part that they cover, else the caller's own ``("tokens", "prompt")`` or ``"full"``, unchanged.
        timeout_seconds: per request; a late batch raises :class:`GenerationTimeout`.
        actor_index: the replica to use, instead of the balancer's choice.
        lora_request: vLLM's ``LoRARequest``, or a mapping of its fields.
        use_tqdm: whether to show a progress bar.
        replay: with ``generate=False``: whether tokens follow recorded experts: ``"R3"`` or ``"none"``. Default:
            ``"R3"`` if the engine captures routes; text and chats never follow any.
        temperature: with ``generate=False``: the temperature at which tokens are scored; default: each sample's own.

    Every key of ``docs/rollouts.md`` is written in every input mode; sequences of unequal length are a lazy stack.
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

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        input_mode: Literal["history", "text", "tokens"] = "history",
        input_key: NestedKey | None = None,
        attention_mask_key: NestedKey = "attention_mask",
        generate: bool = True,
        generate_kwargs: dict[str, Any] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        pad_output: bool = False,
        pad_model_input: bool | None = None,
        inplace: Literal["empty"] | bool | None = None,
        device: torch.device | str | None = None,
        layout: torch.layout | None = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
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
        lora_request: Any = None,
        replay: Literal["R3", "none"] | None = None,
        temperature: float | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        refuse(arguments)
        self.model = model = model_of(model)
        self.engine = engine_of(model)
        # a new version shares the engine and changes the rest
        self._arguments = {**arguments, "model": model}
        self.tokenizer = tokenizer_of(tokenizer, self.engine)
        self._set_plain(arguments)
        self.return_routed_experts = keeps_routes(return_routed_experts, self.engine)
        given = {"actor_index": actor_index, "lora_request": lora_request}
        self.engine_arguments, sampling = split_arguments(generate_kwargs, **given)
        self.scorer = scorer_of(self.engine, arguments, self.engine_arguments)
        self.sampling_params = sampling_parameters_of(sampling, num_samples, self.return_log_probs)
        self._set_samples(num_samples, inplace)
        self._set_keys(arguments)
        if input_mode == "history":
            self._source.template()  # raises if there is none

    def _set_samples(self, num_samples: int | None, inplace: Literal["empty"] | bool | None) -> None:
        """Set the number of answers per prompt, and where they are written."""
        asked = num_samples or self.sampling_params.get("n", 1)
        self.num_samples = num_samples or (asked if asked > 1 and self.generate else None)
        self.inplace = (self.num_samples is None) if inplace is None else inplace
        if self.num_samples is not None and self.inplace is not False:
            raise ValueError(f"{NO_SAMPLES}, got inplace={inplace!r}")

    def get_new_version(self, **kwargs: Any) -> vLLMWrapper:
        """Return a wrapper of the same engine with some arguments changed and all others kept.

        If ``generate`` or ``input_mode`` changes, ``input_key`` is reset to its default; if ``generate`` changes, so
        are the arguments that only the other kind of wrapper has.
        """
        return type(self)(**changed_arguments(self._arguments, kwargs))

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
        """
        if logits_only:
            raise no_logits()
        samples = flat_samples(tensordict)
        if not samples:
            raise ValueError(f"the input has no samples: its batch size is {list(tensordict.batch_size)}")
        if self.scorer is not None:
            if generate_kwargs:
                raise ValueError(f"{sorted(generate_kwargs)} are for generation, but this wrapper has generate=False")
            return self._score(self.scorer, samples, tensordict, tensordict_out)
        keys = self.keys if return_routed_experts else replace(self.keys, routed_experts=None)
        prompts = self._source.prompts(samples)
        given, sampling = engine_arguments_of(generate_kwargs)
        asked = {**self.engine_arguments, **given, **request_arguments(samples)}
        params = self._params_of_call(overridden(self.sampling_params, sampling), keys)
        check_prompts(prompts.ids, keys, params, samples)
        completions = self._generate(prompts.ids, params, keys, asked)
        answers = self._answers(samples, prompts, completions, keys, params)
        shape = (*tensordict.batch_size, *(() if self.num_samples is None else (self.num_samples,)))
        pad = self.padding_value or 0
        out = pad_answers(answers, pad, keys, shape) if self.pad_output else stack_answers(answers, shape)
        return self._write(tensordict, tensordict_out, out)

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
        keys = self.keys if return_routed_experts else replace(self.keys, routed_experts=None)
        prompts = self._source.prompts(samples)
        given, sampling = engine_arguments_of(generate_kwargs)
        params = self._params_of_call(overridden(self.sampling_params, sampling), keys)
        check_prompts(prompts.ids, keys, params, samples)
        common = {
            **self.engine_arguments,
            **given,
            "sampling_params": params,
            "timeout_seconds": self.timeout_seconds,
            "return_routed_experts": keys.routed_experts is not None,
        }
        return [
            SampleRequest(
                sample, prompts, i, keys, {**common, "prompt_token_ids": prompts.ids[i], **request_argument(sample)}
            )
            for i, sample in enumerate(samples)
        ]

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]
    def answer(self, request: SampleRequest, completion: Completion) -> TensorDictBase:
        """Return the answer to one of :meth:`requests`: the keys that :meth:`forward` writes, batch size ``[]``."""
        layout = self.engine.routing_layout
        params = request.arguments["sampling_params"]
        answer = answer_tensordict(completion, completion.outputs[0], layout, request.keys, params, request.sample)
        if self.input_mode != "tokens":
            self._add_text(answer, request.prompts, request.index, params)
        return answer

    def _generate(
        self, ids: list[list[int]], params: dict[str, Any], keys: RolloutKeys, asked: dict[str, Any]
    ) -> list[Completion]:
        completions = self.engine.generate(
            prompt_token_ids=ids,
            sampling_params=params,
            use_tqdm=self.use_tqdm,
            timeout_seconds=self.timeout_seconds,
            return_routed_experts=keys.routed_experts is not None,
            **asked,
        )
        assert isinstance(completions, list)  # a list of prompts was passed
        aborted = [completion.request_id for completion in completions if completion.aborted]
        if aborted:
            words = f"{len(aborted)} of {len(completions)} requests were aborted ({aborted[0]!r}, ...)"
            raise EngineError(words, completions)
        return completions

    def _params_of_call(self, params: dict[str, Any], keys: RolloutKeys) -> dict[str, Any]:
        if params.get("n", 1) != (self.num_samples or 1):
            raise ValueError(f"n={params['n']} differs from the wrapper's num_samples={self.num_samples}")
        if keys.log_probs is not None and params.get("logprobs") is None:
            raise ValueError("logprobs is off, but return_log_probs=True: leave logprobs out, or set it to 0")
        if keys.log_probs is not None:
            refuse_changed_values(params)
        # text is decoded here from the ids; the engine needs it only to find a stop string
        params.setdefault("detokenize", bool(params.get("stop")))
        return params

    def _answers(
        self,
        samples: Sequence[TensorDictBase],
        prompts: reading.Prompts,
        completions: Sequence[Completion],
        keys: RolloutKeys,
        params: dict[str, Any],
    ) -> list[TensorDictBase]:
        """Return the TensorDicts of all answers, prompt by prompt."""
        layout = self.engine.routing_layout
        answers = []
        for i, completion in enumerate(completions):
            for output in completion.outputs:
                answer = answer_tensordict(completion, output, layout, keys, params, samples[i])
                if self.input_mode != "tokens":
                    self._add_text(answer, prompts, i, params)
                answers.append(answer)
        return answers

    def _add_text(self, answer: TensorDictBase, prompts: reading.Prompts, i: int, params: dict[str, Any]) -> None:
        ids, skips = answer.get((self.tokens_key, "response")).tolist(), bool(params.get("skip_special_tokens"))
        response = self.tokenizer.decode(ids, skip_special_tokens=skips)
        answer.set(self.text_key, reading.text_entry(prompts.texts[i], response))
        if self.input_mode == "history":
            # the template writes the end-of-turn token after the content; it is not part of it
            if ids and ids[-1] == self.tokenizer.eos_token_id:
                response = self.tokenizer.decode(ids[:-1], skip_special_tokens=skips)
            answer.set(self.history_key, reading.history_entry(prompts.chats[i], response))
