"""Names, dtypes and shapes of a checkpoint's tensors, read from safetensors headers without loading a weight."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from torchrl_moe._errors import EngineError

__all__ = ["checkpoint_metadata"]

# The names of the safetensors format.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def checkpoint_metadata(folder: str | Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return checkpoint name -> (dtype, shape) of every tensor in a folder of ``*.safetensors`` files.

    Raises:
        EngineError: the folder holds no such file.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"no *.safetensors in {str(folder)!r}: weight names are read from the checkpoint. "
            "Save the model with save_pretrained(), or pass the trainer's own metadata."
        )
    metadata = {}
    for file in files:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                metadata[name] = (DTYPES[entry["dtype"]], torch.Size(entry["shape"]))
    return metadata
