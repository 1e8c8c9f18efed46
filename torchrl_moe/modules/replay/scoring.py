"""How a router scores its experts, as far as one forward pass shows it: the functions between its logits and topk.

It is for display only: replay does not depend on it. What is not done by torch functions (for example in a custom
autograd function) is not visible, and is called "own code".

Letters: N rows of a batch, E experts, K experts per row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["OWN_CODE", "ScoreTracer", "describe_scoring"]

OWN_CODE = "own code"
LOGITS, BIAS, CHOSEN, NORMALISED = "logits", "bias", "chosen", "normalised"
LINEAR = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum"}
SCORES = {"softmax", "log_softmax", "sigmoid", "log_sigmoid", "softplus", "sqrt", "tanh", "relu", "exp"}
ADDITION, DIVISION = "add", "div"  # also of the operators, in place or not
LOOKUPS = {"gather", "take_along_dim", "getitem", "index_select"}

Steps = tuple[str, ...]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


class ScoreTracer(TorchFunctionMode):
    """Records, for every tensor derived from scores over experts, the steps that made it; changes nothing.

    Args:
        widths: numbers of experts.
        running: names of the running modules, innermost last.
    """

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = list(_tensors([*args, *kwargs.values()]))
        outputs = list(_tensors(result))
        if inputs and outputs:
            self._note(getattr(func, "__name__", "").strip("_"), inputs, outputs)
        return result

    def _note(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        first = outputs[0]
        steps = self._derive(name, inputs, first)
        if not steps:
            return
        for output in outputs:
            self._steps[output] = steps
        if name == "topk":
            self._chosen_widths.add(first.shape[-1])
        if CHOSEN in steps and first.is_floating_point() and first.ndim and first.shape[-1] in self._chosen_widths:
            self.weights[self._running[-1] if self._running else ""] = steps

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
    """Describe steps in words.

    Args:
        ranked: what made the scores that topk ranks.
        weights: what made the weights of the experts it chose.

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
