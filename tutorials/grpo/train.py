"""GRPO on a Mixture-of-Experts model with real vLLM rollouts and Rollout Routing Replay.

By default a tiny model on a CPU: half taught to double numbers, it learns the rest. ``--config olmoe_1b_7b`` is one
GPU. ``--cfg`` prints every setting; change one as ``key=value``.
"""

from __future__ import annotations

import sys

from torchrl_moe.trainers.script import main

if __name__ == "__main__":
    sys.exit(main())
