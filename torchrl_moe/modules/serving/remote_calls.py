"""Methods that code written for TorchRL's Ray actors may call as usual: ``ray.get(engine.generate.remote(...))``.

TorchRL's own ``vLLMWrapper`` calls whatever has ``generate`` and ``remote`` in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, TypeVar, cast

__all__ = ["also_remote"]

F = TypeVar("F", bound=Callable[..., Any])


class _Call:
    """A bound method, with ``.remote``."""

    def __init__(self, method: Callable[..., Any], answer: Callable[..., Any]) -> None:
        update_wrapper(self, method)
        self._method, self._answer = method, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call to completion, and return a Ray reference to the result. Ray is started if it is not running.

        For several calls at a time, pass a list of prompts, or use threads.
        """
        from torchrl_moe.modules.backends.ray.cluster import reference

        return reference(self._answer(*args, **kwargs))

    def __repr__(self) -> str:
        return repr(self._method)


class _Method:
    """A method in its class."""

    def __init__(self, function: Callable[..., Any], answer: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function, self._answer = function, answer

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return _Call(self._function.__get__(instance, owner), partial(self._answer, instance))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def also_remote(answer: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Give a method ``.remote``.

    Args:
        answer: the function that ``.remote`` calls, with the instance as first argument, if TorchRL's actors return
            something else than the method.
    """

    def decorate(function: F) -> F:
        return cast(F, _Method(function, answer or function))

    return decorate
