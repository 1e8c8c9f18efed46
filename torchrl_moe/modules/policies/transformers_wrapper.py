"""``TransformersWrapper``: a stock transformers model that scores rollouts with the recorded experts, or generates.

Name, arguments and keys are TorchRL's. Scores are computed in ``scoring_wrapper``, answers in
``transformers_generation``; prompts are read in ``prompts``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack, set_list_to_stack
from torch import nn

from torchrl_moe._compat_transformers import load_whole, one_shape_of_experts
from torchrl_moe.data import UNSET_EXPERT
from torchrl_moe.data.routing_layout import routes_dtype
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.policies.prompts import GENERATES, WrapperOptions, no_distribution
from torchrl_moe.modules.policies.rollout import (
    SAMPLING,
    answer_tensordict,
    check_prompts,
    flat_samples,
    stack_answers,
)
from torchrl_moe.modules.policies.scoring import RECORDED, row_width
from torchrl_moe.modules.policies.scoring_model import ScoringModel
from torchrl_moe.modules.policies.scoring_wrapper import ScoringWrapper
from torchrl_moe.modules.policies.transformers_generation import (
    GenerationSettings,
    generate_answers,
    leaves_ids_out,
    temperature_of,
)
from torchrl_moe.modules.replay.discovery import computing_device, has_experts, refused_parallelism
from torchrl_moe.modules.replay.router_replay import ON_BAD_ROUTES, OnBadRoutes, RouterReplay

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


OF_SCORING = ("replay", "temperature", "pad_model_input")
"""Arguments that a generating wrapper refuses, and that its scoring versions may have."""
OF_ENGINES = ("policy_versions", "policy_version", "num_segments", "resume", "finish_reason", "num_cached_tokens")
"""Entries of an engine's answers that a model's own answers do not have."""


ALLOWED: Mapping[str, tuple[object, ...]] = {
    "replay": (None, "R3", "R2", "none"),
    "on_bad_routes": ON_BAD_ROUTES,
    "inplace": (None, True, False, "empty"),
    "layout": (None, torch.strided, torch.jagged),
}
"""Values of arguments."""


def model_of(
    model: nn.Module | str | os.PathLike[str], device: torch.device | str | None = None, generate: bool = False
) -> nn.Module:
    """Return the model: as given, or loaded from a folder or by its hub name."""
    if isinstance(model, str | os.PathLike):
        from transformers import AutoModelForCausalLM

        loaded: nn.Module = load_whole(model, AutoModelForCausalLM.from_pretrained)
        return loaded if device is None else loaded.to(device)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, a folder or a hub name, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(f"{type(model).__name__} hides its model: give its module, and use fully_shard for ranks")
    reason = refused_parallelism(model)
    if reason:
        raise TypeError(f"{type(model).__name__} cannot be scored under {reason}")
    if generate and not hasattr(model, "generate"):
        raise TypeError(f"{type(model).__name__} has no generate(): give a transformers model, or pass generate=False")
    if device is not None:
        wanted, found = torch.device(device), computing_device(model)
        if wanted.type != found.type or wanted.index not in (None, found.index):
            raise ValueError(f"device={str(wanted)!r}, and the model is on {str(found)!r}: move it first")
    return model


def tokenizer_of(
    tokenizer: PreTrainedTokenizerBase | str | None, model: object, loaded: nn.Module, input_mode: str | None
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer: as given, by its name, or the model's."""
    if tokenizer is None and input_mode != "tokens":
        if not isinstance(model, str | os.PathLike) and hasattr(loaded, "get_tokenizer"):
            return loaded.get_tokenizer()  # type: ignore[operator]
        tokenizer = model if isinstance(model, str | os.PathLike) else None
    if isinstance(tokenizer, str | os.PathLike):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer)
    if tokenizer is not None or input_mode == "tokens":
        return tokenizer
    raise ValueError(f"input_mode={input_mode!r} makes tokens of text: pass tokenizer=, an object, a folder or a name")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Refuse a tokenizer with ids for which a model has no row of embeddings: a prompt with one would fail."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    # a model that is not of transformers may not say
    rows = getattr(getattr(embedding, "weight", None), "shape", [None])[0]
    if rows is None or not hasattr(tokenizer, "get_vocab"):
        return
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= rows:
        raise ValueError(
            f"the tokenizer has the token {tokenizer.convert_ids_to_tokens(last)!r} with id {last}, and the model has "
            f"rows for 0 to {rows - 1}: call model.resize_token_embeddings({last + 1}) where tokens were added, or "
            "pass the model's own tokenizer"
        )


