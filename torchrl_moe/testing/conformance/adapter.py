"""The methods of an engine that is checked: ``generate``, and up to four optional ones.

Nothing here imports an engine or a model, so an adapter's file needs no more than this one.

Letters: P prompt tokens, G generated tokens, T = P + G, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

Values: TypeAlias = "NDArray[np.number] | Tensor | Sequence[float]"
"""Numbers, one for each token, or for each token, layer and column."""


class NotOffered(Exception):
    """The engine does not offer what a check needs; the message says what. Adapters may raise it anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are sampled. Names are vLLM's; the defaults leave the model's distribution as it is.

    An answer should have ``max_tokens`` tokens: if the adapter does not ignore the end-of-sequence token, answers may
    be shorter.

    >>> Sampling(max_tokens=4, top_p=0.9).changes
    {'top_p': 0.9}
    """

    max_tokens: int = 16
    n: int = 1
    """Number of answers to each prompt."""
    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Counts tokens of prompt and answer; the next two count those of the answer alone."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def changes(self) -> dict[str, float]:
        """The settings that change the model's distribution, by name."""
        given = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {
            name: value
            for name, (value, neutral) in given.items()
            if name not in {"max_tokens", "n"} and value != neutral
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, as the engine's user gets it for training.

    Shapes (arrays, tensors or lists):
        - token_ids: integers ``[G]``
        - log_probs: floats ``[G]``, of the sampled tokens; ``None`` if the engine gives none
        - routed_experts: ``[T - 1, L, K]``, or ``[T, L, K]`` with -1 in the last row: row t holds the experts that
          token t was routed to as input, -1 on layers without a router and where the experts are unknown; ``None`` if
          the engine gives none
        - versions: integers ``[G]``, version of the weights that made each token; ``None`` if the engine does not
          report any

    ``finish_reason`` is ``"stop"``, ``"length"`` or ``"abort"``. ``num_cached_tokens`` is the number of prompt tokens
    found in the prefix cache; ``None`` if the engine does not report it. ``native`` is for the adapter's own use: what
    it needs to resume the answer.
    """

    token_ids: Values
    log_probs: Values | None = None
    routed_experts: Values | None = None
    versions: Values | None = None
    finish_reason: str = "length"
    num_cached_tokens: int | None = None
    native: Any = None


@runtime_checkable
class EngineAdapter(Protocol):
    """The one method that an engine must offer. It is called from several threads at a time."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[list[Answer]]:
        """Answer prompts of token ids, and wait for the answers: ``sampling.n`` to each, in the order of the prompts.

        Args:
            prompts: one or more.
            sampling: of all of them.
            request_ids: one for each prompt, for :meth:`Aborts.abort`.

        Raises:
            NotOffered: the engine does not support this sampling.
        """


@runtime_checkable
class Aborts(Protocol):
    """An engine whose requests can be aborted."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests: ``generate`` returns the tokens so far with ``finish_reason="abort"``; ignore unknown ids."""


@runtime_checkable
class Resumes(Protocol):
    """An engine that can continue an aborted answer, or an adapter that does so as a trainer would."""

    def resume(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> Answer:
        """Return the whole answer, its first part included; ``sampling.max_tokens`` counts all of its tokens."""


@runtime_checkable
class UpdatesWeights(Protocol):
    """An engine that takes new weights."""

    def update_weights(self, model: PreTrainedModel) -> None:
        """Send a model's weights to the engine, as in training, and wait until it serves them."""


@runtime_checkable
class ReportsVersion(Protocol):
    """An engine that reports which weights it serves."""

    def weights_version(self) -> int:
        """Return the version of the weights that will serve the next request; it increases with each update."""
