"""``python -m torchrl_moe.cli``: the same as ``torchrl-moe``."""

import sys

from torchrl_moe.cli.main import main

sys.exit(main())
