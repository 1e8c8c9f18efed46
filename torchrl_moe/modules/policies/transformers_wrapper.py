"""``TransformersWrapper``: a stock transformers model that scores rollouts with the recorded experts, or generates.

Name, arguments and keys are TorchRL's. Scores are computed in ``scoring_wrapper``, answers in
``transformers_generation``; prompts are read in ``prompt_reading``, text to be scored in ``text_scoring``.
"""

from __future__ import annotations

import copy
import os
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack, set_list_to_stack
from torch import nn

from torchrl_moe._compat_transformers import load_whole
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.policies.prompts import Source, check_templates, refuse_batching, template_options
from torchrl_moe.modules.policies.rollout import SAMPLING, RolloutKeys, flat_samples, pad_answers, stack_answers
from torchrl_moe.modules.policies.scoring import RECORDED
from torchrl_moe.modules.policies.scoring_model import ScoringModel
from torchrl_moe.modules.policies.scoring_wrapper import ScoringWrapper
from torchrl_moe.modules.policies.transformers_generation import (
    Generation,
    GenerationSettings,
    leaves_words_out,
    temperature_of,
)
from torchrl_moe.modules.replay.discovery import computing_device, has_experts, refused_parallelism
from torchrl_moe.modules.replay.router_replay import ON_BAD_ROUTES, OnBadRoutes, RouterReplay

__all__ = [
    "OF_SCORING",
    "TransformersWrapper",
    "check_vocabulary",
    "complete",
    "model_of",
    "pad_of",
    "recorder_of",
    "refuse",
    "replay_of",
    "tokenizer_of",
]


# How :class:`~torchrl_moe.modules.TransformersWrapper` reads its constructor's arguments, and which it refuses.


INPUT_MODES = ("history", "text", "tokens")
REPLAYS = (None, "R3", "R2", "none")
LAYOUTS = (None, torch.strided, torch.jagged)
OF_SCORING = ("replay", "temperature", "pad_model_input")
"""Arguments that a generating wrapper refuses, and that its scoring versions may have."""


def complete(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults of ``input_mode`` and ``generate`` filled in.

    A chat template, or ``generate=True`` alone, implies chats. Otherwise tokens are read, which a rollout's routes
    belong to. Chats and text are used for generation, tokens for scoring.
    """
    mode = arguments["input_mode"]
    if mode is None:
        chats = ("chat_template", "chat_template_name", "generate")
        mode = "history" if any(arguments[name] for name in chats) else "tokens"
    if arguments["generate"] is None and mode == "tokens":
        for name in ("num_samples", "generate_kwargs"):
            if arguments[name]:
                raise ValueError(
                    f"{name} is for generation, and tokens are scored by default: pass generate=True or False"
                )
    generate = mode != "tokens" if arguments["generate"] is None else bool(arguments["generate"])
    return {**arguments, "input_mode": mode, "generate": generate}


def refuse(arguments: dict[str, Any]) -> None:
    """Refuse invalid values, before a model is loaded."""
    check_templates(arguments)
    refuse_batching(arguments, "pass one batch")
    allowed = {
        "input_mode": INPUT_MODES,
        "replay": REPLAYS,
        "on_bad_routes": ON_BAD_ROUTES,
        "inplace": (None, True, False, "empty"),
        "pad_output": (True, False),
        "layout": LAYOUTS,
    }
    for name, values in allowed.items():
        if arguments[name] not in values:
            raise ValueError(f"{name} must be one of {values}, got {arguments[name]!r}")
    if arguments["num_samples"] is not None and arguments["num_samples"] < 1:
        raise ValueError(f"num_samples must be at least 1, got {arguments['num_samples']}")
    if arguments["generate"]:
        _refuse_to_generate(arguments)
    else:
        _refuse_to_score(arguments)


def _refuse_to_generate(arguments: dict[str, Any]) -> None:
    for name in OF_SCORING:
        if arguments[name] not in (None, "none"):
            raise ValueError(
                f"{name}={arguments[name]!r} is for scoring, generate=False. Sampling is set by generate_kwargs, "
                "prompts are padded on the left, and the model's own routes are recorded"
            )


def _refuse_to_score(arguments: dict[str, Any]) -> None:
    if arguments["return_log_probs"] is False:
        raise ValueError("return_log_probs must be True (or None) with generate=False: there is nothing else to write")
    if arguments["input_mode"] != "tokens" and arguments["replay"] not in (None, "none"):
        raise ValueError(
            f"replay={arguments['replay']!r} with input_mode={arguments['input_mode']!r}: encoding text again may give "
            "other tokens than those that were generated and routed. Use input_mode='tokens', which reads "
            "('tokens', 'full') of the rollout, or replay='none'"
        )
    if arguments["temperature"] is not None and not arguments["temperature"] > 0:
        raise ValueError(f"temperature must be positive, got {arguments['temperature']}")


def model_of(model: Any, device: Any = None, generate: bool = False) -> nn.Module:
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


def tokenizer_of(tokenizer: Any, model: Any, loaded: Any, input_mode: str) -> Any:
    """Return the tokenizer: as given, by its name, or the model's."""
    if isinstance(tokenizer, str | os.PathLike):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer)
    if tokenizer is not None or input_mode == "tokens":
        return tokenizer
    if isinstance(model, str | os.PathLike):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)
    if hasattr(loaded, "get_tokenizer"):
        return loaded.get_tokenizer()
    raise ValueError(f"input_mode={input_mode!r} makes tokens of text: pass tokenizer=, an object, a folder or a name")


