"""What a batch says about its requests besides their prompts: keys at its root, one value per sample, read if present.

| key | a sample's value |
| --- | --- |
| ``"session_id"`` | text or a number, the same for all turns of a rollout |
| ``"group_id"`` | text or a number, the same for answers that belong together: they come from one weight version |
| ``"priority"`` | int; lower is earlier |
| ``"min_version"`` | int: the oldest acceptable weight version |
| ``"request_context"`` | a mapping, for your own balancing strategy |

In a batch ``[B]`` numbers are an int tensor ``[B]`` or ``[B, 1]``; text, and anything else, is a list or a
``NonTensorStack`` of ``B`` entries, or one ``NonTensorData`` for all. A context may also be a TensorDict in the batch.
A sample of a lazy stack may lack the key. Unset are ``None`` and, for all but the priority, the number -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

__all__ = ["request_argument", "request_arguments"]

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
    """Return arguments of the engine's ``generate``, one entry per sample, for each key that any sample has.

    Raises:
        ValueError: a sample has several values at one key.
    """
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


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value == UNSET)


def _plain(value: Any, key: str, sample: int) -> Any:
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