@dataclass(frozen=True, kw_only=True)
class TransformersOptions(WrapperOptions):
    """The arguments of :class:`TransformersWrapper`, as they were given."""

    model: nn.Module | str | os.PathLike[str]
    measure_agreement: bool
    on_bad_routes: OnBadRoutes
    rerecord: bool
    router_replay: RouterReplay | None


class TransformersWrapper(ScoringWrapper):
    """Scores tokens with a transformers model, or generates with it.

    Args:
        model: a model for causal language modelling, or a folder or hub name.
        tokenizer: for chats and text; a string is loaded by name. Default: the model's, if ``model`` is a folder or
            name.
        input_mode: kind of input: ``"history"``, ``"text"`` or ``"tokens"``. Default: ``"tokens"``, whose routes are
            known; ``"history"`` with a chat template or ``generate=True``.
        input_key: where to read it; default: ``(input_mode, "prompt")``, or ``(input_mode, "full")`` to score.
        attention_mask_key: mask of tokens, if there is no ``(masks_key, "all_attention_mask")``. In a dense batch with
            neither, the tokenizer's pad tokens at both ends of a row are padding.
        generate: whether to generate; default: True for chats and text, False for tokens.
        generate_kwargs: TorchRL's common names (``max_new_tokens``, ``temperature``, ...) or fields of a
            ``GenerationConfig``. Other settings come from the model's own ``generation_config``.
        tokenizer_kwargs: for text; ``padding`` and ``return_tensors`` are ignored.
        pad_output: dense output instead of a lazy stack: answers are padded on both sides, scores on the left.
        pad_model_input: score a padded batch (``True``), or one row that holds all sequences (``False``). Default: a
            padded batch, or several sequences in a row where that means fewer pads and the model keeps them apart.
            A number: each sequence by itself, in a row of so many tokens, as an engine with ``parity="exact"`` and
            ``max_model_len`` of that number reads them: its log-probs are then equal bit by bit. From then on the model
            multiplies each token by its experts alone.
        inplace: write into the input (default), a new TensorDict (``False``), or an empty one like it (``"empty"``).
            Several answers to a prompt can only come in a new one.
        device: the device of the model; a model that is loaded is moved there.
        layout: kept for TorchRL's transforms.
        num_samples: answers per prompt; the output then has batch size ``[B, n]``. Like ``generate_kwargs`` it is not
            used with ``generate=False``.
        chat_template_name: one of TorchRL's templates. Without one the tokenizer's own comes first.
        chat_template: a template of your own. Without one, or a name, the tokenizer must have one.
        chat_template_kwargs: arguments of the template, such as ``{"enable_thinking": False}``.
        return_log_probs: whether answers have log-probs (default: True).
        history_key, text_key, tokens_key, masks_key, log_probs_key, routed_experts_key: where to read and write.
        batching, min_batch_size, max_batch_size: TorchRL's; refused if set: pass one batch. batching_timeout has no
            effect.
        prefer_tokens: as in :class:`vLLMWrapper`.
        replay: which experts to score with, see :mod:`~torchrl_moe.modules.policies.scoring_wrapper`: ``"R3"``,
            ``"R2"`` or ``"none"``. Default: R3 for tokens of a model with routers, else none.
        temperature: the sampling temperature for scores; the logits are divided by it, as the engine does for its
            log-probs. It is that of samples without ``("sampling", "temperature")`` (default: 1, with a warning, once,
            for an engine's answer); a sample that names another is a ``ValueError``.
        measure_agreement: also compute the live router's choice, for ``("routing", "agreement")``.
        on_bad_routes: what to do with a sample whose routes are wrong: ``"raise"``, or run it on the ``"live"`` router
            and count its tokens in ``("routing", "fallback")``.
        rerecord: under R2, record again in a forward under ``no_grad`` even if the batch has recorded routes.
        router_replay: the model's ``RouterReplay``; default: the existing one, or a new one.
        return_routed_experts: whether answers have the experts of each token (default: if the model has routers).

    Answers have ``("sampling", ...)`` unless they were sampled at temperature 1 from the whole vocabulary.

    Raises:
        UnsupportedRouterError: replay of a model without routers, or with one that cannot be replayed exactly.

    :meth:`reference` returns the reference policy, which uses its own routes unless ``replay=True``.

    Example::

        actor = TransformersWrapper(model, tokenizer=tokenizer)
        log_probs, entropy, _ = actor.score(td)  # [B, T], padded on the left
        loss = GRPOLoss(actor)(td)
        policy = actor.get_new_version(generate=True, input_mode="history", generate_kwargs={"temperature": 1.0})
    """

    _options: TransformersOptions

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str] | None = None,
        input_mode: Literal["history", "text", "tokens"] | None = None,
        input_key: NestedKey | None = None,
        attention_mask_key: NestedKey = "attention_mask",
        generate: bool | None = None,
        generate_kwargs: dict[str, object] | None = None,
        tokenizer_kwargs: dict[str, object] | None = None,
        pad_output: bool = False,
        pad_model_input: bool | int | None = None,
        inplace: Literal["empty"] | bool | None = None,
        device: torch.device | str | None = None,
        layout: torch.layout | None = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, object] | None = None,
        return_log_probs: bool | None = None,
        history_key: str = "history",
        text_key: str = "text",
        tokens_key: str = "tokens",
        masks_key: str = "masks",
        log_probs_key: str = "log_probs",
        batching: bool | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        batching_timeout: float = 10.0,
        prefer_tokens: bool = False,
        replay: Literal["R3", "R2", "none"] | None = None,
        temperature: float | None = None,
        measure_agreement: bool = False,
        on_bad_routes: OnBadRoutes = "raise",
        rerecord: bool = False,
        router_replay: RouterReplay | None = None,
        routed_experts_key: str = "routed_experts",
        return_routed_experts: bool | None = None,
    ) -> None:
        options = TransformersOptions(
            model=model, tokenizer=tokenizer, input_mode=input_mode, input_key=input_key,
            attention_mask_key=attention_mask_key, generate=generate, generate_kwargs=generate_kwargs,
            tokenizer_kwargs=tokenizer_kwargs, pad_output=pad_output, pad_model_input=pad_model_input, inplace=inplace,
            device=device, layout=layout, num_samples=num_samples, chat_template_name=chat_template_name,
            chat_template=chat_template, chat_template_kwargs=chat_template_kwargs, return_log_probs=return_log_probs,
            history_key=history_key, text_key=text_key, tokens_key=tokens_key, masks_key=masks_key,
            log_probs_key=log_probs_key, batching=batching, min_batch_size=min_batch_size,
            max_batch_size=max_batch_size, batching_timeout=batching_timeout, prefer_tokens=prefer_tokens,
            replay=replay, temperature=temperature, measure_agreement=measure_agreement, on_bad_routes=on_bad_routes,
            rerecord=rerecord, router_replay=router_replay, routed_experts_key=routed_experts_key,
            return_routed_experts=return_routed_experts,
        )  # fmt: skip
        super().__init__()
        # a chat template, or generate=True alone, implies chats; otherwise tokens are read, which routes belong to
        if input_mode is None:
            input_mode = "history" if chat_template or chat_template_name or generate else "tokens"
        # chats and text are used for generation, tokens for scoring
        if generate is None and input_mode == "tokens":
            for name in ("num_samples", "generate_kwargs"):
                if getattr(options, name):
                    raise ValueError(
                        f"{name} is for generation, and tokens are scored by default: pass generate=True or False"
                    )
        generate = input_mode != "tokens" if generate is None else bool(generate)
        options = replace(options, input_mode=input_mode, generate=generate)
        # bad arguments are refused before a model is loaded
        options.check("pass one batch")
        for name, values in ALLOWED.items():
            if (value := getattr(options, name)) not in values:
                raise ValueError(f"{name} must be one of {values}, got {value!r}")
        width = row_width(pad_model_input)
        if width is not None and not (isinstance(width, int) and width >= 1):
            raise ValueError(f"pad_model_input must be True, False, None or a number of tokens, got {width}")
        for name in OF_SCORING if generate else ():
            if (value := getattr(options, name)) not in (None, "none"):
                raise ValueError(
                    f"{name}={value!r} is for scoring, generate=False. Sampling is set by generate_kwargs, "
                    "prompts are padded on the left, and the model's own routes are recorded"
                )
        # one answer to a prompt has the prompt's own batch size
        self.settings = GenerationSettings.of(generate_kwargs)
        count = self.settings.samples
        if num_samples is not None and "num_return_sequences" in self.settings.named and num_samples != count:
            raise ValueError(f"num_samples={num_samples} differs from generate_kwargs['num_return_sequences']={count}")
        self.num_samples = (num_samples or (count if count > 1 else None)) if generate else None
        if self.num_samples is not None and inplace in (True, "empty"):
            raise ValueError(f"inplace must be False (or None) when generating more than one sample, got {inplace!r}")
        self.inplace = (self.num_samples is None) if inplace is None else inplace
        # the model, which a new version shares
        self.model = model_of(model, device, generate)
        self.tokenizer = tokenizer_of(tokenizer, model, self.model, input_mode)
        check_vocabulary(self.tokenizer, self.model)
        if replay is None:
            replay = "R3" if not generate and input_mode == "tokens" and has_experts(self.model) else "none"
        self.replay = replay
        # an answer's routes are recorded, those of scores are replayed: both by the one RouterReplay of a model
        self.router_replay, self.return_routed_experts = router_replay, False
        if generate and return_routed_experts is not False:
            self.return_routed_experts = has_experts(self.model)
            if return_routed_experts and not self.return_routed_experts:
                kind = type(self.model).__name__
                raise ValueError(f"return_routed_experts=True, and {kind} has no experts by its config")
        if self.router_replay is None and (self.return_routed_experts or self.replay != "none"):
            try:
                self.router_replay = RouterReplay.of(self.model)
            except UnsupportedRouterError as error:
                if not self.return_routed_experts:
                    raise
                raise UnsupportedRouterError(
                    f"{error}. To generate without routes, pass return_routed_experts=False"
                ) from error
        self.scoring_model = ScoringModel(self.model)
        if width is not None and has_experts(self.model):
            one_shape_of_experts(self.scoring_model.language_model)
        self.temperature, self.pad_model_input, self.measure_agreement = temperature, pad_model_input, measure_agreement
        self.on_bad_routes, self.rerecord = on_bad_routes, rerecord
        self.return_log_probs = not generate or return_log_probs is not False
        self.layout = torch.strided if layout is None and not pad_output else layout
        self._set_options(
            replace(options, model=self.model, tokenizer=self.tokenizer, router_replay=self.router_replay)
        )
        # the keys
        first = self.tokens_key if input_mode == "tokens" else input_mode
        self._set_keys(input_key or (first, "prompt" if generate else "full"))
        self.out_keys += ["routing"] if self.replay != "none" else []
        self.out_keys += [RECORDED] if self.replay == "R2" else []
        self.generate_kwargs = {**self.settings.named}
        if generate:
            self.generate_kwargs["num_return_sequences"] = self.num_samples or 1
            self.out_keys += [self.routed_experts_key] if self.return_routed_experts else []
            config = self.settings.config(self.model)
            self.out_keys += [SAMPLING] if temperature_of(config) != 1 or leaves_ids_out(config) else []

    @property
    def device(self) -> torch.device:
        """The device that the model computes on; its parameters may be on another."""
        return computing_device(self.model)

    def get_new_version(self, **kwargs: Any) -> TransformersWrapper:
        """Return a wrapper of the same model with some arguments changed and all others kept.

        Both share the ``RouterReplay``; another ``model`` gets its own. Arguments for scoring only are dropped for a
        version that generates, and ``input_key`` for one with another input.
        """
        # arguments that mean nothing to the new version are not passed on
        same = kwargs.get("model", self.model) is self.model
        reset = [*(OF_SCORING if kwargs.get("generate", self.generate) else ()), *([] if same else ["router_replay"])]
        new = type(self)(**self._options.changed(kwargs, reset))
        if same:
            new.scoring_model = self.scoring_model
            # a model has one RouterReplay, whichever version made it
            self._options = replace(self._options, router_replay=new.router_replay)
        return new

    def reference(
        self, model: nn.Module | str | os.PathLike[str] | None = None, *, replay: bool = False
    ) -> TransformersWrapper:
        """Return a wrapper of the reference policy, which is not trained.

        Args:
            model: a model, a folder or a hub name; default: a copy of the current model. It is frozen.
            replay: whether it follows the same experts as this wrapper (the engine's, or under R2 those that this
                wrapper has recorded) instead of choosing its own. It never records any.

        Raises:
            ValueError: ``replay`` of a wrapper that does not replay, or this wrapper's own model.
        """
        if model is self.model:
            raise ValueError("reference(model=...) freezes its model, and this one is trained: leave it out for a copy")
        if replay and self.replay == "none":
            raise ValueError("reference(replay=True) follows the routes of this wrapper, which has replay='none'")
        # a copy, for the original goes on training
        frozen = copy.deepcopy(self.model) if model is None else model_of(model)
        frozen.eval().requires_grad_(False)
        key = RECORDED if self.replay == "R2" else self.routed_experts_key
        return self.get_new_version(
            model=frozen, generate=False, replay="R3" if replay else "none", routed_experts_key=key
        )

    # -- forward ----------------------------------------------------------------------------------------------------

    @set_list_to_stack(True)  # type: ignore[untyped-decorator]
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        **generate_kwargs: Any,
    ) -> TensorDictBase:
        """Write the log-probs of every token, ``(log_probs_key, "full")``, or an answer to every prompt.

        Args:
            tensordict: of any batch size.
            tensordict_out: where to write; overrides ``inplace``.
            logits_only: of a wrapper that scores: write ``"logits"`` ``[B, T, V]`` instead, padded on the left: row t
                is the distribution of token t, as in TorchRL.
            **generate_kwargs: change the constructor's for this call.

        Raises:
            ValueError: there is nothing at ``input_key``, or it cannot be scored or continued.
            KeyError: there are no tokens to score.
            TypeError: the history is of another type, or the wrapper scores and got generation settings.
            NotImplementedError: ``logits_only``, and the wrapper generates.
        """
        if self.generate:
            if logits_only:
                raise no_distribution(GENERATES)
            samples = flat_samples(tensordict)
            if not samples:
                raise ValueError(f"the input has no samples: its batch size is {list(tensordict.batch_size)}")
            answers = self._generated(samples, self.settings.changed(generate_kwargs))
            stacked = self._stacked(answers, tensordict.batch_size, self.num_samples)
            return self._write(tensordict, tensordict_out, stacked)
        if generate_kwargs:
            raise TypeError(f"{sorted(generate_kwargs)} are for generation, but this wrapper has generate=False")
        # scoring takes one batch dimension; any other is restored afterwards
        flat = tensordict if tensordict.ndim == 1 else lazy_stack(flat_samples(tensordict))
        flat = flat.copy()
        if logits_only:
            if self.input_mode != "tokens":
                self._tokenize(flat)
            written = flat.set("logits", self._token_logits(flat, self._batch(flat))).select("logits")
        else:
            written = self._scored(flat)
        if tensordict.ndim != 1:
            written = stack_answers(written.unbind(0), tensordict.batch_size)
        return self._write(tensordict, tensordict_out, written)

    def _write(self, source: TensorDictBase, target: TensorDictBase | None, out: TensorDictBase) -> TensorDictBase:
        if target is None:
            if self.inplace is False and self.generate:
                return out
            target = source if self.inplace is True else source.empty()
        if self.generate:  # entries of other tokens are dropped
            of_tokens = (SAMPLING, "routing", RECORDED, self.routed_experts_key)
            return target.exclude(*self.out_keys, *of_tokens, inplace=True).update(out)
        for key in out.keys():  # noqa: SIM118  a TensorDict iterates over its batch
            target.set(key, out.get(key))
        return target

    # -- answers ----------------------------------------------------------------------------------------------------

    def _generated(self, samples: Sequence[TensorDictBase], settings: GenerationSettings) -> list[TensorDictBase]:
        """Return one TensorDict for each answer, batch size ``[]``, prompt by prompt, under the keys of a rollout."""
        count = self.num_samples or 1
        if settings.samples not in (1, count):
            raise ValueError(f"num_return_sequences={settings.samples} differs from num_samples={count}")
        recorder = self.router_replay if self.return_routed_experts else None
        config = settings.config(self.model)
        if config.pad_token_id is None:
            config.pad_token_id = self._pad or 0
        params = {"temperature": temperature_of(config), "logprobs": 0, "top_k": config.top_k, "top_p": config.top_p}
        prompts = self._prompts(samples)
        check_prompts(prompts.ids, self.keys, params, samples)
        completions = generate_answers(
            self.model,
            prompts.ids,
            config,
            count,
            log_probs=self.keys.log_probs is not None,
            replay=recorder,
            tokenizer=self.tokenizer,
        )
        found = []
        for i, completion in enumerate(completions):
            for output in completion.outputs:
                routes = None
                if recorder is not None:
                    assert output.routed_experts is not None  # a recorder was passed
                    fed = torch.from_numpy(output.routed_experts)
                    routes = torch.cat([fed, torch.full_like(fed[:1], UNSET_EXPERT)])  # the last token was never fed
                    routes = routes.to(routes_dtype(recorder.num_experts))
                answer = answer_tensordict(completion, output, None, self.keys, params, samples[i], routes)
                found.append(answer.exclude(*OF_ENGINES))
                self._add_text(found[-1], prompts, i, settings.skip_special_tokens)
        if all(float(one[SAMPLING, "temperature"]) == 1 and "kept" not in one[SAMPLING] for one in found):
            for one in found:
                del one[SAMPLING]  # temperature 1 over the whole vocabulary is the meaning of a missing entry
        return found
