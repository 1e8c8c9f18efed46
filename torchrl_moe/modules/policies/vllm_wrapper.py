"""``vLLMWrapper``: prompts in a TensorDict become answers in a TensorDict, with the experts of every token.

TorchRL's name, arguments and keys, over our own engine; it generates, or it scores. The work is elsewhere: prompts
are read in ``prompts``, what else a batch says of its requests in ``request_keys``, sampling parameters mapped in
``generate_kwargs``, answers laid out in ``rollout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack, set_list_to_stack
from torchrl.modules.llm.policies import LLMWrapperBase

from torchrl_moe._errors import EngineError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies import prompts as reading
from torchrl_moe.modules.policies.generate_kwargs import engine_arguments_of, overridden, sampling_params_of
from torchrl_moe.modules.policies.request_keys import request_argument, request_arguments
from torchrl_moe.modules.policies.rollout import (
    RolloutKeys,
    answer_tensordict,
    check_prompts,
    flat_samples,
    pad_answers,
    stack_answers,
)
from torchrl_moe.modules.policies.sample_request import SampleRequest
from torchrl_moe.modules.policies.sampling_entry import SAMPLING, refuse_changed_values
from torchrl_moe.modules.policies.wrapper_arguments import (
    engine_of,
    keeps_routes,
    refuse,
    scorer_of,
    set_no_batching,
    split_arguments,
    tokenizer_of,
)

__all__ = ["vLLMWrapper"]

NO_SAMPLES = "inplace must be False (or None) when generating more than one sample"


class vLLMWrapper(LLMWrapperBase):
    """Generates with an :class:`AsyncVLLM`.

    Args:
        model: an engine, or a folder or hub name from which one is started.
        tokenizer: default: the engine's own; a string is loaded by name.
        input_mode: what to read: ``"history"``, ``"text"`` or ``"tokens"``.
        input_key: where to read it; default ``(input_mode, "prompt")``, with ``generate=False`` ``("tokens", "full")``.
        attention_mask_key: of padded token prompts, if there is one.
        generate: false: write log-probs of the tokens in ``input_key`` by the engine's weights of now, and generate
            nothing; how to sample is then not looked at.
        generate_kwargs: TorchRL's common names (``max_new_tokens``, ``temperature``, ...) or vLLM's own; also
            ``actor_index``, ``lora_request`` and the engine's ``on_resume``.
        tokenizer_kwargs: for text prompts; padding and tensors are not asked for, whatever they say.
        pad_output: dense output, prompts padded left and responses right, instead of a lazy stack.
        pad_model_input: must be ``None``; vLLM takes no padding.
        inplace: write into the input (default), a new TensorDict (``False``), or an empty one like it (``"empty"``).
        device: where the output goes.
        layout: accepted for TorchRL's sake; only ``torch.strided`` is written.
        num_samples: answers per prompt; the output then has batch size ``[B, n]``.
        chat_template_name: one of TorchRL's templates.
        chat_template: a template of your own.
        return_log_probs: whether to write log-probs (default yes).
        return_routed_experts: whether to write routes (default: if the engine captures them).
        history_key, text_key, tokens_key, masks_key, log_probs_key, routed_experts_key: where to write.
        batching, min_batch_size, max_batch_size, batching_timeout: accepted if they ask for nothing: the engine
            batches the requests of all threads as they come.
        prefer_tokens: in history mode, take the ids in ``"tokens"`` instead of encoding again: those of an earlier
            turn as far as they go, else the caller's own ``("tokens", "prompt")``, or ``"full"``, as they are.
        timeout_seconds: per request; a late batch raises :class:`GenerationTimeout`.
        actor_index: the replica to use, instead of the balancer's choice.
        lora_request: vLLM's ``LoRARequest``, or a mapping of its fields.
        use_tqdm: whether to show a progress bar.
        replay: with ``generate=False``: whether tokens follow recorded experts, ``"R3"`` (default) or ``"none"``.
        temperature: with ``generate=False``: at which tokens are scored; default: what each sample says.

    Every key of the README's table is written in every input mode; ``B`` unequal sequences are a lazy stack.

    A batch may say more of its requests than their prompts, for admission and balancing: ``"session_id"``,
    ``"group_id"``, ``"priority"``, ``"min_version"`` and ``"request_context"`` at its root, one value per sample, are
    read if present. Numbers are an int tensor ``[B]`` or ``[B, 1]``, anything else a list or a ``NonTensorStack``;
    ``None``, or -1 where the value is no priority, is as if the key were not there. The ``n`` answers of a sample share
    its values.

    Example::

        policy = vLLMWrapper(engine, input_mode="text", generate_kwargs={"max_new_tokens": 64, "temperature": 0.7})
        td = policy(TensorDict(text=Text(prompt=["1+1="]), batch_size=[1]))
        td[0]["routed_experts", "full"]  # [T, L, K]
    """

    history_key: str
    routed_experts_key: str

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
        return_log_probs: bool = True,
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
        self.model = model = engine_of(model)
        # a new version shares the engine and changes the rest
        self._arguments = {**arguments, "model": model}
        self.tokenizer = tokenizer_of(tokenizer, model)
        self.input_mode, self.generate, self.prefer_tokens = input_mode, generate, prefer_tokens
        self.attention_mask_key, self.tokenizer_kwargs = attention_mask_key, dict(tokenizer_kwargs or {})
        self.chat_template, self.chat_template_name = chat_template, chat_template_name
        self.pad_output, self.layout, self.return_log_probs = pad_output, layout, return_log_probs
        self._device = None if device is None else torch.device(device)
        self.timeout_seconds, self.use_tqdm = timeout_seconds, use_tqdm
        self.return_routed_experts = keeps_routes(return_routed_experts, model)
        given = {"actor_index": actor_index, "lora_request": lora_request}
        self.engine_arguments, sampling = split_arguments(generate_kwargs, **given)
        self.scorer = scorer_of(model, arguments, self.engine_arguments)
        self.sampling_params = self._sampling_params(sampling, num_samples)
        self._set_samples(num_samples, inplace)
        self._set_keys()
        set_no_batching(self)

    def _set_samples(self, num_samples: int | None, inplace: Literal["empty"] | bool | None) -> None:
        """Set how many answers a prompt gets, and where they go."""
        self.num_samples = num_samples or (self.sampling_params["n"] if self.sampling_params.get("n", 1) > 1 else None)
        self.inplace = (self.num_samples is None) if inplace is None else inplace
        if self.num_samples is not None and self.inplace is not False:
            raise ValueError(f"{NO_SAMPLES}, got inplace={inplace!r}")

    def _set_keys(self) -> None:
        """Set every key, and what is read and written."""
        for name in ("history_key", "text_key", "tokens_key", "masks_key", "log_probs_key", "routed_experts_key"):
            setattr(self, name, self._arguments[name])
        self.keys = RolloutKeys(
            tokens=self.tokens_key,
            masks=self.masks_key,
            log_probs=self.log_probs_key if self.return_log_probs else None,
            routed_experts=self.routed_experts_key if self.return_routed_experts else None,
        )
        self.input_key = self._arguments["input_key"] or (self.input_mode, "prompt")
        self.in_keys = [self.input_key]
        self.out_keys = [self.text_key] if self.input_mode != "tokens" else []
        self.out_keys += [self.masks_key, self.tokens_key]
        self.out_keys += [key for key in (self.keys.log_probs, self.keys.routed_experts) if key is not None]
        self.out_keys += [self.history_key] if self.input_mode == "history" else []
        self.out_keys += ["policy_versions", "policy_version", "num_segments", "resume"]
        self.out_keys += ["finish_reason", "num_cached_tokens", SAMPLING]
        if self.scorer is not None:
            self.input_key, self.in_keys = self.scorer.tokens_key, self.scorer.in_keys
            self.out_keys = [self.log_probs_key]

    def _sampling_params(self, generate_kwargs: dict[str, Any] | None, num_samples: int | None) -> dict[str, Any]:
        params = sampling_params_of(generate_kwargs)
        if num_samples is not None and params.setdefault("n", num_samples) != num_samples:
            raise ValueError(f"num_samples={num_samples} differs from generate_kwargs['n']={params['n']}")
        if self.return_log_probs:
            params.setdefault("logprobs", 0)
        params.setdefault("include_stop_str_in_output", True)
        params.setdefault("skip_special_tokens", False)
        return params

    @property
    def device(self) -> torch.device | None:
        """Where the output goes; ``None`` leaves it on the CPU."""
        return self._device

    def get_new_version(self, **kwargs: Any) -> vLLMWrapper:
        """Return a wrapper of the same engine with some arguments changed and all others kept."""
        unknown = sorted(set(kwargs) - set(self._arguments))
        if unknown:
            raise TypeError(f"get_new_version got unknown arguments {unknown}; known: {sorted(self._arguments)}")
        return type(self)(**{**self._arguments, **kwargs})

    # -- forward ----------------------------------------------------------------------------------------------------

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        return_routed_experts: bool = True,
        **generate_kwargs: Any,
    ) -> TensorDictBase:
        """Generate for every sample of ``tensordict``, of any batch size.

        Args:
            tensordict: holds the prompts at ``input_key``.
            tensordict_out: where to write, instead of what ``inplace`` says.
            return_routed_experts: false leaves the routes of this call out; evaluation does not need them.
            **generate_kwargs: change the constructor's for this call, the engine's arguments among them too.

        Raises:
            KeyError: there is no prompt at ``input_key``.
            ValueError: the batch or a prompt is empty, an argument makes no sense, or a prompt goes on from a turn of
                another temperature.
            TypeError: what the batch says of a request is of a wrong type.
            EngineError: a request failed, or was aborted: a cut answer is never passed on as a whole one.
        """
        samples = flat_samples(tensordict)
        if not samples:
            raise ValueError(f"the input has no samples: its batch size is {list(tensordict.batch_size)}")
        if self.scorer is not None:
            scored = self.scorer.answers(samples, self.log_probs_key, generate_kwargs)
            return self._write(tensordict, tensordict_out, stack_answers(scored, tensordict.batch_size))
        keys = self.keys if return_routed_experts else replace(self.keys, routed_experts=None)
        prompts = self._read(samples)
        given, sampling = engine_arguments_of(generate_kwargs)
        asked = {**self.engine_arguments, **given, **request_arguments(samples)}
        params = self._params_of_call(overridden(self.sampling_params, sampling), keys)
        check_prompts(prompts.ids, keys, params, samples)
        completions = self._generate(prompts.ids, params, keys, asked)
        answers = self._answers(samples, prompts, completions, keys, params)
        shape = (*tensordict.batch_size, *(() if self.num_samples is None else (self.num_samples,)))
        pad = self._pad_token_id() or 0
        out = pad_answers(answers, pad, keys, shape) if self.pad_output else stack_answers(answers, shape)
        return self._write(tensordict, tensordict_out, out if self._device is None else out.to(self._device))

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]
    def requests(
        self, tensordict: TensorDictBase, *, return_routed_experts: bool = True, **generate_kwargs: Any
    ) -> list[SampleRequest]:
        """Return what :meth:`forward` would ask the engine for, sample by sample, for a caller that asks itself.

        Arguments and errors are those of :meth:`forward`; ``num_samples`` must be ``None``.

        Example::

            (request,) = policy.requests(td)
            answer = policy.answer(request, await engine.agenerate(**request.arguments))
        """
        if self.num_samples is not None:
            raise ValueError(f"requests() asks for one answer per sample, but num_samples={self.num_samples}")
        samples = flat_samples(tensordict)
        keys = self.keys if return_routed_experts else replace(self.keys, routed_experts=None)
        prompts = self._read(samples)
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
        """Return what came of one of :meth:`requests`: the keys that :meth:`forward` writes, batch size ``[]``."""
        layout = self.model.routing_layout
        params = request.arguments["sampling_params"]
        answer = answer_tensordict(completion, completion.outputs[0], layout, request.keys, params, request.sample)
        if self.input_mode != "tokens":
            self._add_text(answer, request.prompts, request.index)
        return answer

    def _pad_token_id(self) -> int | None:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return getattr(self.tokenizer, "eos_token_id", None) if pad is None else pad

    def _read(self, samples: Sequence[TensorDictBase]) -> reading.Prompts:
        for i, sample in enumerate(samples):
            if sample.get(self.input_key, None) is None:
                raise KeyError(
                    f"no {self.input_key!r} in sample {i} of the input, whose keys are "
                    f"{sorted(map(str, sample.keys(True)))}; input_mode={self.input_mode!r} reads it there"
                )
        stack = lazy_stack(list(samples))
        pad = self._pad_token_id()
        if self.input_mode == "tokens":
            return reading.prompts_from_tokens(stack, self.input_key, self.attention_mask_key, pad)
        if self.input_mode == "text":
            return reading.prompts_from_text(stack.get(self.input_key), self.tokenizer, self.tokenizer_kwargs)
        known = None
        if self.prefer_tokens:
            mask_key = (self.masks_key, "all_attention_mask")
            known = [reading.known_ids(one, self.tokens_key, one.get(mask_key, None), pad) for one in samples]
        template = self.chat_template
        if template is None and self.chat_template_name is None:
            # else TorchRL guesses one from words in the path that the tokenizer was loaded from
            template = getattr(self.tokenizer, "chat_template", None)
        history = stack.get(self.input_key)
        return reading.prompts_from_history(history, self.tokenizer, template, self.chat_template_name, known)

    def _generate(
        self, ids: list[list[int]], params: dict[str, Any], keys: RolloutKeys, asked: dict[str, Any]
    ) -> list[Completion]:
        completions = self.model.generate(
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
        layout = self.model.routing_layout
        answers = []
        for i, completion in enumerate(completions):
            for output in completion.outputs:
                answer = answer_tensordict(completion, output, layout, keys, params, samples[i])
                if self.input_mode != "tokens":
                    self._add_text(answer, prompts, i)
                answers.append(answer)
        return answers

    def _add_text(self, answer: TensorDictBase, prompts: reading.Prompts, i: int) -> None:
        ids = answer.get((self.tokens_key, "response")).tolist()
        response = self.tokenizer.decode(ids, skip_special_tokens=False)
        answer.set(self.text_key, reading.text_entry(prompts.texts[i], response))
        if self.input_mode == "history":
            # the template writes the end-of-turn token after the content: it is no part of it
            if ids and ids[-1] == self.tokenizer.eos_token_id:
                response = self.tokenizer.decode(ids[:-1], skip_special_tokens=False)
            answer.set(self.history_key, reading.history_entry(prompts.histories[i], response))

    def _write(self, source: TensorDictBase, target: TensorDictBase | None, out: TensorDictBase) -> TensorDictBase:
        if target is None:
            if self.inplace is False:
                return out
            target = source.empty() if self.inplace == "empty" else source
        target = target.exclude(*self.out_keys, inplace=True)
        return target.update(out)
