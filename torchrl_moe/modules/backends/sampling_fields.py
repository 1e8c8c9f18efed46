"""What the fields of vLLM's ``SamplingParams`` may hold: checked once, in the caller's process, without vLLM.

vLLM's own checks compare numbers and look at few types; what passes them is read again in its engine core, by type, and
an error there ends the engine for all. Fields that are not named here are left to the engine, which knows its release.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from torchrl_moe._checks import check_bool, check_number, shown

LARGEST = 2**31 - 1  # token ids and counts are int32 in engines
MOST_ANSWERS = 1 << 20
"""Answers to all prompts of one call together."""
MOST_N = 16384  # vLLM's own
VARIABLE = "VLLM_MAX_N_SEQUENCES"  # vLLM's, which raises it
BIAS = 1e4  # enforces a token; with more, float32 logits lose what distinguishes them
# what vLLM's model runner has room for; it ends at more. Its own stop tokens (the model's) count, too
MOST_BIASED, MOST_ALLOWED, MOST_STOPS = 1024, 1024, 112
OURS = "torchrl_moe"  # the key of extra_args for what a request follows

Check: TypeAlias = Callable[[str, object], None]


def _items(name: str, value: object, check: Check, most: int = LARGEST) -> None:
    """Check a list (or tuple, or array) item by item; ``None`` passes."""
    if value is None:
        return
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray | set | frozenset):
        raise ValueError(f"{name} must be a list, or None, got {shown(value)}.")
    if len(value) > most:
        raise ValueError(f"{name} must have at most {most} entries, got {len(value)}.")
    for i, item in enumerate(value):
        check(f"{name}[{i}]", item)


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be text of at least one character, got {shown(value)}.")
    check_text(name, value)


def check_text(name: str, value: str) -> None:
    """Refuse text that has no UTF-8, since no other process could get it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text that UTF-8 can encode, got {shown(value)}: {error.reason}.") from error


def _stop(name: str, value: object) -> None:
    if isinstance(value, str):
        _text(name, value)
    else:
        _items(name, value, _text)


