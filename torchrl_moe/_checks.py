"""Checks of numbers, ranks, shapes, dtypes and routes: the only place that writes such messages; former names.

Every public function calls these on its arguments first. The structural checks read no values, so they cost nothing on
a device and are static under ``torch.compile``; :func:`check_routes` and :func:`check_engine_rows` read values. They
take arrays: tensordicts are unpacked by their owners before.

Letters: N rows (tokens of all samples), L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

import functools
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from numbers import Integral, Real
from types import EllipsisType
from typing import ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from torchrl_moe.errors import RouteShapeError, RouteValueError

Array: TypeAlias = "torch.Tensor | npt.NDArray[np.generic]"
Dim: TypeAlias = "int | str | EllipsisType"

P = ParamSpec("P")
T = TypeVar("T")

MOST_TOKENS = 1 << 24  # of a sequence: more than any model reads
LONGEST = 1e8  # seconds, three years: threads cannot wait for much longer
_SHOWN = 80  # characters of a value in a message
_UNSET = -1  # UNSET_EXPERT of torchrl_moe.data, which imports this file
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_CHUNK_ELEMENTS = 1 << 22  # check_routes looks at this many ids at a time, which bounds its temporaries
_SERVED = "Check that the RoutingLayout is that of the model being served."
_ROWS = (
    "Each of the {} tokens has a row except the last, which the engine never forwarded: check that prompt and response"
    " tokens are both counted."
)


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept arguments under their former names too, with a DeprecationWarning, until the next release.

    >>> @renamed(colour="color")
    ... def paint(color="red"):
    ...     return color
    >>> with warnings.catch_warnings(action="ignore"):
    ...     paint(colour="blue")
    'blue'
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            # by keyword only: a positional argument has no name that could have changed
            for former in names.keys() & kwargs.keys():
                name = names[former]
                warnings.warn(f"{former}= is now {name}=", DeprecationWarning, stacklevel=2)
                if name in kwargs:
                    raise TypeError(f"{name}= and {former}=, its former name: give one of them")
                kwargs[name] = kwargs.pop(former)
            return function(*args, **kwargs)

        return called

    return decorated


def _end(hint: str) -> str:
    return f" {hint}" if hint else ""


def check_number(
    name: str,
    value: object,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    whole: bool = False,
    none: bool = False,
    infinite: bool = False,
    hint: str = "",
) -> None:
    """Raise ``ValueError`` unless ``value`` is a number of Python's or numpy's, and in range. No bool is a number.

    >>> check_number("max_tokens", 1.5, 1, whole=True, none=True)
    Traceback (most recent call last):
    ValueError: max_tokens must be an integer of at least 1, or None, got 1.5.
    """
    if none and value is None:
        return
    # The range is put into words only for a value that is refused.
    if not is_number(value, least, most, above=above, whole=whole, infinite=infinite):
        kind = "an integer" if whole else "a number" if infinite else "a finite number"
        low = "" if above is None else f" above {above}"
        bounds = f" of at least {least}" if most is None else f" from {least} to {most}"
        if least is None:
            bounds = low if most is None else f"{low}{' and' * bool(low)} of at most {most}"
        raise ValueError(f"{name} must be {kind}{bounds}{', or None' * none}, got {shown(value)}.{_end(hint)}")


def is_number(
    value: object,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    whole: bool = False,
    infinite: bool = False,
) -> bool:
    """Whether a value is a number of Python's or numpy's, and in range; arguments as of :func:`check_number`."""
    # True is 1 for Python: a flag in the place of a count is a mistake
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real) or not isinstance(value, Real):
        return False
    number: float = value  # type: ignore[assignment]  # what is registered as Real compares like one
    try:
        fits = whole or (not math.isnan(number) if infinite else math.isfinite(number))
    except OverflowError:  # an integer that is larger than any float
        return False
    fits = fits and (least is None or number >= least) and (above is None or number > above)
    return fits and (most is None or number <= most) and (below is None or number < below)


def check_bool(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is True or False: other values are true or false in surprising ways."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {shown(value)}.")


def check_choice(name: str, value: object, allowed: Collection[object], *, hint: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}.{_end(hint)}")


def check_callable(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {shown(value)}.")


def check_instance(name: str, value: object, kind: type, *, none: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` is an instance of ``kind``, or ``None`` if ``none``."""
    if not (isinstance(value, kind) or (none and value is None)):
        raise ValueError(f"{name} must be of class {kind.__name__}{', or None' * none}, got {shown(value)}.")


