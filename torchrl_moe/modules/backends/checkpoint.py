"""Names, dtypes and shapes of a checkpoint's tensors, read from safetensors headers without loading a weight."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.engine import Engine

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from torchrl_moe.modules.backends.replica import Replica

INDEX = "model.safetensors.index.json"
INDICES = (INDEX, "pytorch_model.bin.index.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "adapter_config.json")
"""Files that a model may be loaded from; an adapter names a base model."""
NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
"""What training leaves beside them."""
TOKENIZERS = (
    "tokenizer*", "tokenization*", "*.model", "vocab*", "merges.txt", "*.tiktoken", "tekken.json", "*.gguf",
    "adapter_config.json",
)  # fmt: skip
"""Files of which a model's tokenizer has one at least; an adapter's may be its base model's."""
NAMED_FILES = 3


def checkpoint_folder(model: str) -> str:
    """Return a model's folder: the path itself, or for a hub name the snapshot that the engine has downloaded."""
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model, local_files_only=True))


def is_written_as_path(model: str) -> bool:
    """Whether a model's name can only be that of a folder: names on the hub have one slash at most.

    >>> is_written_as_path("./moe"), is_written_as_path("a/b/c"), is_written_as_path("owner/moe")
    (True, True, False)
    """
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def check_reachable(model: str, timeout: float = 10.0) -> None:
    """Refuse a hub name at once if the hub cannot be asked: transformers would try again for half a minute."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if os.path.isdir(model) or constants.HF_HUB_OFFLINE:  # offline, transformers looks in the cache only
        return
    try:
        if try_to_load_from_cache(model, "config.json") is None:
            get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=timeout)
    except (HfHubHTTPError, HFValidationError):
        return  # what it answers, or a name that is none, transformers reports as quickly
    except Exception as error:  # an error of its HTTP library, whichever that is
        raise ValueError(
            f"there is no folder {model!r}, nothing of that name in the hub's cache, and {constants.ENDPOINT} does not "
            f"answer ({error})"
        ) from error


def check_weights(model: str | os.PathLike[str]) -> None:
    """Refuse a model's folder whose weights are not all there. Hub names, and other places, are not looked at."""
    folder = Path(model)
    if not folder.is_dir():
        return
    # what an index names must be there
    for index in [folder / name for name in INDICES if (folder / name).is_file()]:
        missing = [name for name in _indexed(index) if not (folder / name).is_file()]
        if missing:
            more = f" and {len(missing) - NAMED_FILES} more files" if len(missing) > NAMED_FILES else ""
            raise ValueError(
                f"{str(model)!r} lacks {', '.join(missing[:NAMED_FILES])}{more}, which its {index.name} names: copy "
                "them there"
            )
    # without an index, any file that may hold weights will do
    if not any(file.name not in NO_WEIGHTS for pattern in WEIGHTS for file in folder.glob(pattern)):
        raise ValueError(
            f"{str(model)!r} has no weights: no *.safetensors and no *.bin file. model.save_pretrained(path) writes "
            "them"
        )


def check_tokenizer(model: str | os.PathLike[str], other: object = None) -> None:
    """Refuse a model's folder without a tokenizer, of which transformers would make an empty one, unless another is
    named. Hub names are not looked at.
    """
    folder = Path(model)
    if other is not None or not folder.is_dir() or any(next(folder.glob(name), None) for name in TOKENIZERS):
        return
    raise ValueError(
        f"{str(model)!r} has no tokenizer: tokenizer.save_pretrained({str(model)!r}) writes it there, and an engine's "
        "tokenizer= names another folder"
    )


def _indexed(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(index)!r} cannot be read: {type(error).__name__}: {error}") from error


def checkpoint_metadata(folder: str | Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return checkpoint name -> (dtype, shape) of every tensor in a folder of ``*.safetensors`` files."""
    import torch
    from safetensors import SafetensorError, safe_open

    from torchrl_moe.store.manifest import NAMES

    metadata = {}
    for file in _files(Path(folder)):
        try:
            with safe_open(file, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in list(opened.keys())}
                found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"{str(file)!r} is not a readable safetensors file ({error}): is it a Git LFS pointer, or truncated?"
            ) from error
        for name, (dtype, shape) in found.items():
            if dtype not in NAMES:
                raise EngineError(f"tensor {name!r} in {str(file)!r} has dtype {dtype!r}; known: {', '.join(NAMES)}.")
            metadata[name] = (getattr(torch, NAMES[dtype]), torch.Size(shape))
    return metadata


def checkpoint_kinds(replica: Replica, seconds: float) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the same of the checkpoint that a replica was started from."""
    import torch

    found = replica.call(Engine.metadata, seconds)
    return {name: (dtype, torch.Size(shape)) for name, (dtype, shape) in found.items()}


def _files(folder: Path) -> list[Path]:
    """Return the files that make up the model: those of its index if it has one, as vLLM does, since a folder may hold
    the same weights in another format too."""
    if (folder / INDEX).is_file():
        return [folder / name for name in _indexed(folder / INDEX)]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"no *.safetensors in {str(folder)!r}: weight names are read from the checkpoint. "
            "Save the model with save_pretrained(), or pass the trainer's own metadata."
        )
    return files


# A tokenizer on its way from an engine process to a driver: the files that it is saved as.


def tokenizer_files(tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> dict[str, object]:
    """Return what :func:`load_tokenizer` takes."""
    if not hasattr(tokenizer, "save_pretrained"):
        kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
        raise ValueError(f"this tokenizer cannot be saved, so it cannot be sent: {kind}. Load one yourself")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        root = Path(folder)
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {"files": files, "trust_remote_code": trust_remote_code}


def load_tokenizer(saved: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer that :func:`tokenizer_files` saved."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, content in saved["files"].items():
            place = PurePosixPath(name)
            # the files come from another process: none may be written outside of the folder
            if place.is_absolute() or ".." in place.parts:
                raise ValueError(f"a tokenizer has no file {name!r}")
            path = Path(folder, place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=saved["trust_remote_code"])
