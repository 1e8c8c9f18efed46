"""The errors that torchrl_moe raises on purpose, for ``except``; ``torchrl_moe.trainers`` has its ``ConfigError``.

>>> issubclass(GenerationTimeout, TimeoutError) and issubclass(GenerationTimeout, TorchRLMoEError)
True
"""

from __future__ import annotations

from torchrl_moe._errors import *  # noqa: F403
from torchrl_moe._errors import __all__ as __all__
