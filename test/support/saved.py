"""The ways in which data are copied, saved and sent, each as a function of the data and a folder."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


def through_memmap(data: Any, path: Path) -> Any:
    data.memmap(path)
    return type(data).load_memmap(path)


SAVED: list[Callable[[Any, Path], Any]] = [
    lambda data, path: pickle.loads(pickle.dumps(data)),
    lambda data, path: data.clone(),
    lambda data, path: data.to("cpu"),
    through_memmap,
]
