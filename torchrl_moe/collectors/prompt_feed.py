"""Prompts for an environment that resets its own samples; tracks which prompts have not been yielded yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.llm.transforms import DataLoadingPrimer

from torchrl_moe.collectors.environments import rows_of_primer
from torchrl_moe.collectors.prompt_stream import Prompt, PromptStream

__all__ = ["PromptFeed"]


class PromptFeed:
    """Gives each sample of an environment a prompt when it is reset, and keeps that prompt until it has been yielded.

    Args:
        primer: from now on it draws from here instead of from its dataloader.
    """

    def __init__(self, primer: DataLoadingPrimer) -> None:
        self._data = rows_of_primer(primer)
        self.stream = PromptStream(self._data)
        self._repeats = max(1, primer.repeats)
        self._stack: Callable[[Sequence[TensorDictBase]], TensorDictBase] = primer.stack_method
        self._device = primer.device
        self._copies: deque[Prompt] = deque()  # to be drawn next
        self._open: dict[int, deque[Prompt]] = {}  # by sample; the last one is running, earlier ones are done
        primer.default_value = self

    def __call__(self, reset: Tensor | None = None) -> TensorDictBase:
        """Return a prompt for each sample that is reset; see ``DataLoadingPrimer``.

        Args:
            reset: bool ``[k]`` or ``[k, 1]``; ``None``, or ``[]``: one sample without a batch dimension.
        """
        if reset is None or not reset.ndim:
            return self._draw(0)
        samples = reset.reshape(len(reset), -1).any(-1).nonzero()[:, 0].tolist()
        return self._stack([self._draw(sample) for sample in samples])

    def _draw(self, sample: int) -> TensorDictBase:
        if not self._copies:
            self._copies.extend([next(self.stream)] * self._repeats)
        prompt = self._copies.popleft()
        self._open.setdefault(sample, deque()).append(prompt)
        data = prompt.data.copy()
        return data if self._device is None else data.to(self._device)

    def restart(self) -> None:
        """Restart the data; if it can be read only once, draw all open prompts again."""
        self.give_back()
        if not isinstance(self._data, Iterator):
            self.stream = PromptStream(self._data)
            self._copies.clear()

    def finished(self, sample: int) -> Prompt:
        """Close the oldest open prompt of a sample and return it."""
        return self._open[sample].popleft()

    def forget_finished(self) -> None:
        """Keep only the prompts of running samples."""
        for prompts in self._open.values():
            while len(prompts) > 1:
                prompts.popleft()

    def give_back(self, finished: Sequence[Prompt] = ()) -> None:
        """Draw all open prompts again, before any other.

        Args:
            finished: open prompts that the caller holds.
        """
        self._copies = deque(self._unfinished(finished))
        self._open.clear()

    def _unfinished(self, finished: Sequence[Prompt]) -> list[Prompt]:
        held = [*finished, *(prompt for prompts in self._open.values() for prompt in prompts), *self._copies]
        return sorted(held, key=lambda prompt: prompt.position)

    def state_dict(self, finished: Sequence[Prompt] = ()) -> dict[str, Any]:
        """Return the position in the data and the open prompts.

        Args:
            finished: open prompts that the caller holds.
        """
        copies = [(prompt.position, prompt.data) for prompt in self._unfinished(finished)]
        return {**self.stream.state_dict(), "copies": copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another feed stopped: its open prompts come first.

        Raises:
            ValueError: the data can be read only once, and rows of it have been yielded.
        """
        if isinstance(self._data, Iterator):
            held = {prompt.position: prompt.data for prompt in self._unfinished([])}
            if list(held) != list(range(self.stream.position)):
                raise ValueError(
                    "data that can be read only once cannot go back: load the state before the first batch"
                )
            self._data = chain(held.values(), self._data)
            self.stream = PromptStream(self._data)
        self.stream.load_state_dict(state)
        self._open.clear()
        self._copies = deque(Prompt(position, data) for position, data in state["copies"])