def shown(value: object) -> str:
    """Return the beginning of a value's repr, for a message."""
    if isinstance(value, int) and value.bit_length() > _SHOWN:  # beyond some thousand digits Python refuses to write it
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_rank(name: str, array: Array, rank: int, *, error: type[Exception] = ValueError, hint: str = "") -> None:
    """Raise ``error`` unless ``array`` has ``rank`` dimensions.

    >>> check_rank("log_probs", torch.zeros(2, 3), 1)
    Traceback (most recent call last):
    ValueError: log_probs must have 1 dimension, got 2: shape [2, 3].
    """
    if array.ndim != rank:
        plural = "" if rank == 1 else "s"
        raise error(
            f"{name} must have {rank} dimension{plural}, got {array.ndim}: shape {list(array.shape)}.{_end(hint)}"
        )


def check_shape(
    name: str,
    shape: Sequence[int],
    expected: Sequence[Dim],
    *,
    error: type[Exception] = ValueError,
    hint: str = "",
) -> None:
    """Raise ``error`` unless ``shape`` fits ``expected``.

    >>> check_shape("routes", (9, 5, 2), (..., "T", 4, 2))
    Traceback (most recent call last):
    ValueError: routes must have shape [..., T, 4, 2], got [9, 5, 2].
    """
    # After a leading "..." only the last dimensions count; strings name dimensions of any size.
    tail = expected[1:] if expected and expected[0] is Ellipsis else expected
    rank_fits = len(shape) >= len(tail) if len(tail) < len(expected) else len(shape) == len(tail)
    dims = shape[len(shape) - len(tail) :]
    if not rank_fits or any(isinstance(want, int) and want != got for want, got in zip(tail, dims, strict=True)):
        wanted = ", ".join("..." if want is Ellipsis else str(want) for want in expected)
        raise error(f"{name} must have shape [{wanted}], got {list(shape)}.{_end(hint)}")


def check_same_shape(arrays: Mapping[str, Array], *, error: type[Exception] = ValueError, hint: str = "") -> None:
    """Raise ``error`` unless all ``arrays`` (name -> array) have one shape.

    >>> check_same_shape({"log_probs": torch.zeros(2, 3), "mask": torch.zeros(2, 4)})
    Traceback (most recent call last):
    ValueError: log_probs and mask must have the same shape, got log_probs [2, 3], mask [2, 4].
    """
    if len({tuple(array.shape) for array in arrays.values()}) > 1:
        *head, last = arrays
        got = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise error(f"{', '.join(head)} and {last} must have the same shape, got {got}.{_end(hint)}")


def check_integer(
    name: str, array: Array, *, signed: bool = False, error: type[Exception] = ValueError, hint: str = ""
) -> None:
    """Raise ``error`` unless ``array`` holds integers (bool does not count), and signed ones if ``signed``.

    >>> check_integer("tokens", torch.zeros(2))
    Traceback (most recent call last):
    ValueError: tokens must have an integer dtype, got torch.float32.
    """
    # bool is neither in torch's list nor of numpy's kinds i and u
    if isinstance(array, torch.Tensor):
        dtype = array.dtype
        unsigned = dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
        fits = dtype in _SIGNED or (unsigned and not signed)
    else:
        fits = array.dtype.kind in ("i" if signed else "iu")
    if not fits:
        kind = "a signed integer" if signed else "an integer"
        raise error(f"{name} must have {kind} dtype, got {array.dtype}.{_end(hint)}")


def check_floating(name: str, array: torch.Tensor, *, error: type[Exception] = ValueError, hint: str = "") -> None:
    """Raise ``error`` unless ``array`` has a floating point dtype.

    >>> check_floating("log_probs", torch.zeros(2, dtype=torch.int64))
    Traceback (most recent call last):
    ValueError: log_probs must have a floating point dtype, got torch.int64.
    """
    if not array.dtype.is_floating_point:
        raise error(f"{name} must have a floating point dtype, got {array.dtype}.{_end(hint)}")


