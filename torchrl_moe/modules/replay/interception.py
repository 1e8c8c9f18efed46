"""The only place where a router's choice is replaced: its own ``topk`` over the experts.

Inside a router's forward, ``topk`` returns the recorded experts, with values gathered from the scores that the router
ranks:

.. code-block:: text

    hidden -> logits -> scores -> bias ... -> topk(scores, K) -> normalise, scale -> weights
                          |                    |        |
              live, with gradient        values: from   indices: the recorded
                                         live scores    experts (a constant)

All code except this ``topk`` (scoring, bias, normalisation, scaling, dtype) is the model's own. So replaying the
router's own choice is bit-equal by construction, and gradients reach the router's weights through the live scores (R3,
arXiv 2510.11370: the selection is a constant, the weights are not). A TorchFunctionMode does it, active only while the
router's forward runs, so that no other ``topk`` of the model is affected, and no model code is copied here.

Letters: N rows of a batch, E experts, K experts per row, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

TopK = torch.return_types.topk
OwnChoice: TypeAlias = Callable[[Tensor | None], TopK]
"""Runs the intercepted call without a graph: on some rows of the scores, int64 ``[M]``, or on all for ``None``."""
TOPK_FUNCTIONS = (torch.topk, Tensor.topk)


def _ranked(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, int] | None:
    """Return input and k of a ``topk`` along the last dimension; ``None`` for any other call."""
    if func not in TOPK_FUNCTIONS:
        return None
    x: Tensor = args[0] if args else kwargs["input"]
    k: int = args[1] if len(args) > 1 else kwargs["k"]
    dim: int = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return (x, k) if dim in (-1, x.ndim - 1) else None


class TopKObserver(TorchFunctionMode):
    """Reports every ``topk`` along the last dimension (input, indices) to a function, and changes nothing."""

    def __init__(self, report: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        ranked = _ranked(func, args, kwargs)
        if ranked is not None:
            self._report(ranked[0], result.indices)
        return result


class TopKInterception(TorchFunctionMode):
    """Answers one router's ``topk`` over its experts, and opens the groups of replayed experts."""

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

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
                # experts are summed in the order in which they are chosen
                order = {"largest": True, "sorted": True} | dict(zip(("largest", "sorted"), args[3:], strict=False))
                order |= {name: kwargs[name] for name in order if name in kwargs}
                return x.reshape(-1, width)[rows].topk(k, -1, **order)

        if (width, k, x.ndim) == (self._num_experts, self._top_k, self._rank):
            self._groups = None  # groups are chosen before experts: a later topk is something else
            chosen = self._choose(x.reshape(-1, width), own).view(*x.shape[:-1], k)
        elif self._groups is not None and x.ndim == 2 and width < self._num_experts and not self._num_experts % width:
            chosen = self._groups(x, own, k)
        else:
            return func(*args, **kwargs)
        return TopK((x.gather(-1, chosen), chosen))


# How a router scores its experts, as far as one forward pass shows it: the functions between its logits and topk.
#
# It is for display only: replay does not depend on it. What is not done by torch functions (for example in a custom
# autograd function) is not visible, and is called "own code".
#
# Letters: N rows of a batch, E experts, K experts per row.


OWN_CODE = "own code"
LOGITS, BIAS, CHOSEN, NORMALISED = "logits", "bias", "chosen", "normalised"
LINEAR = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum"}
SCORES = {"softmax", "log_softmax", "sigmoid", "log_sigmoid", "softplus", "sqrt", "tanh", "relu", "exp"}
ADDITION, DIVISION = "add", "div"  # also of the operators, in place or not
LOOKUPS = {"gather", "take_along_dim", "getitem", "index_select"}

Steps = tuple[str, ...]


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


class ScoreTracer(TorchFunctionMode):
    """Records, for every tensor derived from scores over experts, the steps that made it; changes nothing."""

    def __init__(self, widths: Collection[int], running: Sequence[str]) -> None:
        super().__init__()
        self._widths = widths
        self._running = running
        self._chosen_widths = set(widths)
        self._steps = WeakTensorKeyDictionary()
        self.weights: dict[str, Steps] = {}
        """By module, the steps of the last tensor over chosen experts that it made itself."""

    def steps(self, x: Tensor) -> Steps:
        """Return what made ``x`` since the last matrix product; empty if there was none."""
        return self._steps.get(x, ())

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = list(_tensors([*args, *kwargs.values()]))
        outputs = list(_tensors(result))
        name = getattr(func, "__name__", "").strip("_")
        steps = self._derive(name, inputs, outputs[0]) if inputs and outputs else ()
        if not steps:
            return result
        for output in outputs:
            self._steps[output] = steps
        first = outputs[0]
        if name == "topk":
            self._chosen_widths.add(first.shape[-1])
        if CHOSEN in steps and first.is_floating_point() and first.ndim and first.shape[-1] in self._chosen_widths:
            self.weights[self._running[-1] if self._running else ""] = steps
        return result

    def _derive(self, name: str, inputs: list[Tensor], output: Tensor) -> Steps:
        """Return the steps of one call's result: those of its longest input, possibly with one more."""
        if name in LINEAR:
            return (LOGITS,)
        known = [self.steps(x) for x in inputs]
        if name in LOOKUPS:
            by_choice = any(CHOSEN in s for s in known[1:])
            return (*known[0], CHOSEN) if known[0] and by_choice else known[0]
        kind = output.is_floating_point()
        longest = max(
            (s for s, x in zip(known, inputs, strict=True) if x.is_floating_point() == kind), key=len, default=()
        )
        if not longest:
            return ()
        if name == "topk":
            return (*longest, CHOSEN)
        if name in SCORES:
            return (*longest, name)
        if name == ADDITION and any(not s and x.numel() in self._widths for s, x in zip(known, inputs, strict=True)):
            return (*longest, BIAS)
        if name == DIVISION and sum(CHOSEN in s for s in known) == 2 and longest[-1] != NORMALISED:
            return (*longest, NORMALISED)
        return longest


def describe_scoring(ranked: Steps, weights: Steps = ()) -> str:
    """Describe steps as text.

    >>> describe_scoring(("logits", "sigmoid", "bias"), ("logits", "sigmoid", "chosen", "normalised"))
    'sigmoid + bias, normalised'
    >>> describe_scoring(("logits",), ("logits", "chosen", "softmax"))
    'logits, softmax of the chosen'
    >>> describe_scoring(("logits", "softplus", "sqrt"))
    'sqrt(softplus)'
    >>> describe_scoring(())
    'own code'
    """
    if not ranked:
        return OWN_CODE
    text = _nested(ranked) or LOGITS
    if BIAS in ranked:
        text += " + bias"
    after = weights[weights.index(CHOSEN) + 1 :] if CHOSEN in weights else ()
    if _nested(after):
        text += f", {_nested(after)} of the chosen"
    if NORMALISED in after:
        text += ", normalised"
    return text


def _nested(steps: Steps) -> str:
    text = ""
    for step in steps:
        if step in SCORES:
            text = f"{step}({text})" if text else step
    return text