def check_vocabulary(tokenizer: Any, model: Any) -> None:
    """Refuse a tokenizer with ids for which a model has no row of embeddings: a prompt with one would fail."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
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


def pad_of(tokenizer: Any) -> int | None:
    """Return the id of a tokenizer's padding token; the end-of-sequence id, if it has none."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return getattr(tokenizer, "eos_token_id", None) if pad is None else pad


def replay_of(arguments: dict[str, Any], model: nn.Module) -> str:
    """Return which experts a scorer follows: as passed, else the engine's, if it reads tokens of a model with routers.

    Whether a model has routers is read from its config.
    """
    if arguments["replay"] is not None:
        return str(arguments["replay"])
    follows = not arguments["generate"] and arguments["input_mode"] == "tokens" and has_experts(model)
    return "R3" if follows else "none"


def recorder_of(arguments: dict[str, Any], model: nn.Module) -> RouterReplay | None:
    """Return the ``RouterReplay`` that records the experts of an answer; ``None`` if no routes are written."""
    wanted = arguments["return_routed_experts"]
    if not arguments["generate"] or wanted is False:
        return None
    if not has_experts(model):
        if wanted:
            raise ValueError(f"return_routed_experts=True, and {type(model).__name__} has no experts by its config")
        return None
    try:
        return arguments["router_replay"] or RouterReplay.of(model)
    except UnsupportedRouterError as error:
        raise UnsupportedRouterError(
            f"{error}. To generate without routes, pass return_routed_experts=False"
        ) from error


