"""Values of every kind, thrown at every setting and argument."""

from __future__ import annotations

import math
from typing import Any

VALUES: tuple[Any, ...] = (None, True, math.nan, math.inf, 1.5, "3", b"x", [], {}, 2**40, -1)
