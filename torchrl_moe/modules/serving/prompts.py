"""What ``generate`` accepts, in one form: a list of prompts, each text, token ids, or a completion to resume.

vLLM and TorchRL users pass strings, token lists, arrays, tensors, ``TextPrompt``/``TokensPrompt`` dictionaries, and
lists of each; the rules for what counts as one prompt are here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchrl_moe._checks import shown
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.backends.sampling_fields import check_text

__all__ = ["Prompt", "PromptBatch", "normalise_prompts"]

Prompt = str | NDArray[np.int32] | Completion
FINISH_REASONS = ("abort", "length", "stop", "repetition")  # vLLM's
LARGEST_ID = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts in input order. ``single`` says that the caller passed one prompt, not a list, and gets one answer."""

    prompts: list[Prompt]
    single: bool


def normalise_prompts(prompts: Any = None, prompt_token_ids: Any = None, resume: Any = None) -> PromptBatch:
    """Bring the three ways of passing prompts to one form. A list of ints is one prompt.

    Raises:
        ValueError: none or several are given, the list is empty, a prompt is empty, or an id or, in ``resume``, a
            finish reason is none.
        TypeError: an entry is not a prompt, or in ``resume`` not a :class:`Completion`.

    >>> normalise_prompts("hi").single, normalise_prompts([1, 2]).single, normalise_prompts([[1, 2]]).single
    (True, True, False)
    """
    ways = {"prompts": prompts, "prompt_token_ids": prompt_token_ids, "resume": resume}
    given = {name: source for name, source in ways.items() if source is not None}
    if len(given) > 1:
        raise ValueError(f"cannot specify both {' and '.join(given)}: pass one of them")
    if not given:
        raise ValueError("must specify either prompts or prompt_token_ids, or resume")
    ((name, source),) = given.items()
    if resume is not None:
        return _completions(resume)
    if _is_one(source):
        return PromptBatch([_prompt(source, name)], single=True)
    if not isinstance(source, Sequence) and getattr(source, "ndim", 0) < 1:
        raise TypeError(f"{name} must be text, token ids or a list of them, got {type(source).__name__}")
    items = list(source)
    if not items:
        raise ValueError(f"{name} cannot be empty")
    return PromptBatch([_prompt(item, f"{name}[{i}]") for i, item in enumerate(items)], single=False)


def _completions(resume: Any) -> PromptBatch:
    single = isinstance(resume, Completion)
    items = [resume] if single else list(resume) if isinstance(resume, list | tuple) else None
    if items is None or not all(isinstance(item, Completion) for item in items):
        kinds = type(resume).__name__ if items is None else f"a list with {_first_other(items)}"
        raise TypeError(f"resume must be a Completion or a list of them, such as an error's .partial, got {kinds}")
    if not items:
        raise ValueError("resume cannot be empty: the error that it is from did not end a generate")
    for i, item in enumerate(items):
        if not item.outputs or (item.prompt is None and not len(item.prompt_token_ids)):
            raise ValueError(f"resume[{i}] has no {'prompt' if item.outputs else 'answer'}")
        if len(item.prompt_token_ids):
            _ids(item.prompt_token_ids, f"resume[{i}], prompt")
        for output in item.outputs:
            if len(output.token_ids):
                _ids(output.token_ids, f"resume[{i}], answer {output.index}")
            if output.finish_reason not in FINISH_REASONS:  # else it would count as complete
                raise ValueError(
                    f"resume[{i}], answer {output.index}: finish_reason must be one of {', '.join(FINISH_REASONS)}, "
                    f"got {output.finish_reason!r}"
                )
    return PromptBatch(items, single)


def _first_other(items: list[Any]) -> str:
    return next(f"{type(item).__name__} at {i}" for i, item in enumerate(items) if not isinstance(item, Completion))


def _is_one(source: Any) -> bool:
    if isinstance(source, str | Mapping):
        return True
    if hasattr(source, "ndim"):
        return bool(source.ndim == 1)
    return isinstance(source, Sequence) and len(source) > 0 and isinstance(source[0], int | np.integer)


def _prompt(item: Any, name: str) -> Prompt:
    if isinstance(item, list):  # the usual case, and the slowest to test for other types
        return _ids(item, name)
    if isinstance(item, Mapping):
        keys = [key for key in ("prompt_token_ids", "prompt") if item.get(key) is not None]
        if not keys:
            raise TypeError(f"{name} has neither 'prompt_token_ids' nor 'prompt'; its keys are {sorted(item)}")
        return _prompt(item[keys[0]], f"{name}[{keys[0]!r}]")
    if isinstance(item, str):
        if not item:
            raise ValueError(f"{name} is an empty prompt")
        if "prompt_token_ids" in name:
            raise TypeError(f"{name} must be token ids, got {shown(item)}: pass text as prompts")
        check_text(name, item)
        return item
    if not hasattr(item, "ndim") and not isinstance(item, Sequence):
        raise TypeError(f"{name} must be text or token ids, got {type(item).__name__}")
    return _ids(item, name)


def _ids(item: Any, name: str) -> NDArray[np.int32]:
    if not hasattr(item, "ndim") and not {bool, np.bool_}.isdisjoint(map(type, item)):  # numpy takes True for 1
        at, bad = next((i, one) for i, one in enumerate(item) if isinstance(one, bool | np.bool_))
        raise TypeError(f"{name} must be a flat list of integer token ids, got {bad} at {at}")
    ids = _array(item, name)
    if ids.size == 0:
        raise ValueError(f"{name} is an empty prompt")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a flat list of integer token ids, got shape {ids.shape} of {ids.dtype}")
    least, most = np.minimum.reduce(ids), np.maximum.reduce(ids)
    if least < 0:
        raise ValueError(f"{name} holds the negative token id {least}; take padding out first")
    if most > LARGEST_ID:
        raise ValueError(f"{name} holds the token id {most}; the largest possible one is {LARGEST_ID}")
    return ids.astype(np.int32)


def _array(item: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(item.cpu() if isinstance(item, torch.Tensor) else item)
    except (TypeError, ValueError) as error:  # a dtype unknown to numpy, or rows of different lengths
        raise TypeError(f"{name} must be a flat list of integer token ids: {error}") from error
