"""Private names of TorchRL and transformers that wrappers need; imports neither."""

from __future__ import annotations

from typing import Any

__all__ = ["chat_template_named", "sample_by", "standard_names"]


def standard_names(generate_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``generate_kwargs`` by TorchRL's common names, checked as its own wrappers check them (0.14).

    Its public wrappers do so in their constructors only.

    Raises:
        ValueError: a number out of range, or ``do_sample=False`` with a temperature.
    """
    from torchrl.modules.llm.policies import LLMWrapperBase

    standard: dict[str, Any] = LLMWrapperBase._standardize_generate_kwargs(generate_kwargs)
    return standard


def chat_template_named(name: str) -> str:
    """Return one of TorchRL's chat templates, or one that was added with its ``add_chat_template`` (0.14).

    Its public names only render a ``History``, which has no field for all that a message may have.

    Raises:
        ValueError: there is none of this name.
    """
    from torchrl.data.llm.history import _CHAT_TEMPLATES

    if name not in _CHAT_TEMPLATES:
        raise ValueError(f"chat_template_name={name!r} must be one of TorchRL's: {', '.join(sorted(_CHAT_TEMPLATES))}")
    template: str = _CHAT_TEMPLATES[name]
    return template


def sample_by(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' own loop over tokens (5.18 to 5.24), from inside of ``generate(custom_generate=...)``.

    ``generate``, which prepares all that the loop needs, and the hook that replaces the loop are public; the loop is
    not. Only a logits processor that comes after all others sees what each step draws from, and it can be added only
    here.
    """
    return model._sample(*args, **kwargs)
