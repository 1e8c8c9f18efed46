"""How :class:`~torchrl_moe.modules.vLLMWrapper` reads its constructor's arguments, and which it refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from torchrl_moe._compat_transformers import standard_names
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.policies.prompts import WrapperOptions
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
# | key | a sample's value |
# | --- | --- |
# | ``"session_id"`` | text or a number, the same for all turns of a rollout |
# | ``"group_id"`` | text or a number, the same for answers that belong together: they come from one weight version |
# | ``"priority"`` | int; lower is earlier |
# | ``"min_version"`` | int: the oldest acceptable weight version |
# | ``"request_context"`` | a mapping, for your own balancing strategy |
#
# In a batch ``[B]`` numbers are an int tensor ``[B]`` or ``[B, 1]``; text, and anything else, is a list or a
# ``NonTensorStack`` of ``B`` entries, or one ``NonTensorData`` for all. A context may also be a TensorDict in the
# batch. A sample of a lazy stack may lack the key. Unset are ``None`` and, for all but the priority, the number -1.


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
            elif not _is_unset(value):
                values[i] = value
    return found


def request_argument(sample: TensorDictBase) -> dict[str, Any]:
    """Return the same for one sample, as arguments of ``agenerate``: ``session_id``, ``group_id`` and so on."""
    found = request_arguments([sample])
    return {key: found[name][0] for key, name in ARGUMENTS.items() if name in found}


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, int) and value == UNSET)


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


INPUT_MODES = ("history", "text", "tokens")
OF_GENERATING = ("num_samples", "return_routed_experts")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(WrapperOptions):
    """The arguments of :class:`~torchrl_moe.modules.vLLMWrapper`, as they were given."""

    model: GenerationService | str | os.PathLike[str]
    timeout_seconds: float | None
    use_tqdm: bool
    actor_index: int | None
    lora_request: LoRARequest | Mapping[str, object] | None

    def check(self) -> None:
        """Refuse invalid values, before an engine is started."""
        if not self.generate:
            self._check_scoring()
        elif given := sorted(name for name in ("replay", "temperature") if getattr(self, name) is not None):
            raise ValueError(f"{given[0]} is for scoring, generate=False; generate_kwargs set how a wrapper samples")
        if self.input_mode not in INPUT_MODES:
            raise ValueError(f"input_mode must be one of {INPUT_MODES}, got {self.input_mode!r}")
        if self.pad_model_input is not None:
            raise ValueError("pad_model_input must be None: vLLM takes prompts without padding")
        if not isinstance(self.pad_output, bool):
            raise ValueError(f"pad_output must be a boolean, got {self.pad_output!r}")
        if self.layout not in (None, torch.strided):
            raise ValueError(f"layout must be None or torch.strided, got {self.layout}")
        self.check_common("the engine batches the requests of all threads")

    def _check_scoring(self) -> None:
        if self.return_log_probs is False:
            raise ValueError("return_log_probs must be True when generate=False: log-probs are all that it computes")
        if self.replay not in (None, "R3", "none"):
            raise ValueError(f"replay must be 'R3' or 'none', got {self.replay!r}: an engine records no R2")
        if self.replay == "R3" and self.input_mode != "tokens":
            raise ValueError(
                f"replay='R3' with input_mode={self.input_mode!r}: text may be encoded to other tokens than those "
                "that were sampled and routed. input_mode='tokens' reads ('tokens', 'full') of the rollout."
            )
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        for name in OF_GENERATING:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)!r} is for generation: leave it out with generate=False")

    def replay_on(self, engine: GenerationService) -> Literal["R3", "none"] | None:
        """Return which experts a scorer follows: as passed, else the engine's, for tokens; ``None`` if it generates."""
        if self.generate:
            return None
        follows = self.input_mode == "tokens" and engine.routing_layout is not None
        return "R3" if self.replay == "R3" or (self.replay is None and follows) else "none"

    def changed(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Return the arguments of a new version."""
        before = vars(self)
        if unknown := sorted(set(changes) - set(before)):
            raise TypeError(f"get_new_version got unknown arguments {unknown}; known: {sorted(before)}")
        follow: dict[str, object] = {}
        # a key that was given for the prompts is not that of full sequences, nor is text where tokens are
        if any(changes.get(name, before[name]) != before[name] for name in ("generate", "input_mode")):
            follow["input_key"] = None
        if changes.get("generate", self.generate) != self.generate:
            follow |= dict.fromkeys((*OF_GENERATING, "replay", "temperature", "return_log_probs"))
        return {**before, **follow, **changes}


def split_arguments(
    generate_kwargs: dict[str, object] | None, **arguments: object
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the engine's arguments, including those in ``generate_kwargs``, and the remaining sampling settings."""
    given, sampling = engine_arguments_of(generate_kwargs)
    if twice := sorted(name for name in given if arguments.get(name) is not None):
        raise ValueError(f"{', '.join(twice)}: given twice, also in generate_kwargs. Leave it out of one.")
    return {**arguments, **given}, sampling


def sampling_parameters_of(
    generate_kwargs: dict[str, object], num_samples: int | None, log_probs: bool
) -> SamplingParameters:
    """Return a wrapper's sampling parameters."""
    params = sampling_params_of(generate_kwargs)
    if num_samples is not None and params.setdefault("n", num_samples) != num_samples:
        raise ValueError(f"num_samples={num_samples} differs from generate_kwargs['n']={params['n']}")
    if log_probs:
        params.setdefault("logprobs", 0)
    params.setdefault("include_stop_str_in_output", True)
    params.setdefault("skip_special_tokens", False)
    return SamplingParameters(params)


def engine_of(model: object) -> GenerationService:
    """Return the engine; for a folder or a name, start an :class:`AsyncVLLM`."""
    if isinstance(model, str | os.PathLike):
        model = AsyncVLLM.from_pretrained(model)
    if isinstance(model, GenerationService):
        return model
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    raise TypeError(
        f"model must be an AsyncVLLM, a folder or a hub name, got {name}. AsyncVLLM.from_pretrained(path, ...) takes "
        "the arguments of a vllm.LLM or of TorchRL's engine; AsyncVLLM.connect(name) reaches an engine in Ray."
    )


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


def keeps_routes(wanted: bool | None, engine: GenerationService) -> bool:
    """Whether routes are written: as passed; by default if the engine captures them."""
    captured = engine.routing_layout is not None
    if wanted and not captured:
        raise ValueError(
            "return_routed_experts=True, but the engine captures no routes: its model is dense, or it was started "
            "with enable_return_routed_experts=False"
        )
    return captured if wanted is None else wanted
