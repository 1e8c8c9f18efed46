"""Translates TorchRL's ``generate_kwargs`` to vLLM's sampling parameters, as a mapping, and engine arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_moe._compat_generation import standard_names

__all__ = ["engine_arguments_of", "overridden", "sampling_params_of"]

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

    Raises:
        ValueError: a beam-search setting, ``do_sample=False`` with a temperature, or a value that TorchRL refuses: a
            negative temperature, a ``top_p`` outside 0 to 1, a ``top_k`` or a ``repetition_penalty`` that is not
            positive.

    >>> sampling_params_of({"max_new_tokens": 8, "do_sample": False})
    {'max_tokens': 8, 'temperature': 0.0}
    """
    given = dict(generate_kwargs or {})
    if given.get("temperature", 0.0) is None:
        del given["temperature"]  # TorchRL treats it as a temperature other than 0
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
