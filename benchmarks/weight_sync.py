"""Weight sync: moving bytes, the pause, the transports, and what a sync costs under load; everything in one run.

``python -m benchmarks.weight_sync [store] [pause] [gloo] [load]`` runs some parts only.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before torch is imported, which reads it
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.report import finish
from benchmarks.syncing import store

PARTS = {
    "store": (store.against_copies, store.by_tensor_count, store.torn_reads),
}


def main(names: list[str]) -> None:
    """Run the parts."""
    torch.set_num_threads(1)
    rows = [row for name in names or PARTS for part in PARTS[name] for row in part()]
    finish("weight_sync" if not names else f"weight_sync-{'-'.join(names)}", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
