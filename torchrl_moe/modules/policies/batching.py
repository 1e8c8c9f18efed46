"""Calls from several threads, served by one forward pass: the effect of a wrapper's ``batching`` and related arguments.

TorchRL's wrapper base holds the queue, reports on it and empties it (``get_batching_state``, ``cleanup_batching``); its
decorator is not used: it ignores ``batching_timeout``, so the last callers of a run wait forever, and a batch that
fails stays in its queue, so every later call fails too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from functools import wraps
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack

__all__ = ["batched", "set_batching"]

Forward = Callable[..., TensorDictBase]

_QUEUES = threading.Lock()
"""Held while a queue and its futures change. No wrapper's attribute, since wrappers are copied and pickled."""


class _Result(Future[TensorDictBase]):
    """The future result of a sample, with its caller's gradient mode, which PyTorch keeps per thread."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def set_batching(wrapper: Any, batching: bool | None, least: int | None, most: int | None, timeout: float) -> None:
    """Set what the decorator and TorchRL's base class read.

    Args:
        wrapper: gets the attributes.
        batching: whether to batch; ``None``: only if one of the sizes is given.
        least: number of samples that a batch waits for; default 1.
        most: greatest number of samples in a batch; default: all that wait.
        timeout: seconds after which waiting samples run even if there are fewer than ``least``.

    Raises:
        ValueError: sizes without batching, or ``least`` above ``most``.
    """
    if batching is False and (least is not None or most is not None):
        raise ValueError("min_batch_size and max_batch_size say how to batch, and batching=False: leave one out")
    if batching or most is not None:
        least = 1 if least is None else least
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_batch_size ({least}) must be <= max_batch_size ({most})")
    if any(size is not None and size < 1 for size in (least, most)):
        raise ValueError(f"batches have a sample at least, got min_batch_size={least}, max_batch_size={most}")
    wrapper._min_batch_size, wrapper._max_batch_size, wrapper._batching_timeout = least, most, timeout
    wrapper._batch_queue, wrapper._futures = [], []
    wrapper._batching_lock = None if least is None else threading.Lock()


def batched(forward: Forward) -> Forward:
    """Decorate a wrapper's ``forward(self, tensordict, **kwargs)``.

    With batching a caller's samples join those that wait. The first caller to lock the wrapper runs all waiting
    samples, once there are enough or its timeout is over; the others then find their results. Callers with and without
    gradients get separate passes. An error is raised in every caller with a sample in the failed batch, and in no
    other.

    Raises:
        ValueError: with batching, a batch of several dimensions, or arguments of one call: a batch has many callers.
        CancelledError: ``cleanup_batching`` dropped the samples.
    """

    @wraps(forward)
    def forward_batched(self: Any, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        if kwargs.pop("_batched_cleanup", False) or not self.batching:  # the first is how TorchRL's base class flushes
            return forward(self, tensordict, **kwargs)
        if kwargs:
            raise ValueError(f"{', '.join(kwargs)}: of one call, and a batch has many callers; give it to the wrapper")
        if tensordict.ndim > 1:
            raise ValueError(f"a wrapper that batches takes batch size [] or [B], got {list(tensordict.batch_size)}")
        samples = list(tensordict.unbind(0)) if tensordict.ndim else [tensordict]
        futures = [_Result() for _ in samples]
        with _QUEUES:
            self._batch_queue.extend(samples)
            self._futures.extend(futures)
        _drain(self, forward, futures, self._min_batch_size)
        _, waiting = wait(futures, self._batching_timeout)
        if waiting:
            _drain(self, forward, futures, 1)
        if not all(future.done() for future in futures):
            raise CancelledError("cleanup_batching() dropped these samples")
        results = [future.result() for future in futures]
        return lazy_stack(results) if tensordict.ndim else results[0]

    return forward_batched


def _drain(wrapper: Any, forward: Forward, own: list[_Result], least: int) -> None:
    """Run waiting samples, batch by batch, while there are at least ``least`` and some of them are the caller's."""
    with wrapper._batching_lock:
        while not all(future.done() for future in own):
            with _QUEUES:
                waiting = len(wrapper._batch_queue)
                if not waiting or waiting < least:
                    return
                count = min(waiting, wrapper._max_batch_size or waiting)
                samples, futures = wrapper._batch_queue[:count], wrapper._futures[:count]
                del wrapper._batch_queue[:count], wrapper._futures[:count]
            for mode in dict.fromkeys(future.mode for future in futures):
                alike = [pair for pair in zip(samples, futures, strict=True) if pair[1].mode == mode]
                _run(wrapper, forward, [sample for sample, _ in alike], [future for _, future in alike])


def _run(wrapper: Any, forward: Forward, samples: list[TensorDictBase], futures: list[_Result]) -> None:
    """Run one batch, whose callers have the same gradient mode, and set their results."""
    has_gradients, is_inference = futures[0].mode
    try:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
            results = forward(wrapper, lazy_stack(samples)).unbind(0)
        if len(results) != len(futures):
            raise RuntimeError(f"a batch of {len(futures)} samples came back as {len(results)}")
    except BaseException as error:
        for future in futures:
            future.set_exception(error)
        if not isinstance(error, Exception):  # an interrupt is meant for this thread, and the samples may be another's
            raise
        return
    for future, result in zip(futures, results, strict=True):
        future.set_result(result)
