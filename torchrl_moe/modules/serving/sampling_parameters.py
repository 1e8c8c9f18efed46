"""A wrapper's sampling parameters, readable by attributes like vLLM's ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

__all__ = ["SamplingParameters"]


class SamplingParameters(Mapping[str, Any]):
    """Fields of vLLM's ``SamplingParams`` that were given, as a mapping that does not change.

    Attributes read as those of vLLM's object; of a field that was not given, its default there.

    >>> params = SamplingParameters({"max_tokens": 8})
    >>> params.max_tokens, params["max_tokens"], "n" in params
    (8, 8, False)
    """

    __slots__ = ("_given",)

    def __init__(self, given: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_given", dict(given))

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what pickle and copy look for, too
            raise AttributeError(name)
        if name in self._given:
            return self._given[name]
        from torchrl_moe.modules.backends.vllm.sampling import default_of

        return default_of(name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"sampling_params.{name} = {value!r} would change nothing: pass {name}= to a call, or generate_kwargs= to "
            "get_new_version"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._given,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._given!r})"
