"""GRPO on a Mixture-of-Experts model with real vLLM rollouts and Rollout Routing Replay.

By default a tiny model on a CPU: half taught to double numbers, it learns the rest. ``--cfg`` prints every setting;
change one as ``key=value``. ``--config`` names another configuration.
"""

from __future__ import annotations

import sys

from torchrl_moe.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
