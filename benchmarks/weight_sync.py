"""Weight sync: moving bytes, the transports, the pause, and what a sync costs under load; everything in one run.

``python -m benchmarks.weight_sync [store] [patches] [gloo] [pause] [check] [load]`` runs some parts only.
"""

from __future__ import annotations

import os
import sys

from benchmarks.generation import SETTINGS

if __name__ == "__main__":  # before torch or vllm are imported: they read it, and so do their processes
    os.environ.update(SETTINGS)

import torch

from benchmarks.report import finish
from benchmarks.syncing import gloo, load, pause, store, weight_check

PARTS = {
    "store": (store.against_copies, store.by_tensor_count, store.torn_reads, store.manifests),
    "patches": (store.patches, store.changed_by_a_step),
    "gloo": (gloo.against_bare,),
    "pause": (pause.pauses,),
    "check": (weight_check.behind_a_queue,),
    "load": (load.under_load,),
}


def main(names: list[str]) -> None:
    """Run the parts."""
    torch.set_num_threads(1)
    rows = [row for name in names or PARTS for part in PARTS[name] for row in part()]
    finish("weight_sync" if not names else f"weight_sync-{'-'.join(names)}", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
