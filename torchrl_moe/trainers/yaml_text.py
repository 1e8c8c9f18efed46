"""Plain data as YAML; PyYAML is an extra."""

from __future__ import annotations

from typing import Any

try:
    import yaml  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError("configurations need PyYAML: pip install 'torchrl_moe[train]'") from error

__all__ = ["yaml_text"]


def yaml_text(data: Any) -> str:
    """Return dicts, lists, texts and numbers as YAML, keys in their order.

    Raises:
        ValueError: something else is in them.

    >>> yaml_text({"steps": 2, "out": "runs"})
    'steps: 2\\nout: runs\\n'
    """
    try:
        return str(yaml.safe_dump(data, sort_keys=False))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
