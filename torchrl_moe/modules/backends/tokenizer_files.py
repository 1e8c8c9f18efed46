"""A tokenizer on its way from an engine process to a driver: the files that it is saved as."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["load_tokenizer", "tokenizer_files"]


def tokenizer_files(tokenizer: Any, trust_remote_code: bool) -> dict[str, Any]:
    """Return what :func:`load_tokenizer` takes.

    Args:
        tokenizer: of transformers.
        trust_remote_code: whether the model's own code may run when it is loaded.

    Raises:
        ValueError: it cannot be saved, as one of vLLM's own, for example.
    """
    if not hasattr(tokenizer, "save_pretrained"):
        kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
        raise ValueError(f"this tokenizer cannot be saved, so it cannot be sent: {kind}. Load one yourself")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        root = Path(folder)
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {"files": files, "trust_remote_code": trust_remote_code}


def load_tokenizer(saved: Mapping[str, Any]) -> Any:
    """Return the tokenizer that :func:`tokenizer_files` saved.

    Raises:
        ValueError: a file would lie outside of the folder that they are read from.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, content in saved["files"].items():
            place = PurePosixPath(name)
            if place.is_absolute() or ".." in place.parts:
                raise ValueError(f"a tokenizer has no file {name!r}")
            path = Path(folder, place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=saved["trust_remote_code"])