AS_THEY_ARE = ("temperature", "pad_model_input", "measure_agreement", "on_bad_routes", "rerecord", "pad_output")
KEYS = ("history_key", "text_key", "tokens_key", "masks_key", "log_probs_key", "routed_experts_key")


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
        inplace: write into the input (default), a new TensorDict (``False``), or an empty one like it (``"empty"``).
        device: the device of the model; a model that is loaded is moved there.
        layout: kept for TorchRL's transforms.
        num_samples: answers per prompt; the output then has batch size ``[B, n]``.
        chat_template_name: one of TorchRL's templates. Without one the tokenizer's own comes first.
        chat_template: a template of your own. Without one, or a name, the tokenizer must have one.
        chat_template_kwargs: arguments of the template, such as ``{"enable_thinking": False}``.
        return_log_probs: whether answers have log-probs (default: True).
        history_key, text_key, tokens_key, masks_key, log_probs_key, routed_experts_key: where to read and write.
        batching, min_batch_size, max_batch_size, batching_timeout: TorchRL's; refused if set: pass one batch.
        prefer_tokens: as in :class:`vLLMWrapper`.
        replay: which experts to score with, see :mod:`~torchrl_moe.modules.policies.scoring_wrapper`: ``"R3"``,
            ``"R2"`` or ``"none"``. Default: R3 for tokens of a model with routers, else none.
        temperature: the sampling temperature for scores; the logits are divided by it, as the engine does for its
            log-probs. Default: each sample's ``("sampling", "temperature")``, or 1 without that entry; if an engine's
            answer lacks it, a warning is shown once.
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

    history_key: str

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        input_mode: Literal["history", "text", "tokens"] | None = None,
        input_key: NestedKey | None = None,
        attention_mask_key: NestedKey = "attention_mask",
        generate: bool | None = None,
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
        arguments = complete({name: value for name, value in locals().items() if name not in ("self", "__class__")})
        super().__init__()
        refuse(arguments)
        self.settings = GenerationSettings.of(generate_kwargs)
        self.input_mode, self.generate = arguments["input_mode"], arguments["generate"]
        self._set_samples(num_samples, inplace)
        self._set_model(arguments)
        self._set_keys()

    def _set_model(self, arguments: dict[str, Any]) -> None:
        """Set the model and how it runs; keep the arguments for a new version, which shares the model."""
        given = arguments["model"]
        self.model = model_of(given, arguments["device"], self.generate)
        self.tokenizer = tokenizer_of(arguments["tokenizer"], given, self.model, self.input_mode)
        check_vocabulary(self.tokenizer, self.model)
        self.replay = replay_of(arguments, self.model)
        recorder = recorder_of(arguments, self.model)
        self.return_routed_experts = recorder is not None
        self.router_replay = recorder or arguments["router_replay"]
        if self.replay != "none" and self.router_replay is None:
            self.router_replay = RouterReplay.of(self.model)
        self.scoring_model = ScoringModel(self.model)
        for name in AS_THEY_ARE:
            setattr(self, name, arguments[name])
        self.return_log_probs = not self.generate or arguments["return_log_probs"] is not False
        layout = arguments["layout"]
        self.layout = torch.strided if layout is None and not self.pad_output else layout
        shared = {"model": self.model, "tokenizer": self.tokenizer, "router_replay": self.router_replay}
        self._arguments = {**arguments, **shared}

    def _set_samples(self, num_samples: int | None, inplace: Literal["empty"] | bool | None) -> None:
        """Set the number of answers per prompt, and where they are written."""
        said = self.settings.samples
        if num_samples is not None and "num_return_sequences" in self.settings.named and num_samples != said:
            raise ValueError(f"num_samples={num_samples} differs from generate_kwargs['num_return_sequences']={said}")
        self.num_samples = (num_samples or (said if said > 1 else None)) if self.generate else None
        if self.num_samples is not None and inplace in (True, "empty"):
            raise ValueError(f"inplace must be False (or None) when generating more than one sample, got {inplace!r}")
        self.inplace = (self.num_samples is None) if inplace is None else inplace

    def _set_keys(self) -> None:
        """Set all keys, and which entries are read and written."""
        given = self._arguments
        for name in (*KEYS, "attention_mask_key", "prefer_tokens"):
            setattr(self, name, given[name])
        self.return_history, self.return_text = self.input_mode == "history", self.input_mode != "tokens"
        self.return_tokens = self.return_masks = True
        first = self.tokens_key if self.input_mode == "tokens" else self.input_mode
        self.input_key = given["input_key"] or (first, "prompt" if self.generate else "full")
        self.in_keys = [self.input_key, *([(self.routed_experts_key, "full")] if self.replay == "R3" else [])]
        self.out_keys = [self.text_key] if self.return_text else []
        self.out_keys += [self.masks_key, self.tokens_key]
        self.out_keys += [self.log_probs_key] if self.return_log_probs else []
        self.out_keys += [self.history_key] if self.return_history else []
        self.out_keys += ["routing"] if self.replay != "none" else []
        self.out_keys += [RECORDED] if self.replay == "R2" else []
        self.generate_kwargs = {**self.settings.named}
        if self.generate:
            self.generate_kwargs["num_return_sequences"] = self.num_samples or 1
            self.out_keys += [self.routed_experts_key] if self.return_routed_experts else []
            config = self.settings.config(self.model)
            self.out_keys += [SAMPLING] if temperature_of(config) != 1 or leaves_words_out(config) else []
        names = (
            "chat_template",
            "chat_template_name",
            "attention_mask_key",
            "prefer_tokens",
            "tokens_key",
            "masks_key",
        )
        self.source = Source(
            input_mode=self.input_mode,
            input_key=self.input_key,
            tokenizer=self.tokenizer,
            tokenizer_kwargs=dict(given["tokenizer_kwargs"] or {}),
            pad=pad_of(self.tokenizer),
            chat_template_kwargs=template_options(given["chat_template_kwargs"]),
            **{name: given[name] for name in names},
        )
        if self.input_mode == "history":
            self.source.template()  # raises if there is none

    @property
    def device(self) -> torch.device:
        """The device that the model computes on; its parameters may be on another."""
        return computing_device(self.model)

    def get_new_version(self, **kwargs: Any) -> TransformersWrapper:
        """Return a wrapper of the same model with some arguments changed and all others kept.

        Both share the ``RouterReplay``; another ``model`` gets its own. Arguments for scoring only are dropped for a
        version that generates, and ``input_key`` for one with another input.
        """
        unknown = sorted(set(kwargs) - set(self._arguments))
        if unknown:
            raise TypeError(f"get_new_version got unknown arguments {unknown}; known: {sorted(self._arguments)}")
        kept = dict(self._arguments)
        if kwargs.get("generate", self.generate):
            kept.update(dict.fromkeys(OF_SCORING))
        if any(kwargs.get(name, kept[name]) != kept[name] for name in ("generate", "input_mode")):
            kept["input_key"] = None
        same = kwargs.get("model", self.model) is self.model
        new = type(self)(**{**kept, **({} if same else {"router_replay": None}), **kwargs})
        if same:
            new.scoring_model = self.scoring_model
            self._arguments["router_replay"] = new.router_replay  # a model has one, whichever version made it
        return new

    def reference(self, model: Any = None, *, replay: bool = False) -> TransformersWrapper:
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
            logits_only: score, and write ``"logits"`` ``[B, T, V]`` instead, padded on the left: row t is the
                distribution of token t, as in TorchRL.
            **generate_kwargs: change the constructor's for this call.

        Raises:
            ValueError: there is nothing at ``input_key``, or it cannot be scored or continued.
            KeyError: there are no tokens to score.
            TypeError: the history is of another type, or the wrapper scores and got generation settings.
        """
        if self.generate:
            return self._write(tensordict, tensordict_out, self._generated(tensordict, generate_kwargs))
        if generate_kwargs:
            raise TypeError(f"{sorted(generate_kwargs)} are for generation, but this wrapper has generate=False")
        flat = tensordict if tensordict.ndim == 1 else lazy_stack(flat_samples(tensordict))
        written = self._logits(flat.copy()) if logits_only else self._scored(flat.copy())
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

    def _generated(self, tensordict: TensorDictBase, generate_kwargs: dict[str, Any]) -> TensorDictBase:
        samples = flat_samples(tensordict)
        if not samples:
            raise ValueError(f"the input has no samples: its batch size is {list(tensordict.batch_size)}")
        keys = RolloutKeys(
            tokens=self.tokens_key,
            masks=self.masks_key,
            log_probs=self.log_probs_key if self.return_log_probs else None,
            routed_experts=self.routed_experts_key if self.return_routed_experts else None,
        )
        generation = Generation(
            model=self.model,
            source=self.source,
            settings=self.settings.changed(generate_kwargs),
            answers=self.num_samples or 1,
            keys=keys,
            text_key=self.text_key if self.return_text else None,
            history_key=self.history_key if self.return_history else None,
            recorder=self.router_replay if self.return_routed_experts else None,
        )
        answers = generation.run(samples)
        shape = (*tensordict.batch_size, *(() if self.num_samples is None else (self.num_samples,)))
        return pad_answers(answers, generation.pad, keys, shape) if self.pad_output else stack_answers(answers, shape)
