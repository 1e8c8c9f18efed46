"""The one place where a router's choice is replaced: its own ``topk`` over the experts.

Inside a router's forward, ``topk`` returns the recorded experts, with values gathered from the scores that the router
ranks:

.. code-block:: text

    hidden -> logits -> scores -> bias ... -> topk(scores, K) -> normalise, scale -> weights
                          |                    |        |
              live, with gradient        values: from   indices: the recorded
                                         live scores    experts (a constant)

All code except this ``topk`` (scoring, bias, normalisation, scaling, dtype) is the family's own. So replaying the
router's own choice is bit-equal by construction, and gradients reach the router's weights through the live scores (R3,
arXiv 2510.11370: the selection is a constant, the weights are not). A TorchFunctionMode does it, active only while the
router's forward runs, so that no other ``topk`` of the model is touched and no code of a family is copied here.

Letters: N rows of a batch, E experts, K experts per row, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["OwnChoice", "TopK", "TopKInterception", "TopKObserver"]

TopK = torch.return_types.topk
OwnChoice: TypeAlias = Callable[[Tensor | None], TopK]
"""Runs the intercepted call without a graph: on some rows of the scores, int64 ``[M]``, or on all for ``None``."""
TOPK_FUNCTIONS = (torch.topk, Tensor.topk)


def _ranked(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, int] | None:
    """Return input and k of a ``topk`` along the last dimension; ``None`` for any other call."""
    if func not in TOPK_FUNCTIONS:
        return None
    x: Tensor = args[0] if args else kwargs["input"]
    k: int = args[1] if len(args) > 1 else kwargs["k"]
    dim: int = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return (x, k) if dim in (-1, x.ndim - 1) else None


def _order(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return ``largest`` and ``sorted`` of a ``topk``; experts are summed in the order in which they are chosen."""
    given = dict(zip(("largest", "sorted"), args[3:], strict=False)) | dict(kwargs)
    return given.get("largest", True), given.get("sorted", True)


class TopKObserver(TorchFunctionMode):
    """Reports every ``topk`` along the last dimension (input, indices) to a function, and changes nothing."""

    def __init__(self, tell: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        ranked = _ranked(func, args, kwargs)
        if ranked is not None:
            self._tell(ranked[0], result.indices)
        return result


class TopKInterception(TorchFunctionMode):
    """Answers one router's ``topk`` over its experts, and opens the groups of replayed experts.

    Args:
        num_experts: E, the width of the scores.
        top_k: K.
        rank: dimensions of the scores. A router of one group of experts first ranks ``[N, 1, E]`` to score that group.
        choose: from scores ``[N, E]`` and the original call to the experts ``[N, K]`` to use.
        groups: from scores ``[N, G]``, the original call and its k to the groups ``[N, *]`` of the experts to use, or
            ``None`` if the router's own groups hold. Group-limited routers zero the scores outside the groups they
            chose (DeepSeek-V2).
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        rank: int,
        choose: Callable[[Tensor, OwnChoice], Tensor],
        groups: Callable[[Tensor, OwnChoice, int], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._top_k = top_k
        self._rank = rank
        self._choose = choose
        self._groups = groups

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        ranked = _ranked(func, args, kwargs)
        if ranked is None:
            return func(*args, **kwargs)
        x, k = ranked
        width = x.shape[-1]

        def own(rows: Tensor | None = None) -> TopK:
            # only its indices are used: a graph here would differ between a checkpointed layer's two runs
            with torch.no_grad():
                if rows is None:
                    return func(*args, **kwargs)
                return x.reshape(-1, width)[rows].topk(k, -1, *_order(args, kwargs))

        if (width, k, x.ndim) == (self._num_experts, self._top_k, self._rank):
            self._groups = None  # groups are chosen before experts: a later topk is something else
            chosen = self._choose(x.reshape(-1, width), own).view(*x.shape[:-1], k)
        elif self._groups is not None and x.ndim == 2 and width < self._num_experts and not self._num_experts % width:
            chosen = self._groups(x, own, k)
        else:
            return func(*args, **kwargs)
        return TopK((x.gather(-1, chosen), chosen))
