"""One run of vLLM for a request of an engine process, and what of its answers stays when a swap has cut it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_moe.modules.backends.replica import CompletionOutput
from torchrl_moe.modules.backends.vllm import continuation

__all__ = ["Part"]


@dataclass(eq=False, slots=True)
class Part:
    """One run of vLLM for a request: of all of its answers, or of one from where it was cut.

    Attributes:
        name: vLLM's request id.
        answers: how many it makes.
        lora: vLLM's request of the adapter that makes them, if one does.
        is_synced: whether that is the trainer's adapter, and not one that the request brought.
        version: of all of its tokens, once the adapter was updated for later requests; ``None`` before.
        cut: by the pause of a swap.
        answer: the one that it continues; ``None`` for all of them.
        restarted: answers to drop and to start again, since their first token may come after a swap, from an old cache.
        lost: answer -> tokens that it had when it last lost its cache.
    """

    name: str
    answers: int
    lora: Any = None
    is_synced: bool = False
    version: int | None = None
    cut: bool = False
    answer: int | None = None
    restarted: set[int] = field(default_factory=set)
    lost: dict[int, int] = field(default_factory=dict)

    def over(self, output: CompletionOutput) -> bool:
        """Whether an answer is done, or was cut for good."""
        return output.index not in self.restarted and not (self.cut and output.finish_reason == "abort")

    def keeps(self, output: CompletionOutput, params: Any) -> bool:
        """Whether what was generated of an answer is kept."""
        if self.over(output):
            return True
        return output.index not in self.restarted and len(output.token_ids) > 0 and continuation.can_continue(params)