def _bias(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping of token ids to numbers, or None, got {shown(value)}.")
    if len(value) > MOST_BIASED:
        raise ValueError(f"{name} must have at most {MOST_BIASED} entries, got {len(value)}.")
    for token, bias in value.items():
        _token(f"a key of {name}", token)
        check_number(f"{name}[{token}]", bias, -1e9, BIAS)  # -1e9 is the usual number that bans a token


def _mapping(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise ValueError(f"{name} must be a mapping with text as keys, or None, got {shown(value)}.")


def _extra(name: str, value: object) -> None:
    _mapping(name, value)
    given: Mapping[str, object] = value if isinstance(value, Mapping) else {}
    if OURS in given:
        raise ValueError(f"{name} must not have the key {OURS!r}: routed_experts= says which experts are followed.")
    _mapping(f"{name}['kv_transfer_params']", given.get("kv_transfer_params"))


def check_object(name: str, value: object) -> None:
    """Refuse what is neither an object of vLLM's nor a mapping of its fields, nor ``None``."""
    is_plain = isinstance(value, str | bytes | int | float | Sequence | np.ndarray | np.generic)
    if is_plain or (isinstance(value, Mapping) and not all(isinstance(key, str) for key in value)):
        raise ValueError(f"{name} must be vLLM's object or a mapping of its fields, or None, got {shown(value)}.")


def _whole(least: int, most: int = LARGEST, none: bool = False) -> Check:
    return partial(check_number, least=least, most=most, whole=True, none=none)


_token: Check = _whole(0)
_tokens = partial(_items, check=_token)

FIELDS: Mapping[str, Check] = {
    "n": lambda name, value: check_number(
        name, value, 1, int(os.environ.get(VARIABLE, MOST_N)), whole=True, hint=f"vLLM's {VARIABLE} sets the bound."
    ),
    "presence_penalty": partial(check_number, least=-2, most=2),
    "frequency_penalty": partial(check_number, least=-2, most=2),
    "repetition_penalty": partial(check_number, least=1e-6, most=1e6),  # beyond, float32 logits are 0 or infinite
    "temperature": partial(check_number, least=0),
    "watermarking": lambda name, value: None if value is None else check_bool(name, value),
    "top_p": partial(check_number, above=0, most=1),
    "top_k": _whole(-1),
    "min_p": partial(check_number, least=0, most=1),
    "seed": _whole(1 - 2**63, 2**63 - 1, none=True),
    "stop": _stop,
    "stop_token_ids": _tokens,
    "ignore_eos": check_bool,
    "max_tokens": _whole(1, none=True),
    "min_tokens": _whole(0),
    "logprobs": _whole(-1, none=True),
    "prompt_logprobs": _whole(-1, none=True),
    "prompt_logprob_start": _whole(0, none=True),
    "logprob_token_ids": _tokens,
    "flat_logprobs": check_bool,
    "detokenize": check_bool,
    "skip_special_tokens": check_bool,
    "spaces_between_special_tokens": check_bool,
    "include_stop_str_in_output": check_bool,
    "stream_interval": _whole(1, none=True),
    "skip_clone": check_bool,
    "output_text_buffer_length": _whole(0),
    "structured_outputs": check_object,
    "logit_bias": _bias,
    "allowed_token_ids": partial(_tokens, most=MOST_ALLOWED),
    "extra_args": _extra,
    "bad_words": partial(_items, check=_text),
    "skip_reading_prefix_cache": lambda name, value: None if value is None else check_bool(name, value),
    "thinking_token_budget": _whole(-1, none=True),
    "repetition_detection": check_object,
    "routed_experts_prompt_start": _whole(0),
    "trace_decode_token_ids": _tokens,
}


def fields_of(params: object) -> Mapping[str, Any]:
    """Return the fields of what a user passes as sampling parameters; ``None`` for none."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        for name in params:
            if not isinstance(name, str) or name.startswith("_"):
                raise ValueError(f"sampling_params names {shown(name)}: a field of vLLM's SamplingParams is meant.")
        return params
    if not hasattr(params, "max_tokens") or isinstance(params, type):
        raise ValueError(
            "sampling_params must be a mapping of vLLM's SamplingParams fields, or such an object, got "
            f"{shown(params)}."
        )
    return {name: getattr(params, name) for name in FIELDS if hasattr(params, name)}


def check_fields(params: object, longest: int | None = None) -> None:
    """Check sampling parameters, each field by type and range.

    >>> check_fields({"max_tokens": 1.5})
    Traceback (most recent call last):
    ValueError: sampling_params: max_tokens must be an integer from 1 to 2147483647, or None, got 1.5.
    """
    given = fields_of(params)
    # each field by itself
    for name, value in given.items():
        if (check := FIELDS.get(name)) is not None:
            check(f"sampling_params: {name}", value)
    # then what only several fields together show
    most, least, stops = (given.get(name) for name in ("max_tokens", "min_tokens", "stop_token_ids"))
    if most is not None and longest is not None and most > longest:
        raise ValueError(
            f"sampling_params: max_tokens={most} is more than the engine's max_model_len={longest}, which counts the "
            "prompt, too. None asks for as many as fit."
        )
    if least and stops is not None and len(stops) > MOST_STOPS:
        raise ValueError(
            f"sampling_params: stop_token_ids has {len(stops)} entries, and with min_tokens={least} there is room "
            f"for {MOST_STOPS}."
        )
    if most is not None and least is not None and least > most:
        raise ValueError(f"sampling_params: min_tokens={least} is more than max_tokens={most}.")


def check_answers(params: object, prompts: int) -> None:
    """Refuse more answers than one call may ask for, before anything is made for each of them."""
    n = fields_of(params).get("n", 1)
    if n * prompts > MOST_ANSWERS:
        raise ValueError(
            f"sampling_params: n={n} for {prompts} prompts makes {n * prompts} answers, and one call may ask for at "
            f"most {MOST_ANSWERS}. Call several times."
        )