def as_mask(name: str, mask: object, *, error: type[Exception] = ValueError) -> torch.Tensor:
    """Return a mask as bool; raise ``error`` unless it is bool, or holds 0 and 1 only.

    An additive mask (0 and minus infinity) would say the opposite, and weights are no mask. Values of a bool mask are
    not read.

    >>> as_mask("mask", torch.tensor([0.0, 0.5]))
    Traceback (most recent call last):
    ValueError: mask must be bool, or hold only 0 (left out) and 1 (counts), got 0.5.
    """
    try:
        given = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as reason:
        raise error(f"{name} must be a tensor of bool, or of 0 and 1, got {shown(mask)}.") from reason
    # reading the values of a bool mask would wait for the device
    if given.dtype is not torch.bool:
        wrong = (given != 0) & (given != 1)
        if bool(wrong.any()):
            got = given[wrong][0].item()
            raise error(f"{name} must be bool, or hold only 0 (left out) and 1 (counts), got {got}.")
    return given.bool()


def check_rows(name: str, got: int, wanted: int, *, hint: str = "") -> None:
    """Raise :class:`RouteShapeError` unless ``got`` equals ``wanted`` rows.

    >>> check_rows("sample 3 of routed_experts", 5, 6)
    Traceback (most recent call last):
    torchrl_moe.errors.RouteShapeError: sample 3 of routed_experts must have 6 rows, got 5.
    """
    if got != wanted:
        raise RouteShapeError(f"{name} must have {wanted} row{'' if wanted == 1 else 's'}, got {got}.{_end(hint)}")


def check_route_dtype(name: str, dtype: torch.dtype, wanted: torch.dtype, num_experts: int) -> None:
    """Raise :class:`RouteValueError` unless routes over ``num_experts`` have the ``wanted`` dtype."""
    if dtype != wanted:
        raise RouteValueError(
            f"{name} must have dtype {wanted} for {num_experts} experts, got {dtype}. Use RoutedExperts.from_vllm on"
            f" what an engine returned, and .to({wanted}) on the tensor of other routes."
        )


def check_engine_rows(
    rows: npt.NDArray[np.integer], shape: tuple[int, int, int], num_experts: int, dense_layers: Sequence[int] = ()
) -> None:
    """Check the rows an engine returned for one sequence, before anything is written."""
    # Every answer passes here: cheap tests first, and messages are made only after one has failed.
    num_tokens, *rest = shape
    if rows.dtype.kind not in "ui":
        check_integer("engine rows", rows, error=RouteValueError, hint="vLLM returns uint8 or uint16.")
    if rows.shape != (num_tokens - 1, *rest):
        check_shape("engine rows", rows.shape, ("rows", *rest), error=RouteShapeError, hint=_SERVED)
        check_rows("engine rows", len(rows), num_tokens - 1, hint=_ROWS.format(num_tokens))
    if not rows.size:
        return
    if rows.max() >= num_experts or (rows.dtype.kind == "i" and rows.min() < 0):
        _raise_engine_value(rows, (rows >= num_experts) | (rows < 0), f"allowed are 0..{num_experts - 1}")
    # vLLM's buffer starts as zeros, and nothing writes where there is no router
    if dense_layers and rows[:, dense_layers].any():
        bad = np.zeros(rows.shape, dtype=bool)
        bad[:, dense_layers] = rows[:, dense_layers] != 0
        _raise_engine_value(rows, bad, "the layer has no router, so 0 is allowed")


def _raise_engine_value(rows: npt.NDArray[np.integer], bad: npt.NDArray[np.bool_], allowed: str) -> None:
    token, layer, column = (int(i) for i in np.argwhere(bad)[0])
    raise RouteValueError(
        f"engine rows: token {token}, layer {layer} holds expert {rows[token, layer, column]} in "
        f"{rows[token, layer].tolist()}; {allowed}. {_SERVED}"
    )


class RowNames:
    """Names samples and rows in messages.

    >>> names = RowNames((2,), [3, 5])
    >>> names.of("routed_experts", 1), names.row(4)
    ('routed_experts of sample 1', 'sample 1, token 1')
    """

    def __init__(self, batch: Sequence[int], lengths: Sequence[int]) -> None:
        self.batch, self.lengths = batch, lengths
        self._ends = list(accumulate(lengths))

    def sample(self, i: int) -> str:
        place = tuple(int(axis) for axis in np.unravel_index(i, self.batch))
        return f"sample {place[0] if len(place) == 1 else place}"

    def of(self, name: str, i: int) -> str:
        return f"{name} of {self.sample(i)}" if self.batch else name

    def row(self, row: int) -> str:
        i = bisect_right(self._ends, row)
        token = f"token {row - self._ends[i] + self.lengths[i]}"
        return f"{self.sample(i)}, {token}" if self.batch else token


def check_routes(
    routes: torch.Tensor,
    moe_layers: Collection[int],
    num_experts: int,
    *,
    keep: torch.Tensor | None = None,
    where: Callable[[int], str] = "row {}".format,
) -> None:
    """Check the values of routes and name the first row that is wrong."""
    check_rank("routes", routes, 3, error=RouteShapeError)
    check_integer("routes", routes, signed=True, error=RouteValueError)
    # one wait for the device per chunk, and none after the first fault
    for start, bad in _bad_chunks(routes, moe_layers, num_experts, keep):
        if bool(bad.any()):
            row, layer = bad.nonzero()[0].tolist()
            row += start
            padded = keep is not None and not bool(keep[row])
            reason = _reason(routes[row, layer].tolist(), layer, moe_layers, num_experts, padded)
            raise RouteValueError(f"routed_experts: {where(row)}, layer {layer} {reason}")


def find_bad_routes(routes: torch.Tensor, moe_layers: Collection[int], num_experts: int) -> torch.Tensor:
    """Return bool ``[N]``: the rows that :func:`check_routes` would raise on."""
    chunks = [bad.any(-1) for _, bad in _bad_chunks(routes, moe_layers, num_experts, None)]
    return torch.cat(chunks) if chunks else torch.zeros(0, dtype=torch.bool, device=routes.device)


def _bad_chunks(
    routes: torch.Tensor, moe_layers: Collection[int], num_experts: int, keep: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row of each chunk, and which of its rows break a rule, bool ``[n, L]``."""
    # made on the CPU: one copy to the device instead of a write for each layer
    is_moe = torch.zeros(routes.shape[1], dtype=torch.bool)
    is_moe[list(moe_layers)] = True
    on_moe = is_moe.to(routes.device)
    # A Python int is cast to the tensor's dtype: int8 >= 128 would compare with -128.
    largest = min(num_experts - 1, torch.iinfo(routes.dtype).max)
    step = max(1, _CHUNK_ELEMENTS // max(1, routes[:1].numel()))
    for start in range(0, len(routes), step):
        allowed = on_moe if keep is None else on_moe & keep[start : start + step, None]
        # reductions over a short last dimension are slow
        columns = routes[start : start + step].movedim(-1, 0).contiguous()
        high, low = columns.amax(0), columns.amin(0)
        # K is small: comparing each pair of columns is cheaper than sorting the rows
        repeats = torch.zeros_like(high, dtype=torch.bool)
        for shift in range(1, len(columns)):
            repeats |= (columns[shift:] == columns[:-shift]).any(0)
        # out of range; partly unset, or experts where none may be; an expert twice
        bad = (high > largest) | (low < _UNSET)
        bad |= (high != _UNSET) & ((low == _UNSET) | ~allowed)
        yield start, bad | (repeats & (low != _UNSET))


def _reason(row: list[int], layer: int, moe_layers: Collection[int], num_experts: int, padded: bool) -> str:
    """What is wrong with a bad row, most telling first."""
    # a wrong layer or a pad explains all that its numbers show, so it comes first
    outside = [expert for expert in row if not _UNSET <= expert < num_experts]
    twice = [expert for i, expert in enumerate(row) if expert in row[:i]]
    if layer not in moe_layers:
        return (
            f"holds {row}, but that layer has no router; the layers with one are {sorted(moe_layers)}. Rows of other"
            " layers must be -1: check that the layer index is global, dense layers counted."
        )
    if padded:
        return f"holds {row}, but the attention mask says it is a pad. Rows of pads must be -1: check the padding side."
    if outside:
        return (
            f"holds expert {outside[0]} in {row}; allowed are 0..{num_experts - 1}, or -1 in the whole row. Check that"
            " the RoutingLayout is that of the model that made these routes."
        )
    if _UNSET in row:
        return (
            f"holds {row}, which is partly -1. A row is known as a whole or not at all: write -1 in all of its columns"
            " to let the model route it."
        )
    if not any(row):
        return (
            f"holds {row}: all zeros is what an engine returns for a row it did not capture. Check that it was started"
            " with enable_return_routed_experts=True; a row that is not known must be -1."
        )
    return (
        f"holds expert {twice[0]} twice in {row}. A router picks an expert at most once: check that columns of"
        " different layers or tokens were not mixed."
    )
