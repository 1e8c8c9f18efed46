"""What a call keeps of each of its requests, and the bar that shows how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from tqdm.auto import tqdm

from torchrl_moe._errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, Request
from torchrl_moe.modules.serving.lease import Lease

__all__ = ["Errand", "Progress"]


@dataclass(slots=True, eq=False)
class Errand:
    """One request of a call, and where it is."""

    position: int
    request: Request
    admitted: bool = False  # holds a place that no engine's answer gives back
    lease: Lease | None = None
    future: Future[Completion] | None = None
    refusal: EngineError | None = None  # why no replica took it, the last time
    death: ReplicaDiedError | None = None  # of the replica that had it last
    deaths: int = 0
    cut: bool = False  # by the user
    outcome: Completion | None = None

    @property
    def index(self) -> int:
        """The replica that has it."""
        assert self.lease is not None
        return self.lease.index

    def died(self, error: ReplicaDiedError) -> int:
        """Note that a replica died under it; return how many have."""
        self.death, self.refusal = error, None
        self.deaths += 1
        return self.deaths

    def given_up(self, partial: Sequence[Completion | None]) -> ReplicaDiedError:
        """Return what to raise once too many have; ``partial`` is what else came of its call."""
        return ReplicaDiedError(
            f"request {self.position} ({self.request.request_id!r}) was given up: {self.deaths} replicas died under "
            f"it. The last one: {self.death}",
            partial,
        )

    def cut_short(self) -> Completion:
        """Return the answer to a request that was aborted before an engine had anything of it."""
        request = self.request
        ids = np.empty(0, np.int64) if request.prompt_token_ids is None else request.prompt_token_ids.astype(np.int64)
        nothing: Any = np.empty(0, np.int64)
        outputs = [
            CompletionOutput(
                index=index,
                token_ids=nothing,
                text="",
                finish_reason="abort",
                policy_versions=nothing.astype(np.int32),
                logprobs=None if self._param("logprobs") is None else nothing.astype(np.float32),
            )
            for index in range(self._param("n") or 1)
        ]
        return Completion(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=ids,
            num_cached_tokens=0,
            outputs=outputs,
        )

    def _param(self, name: str) -> Any:
        params = self.request.sampling_params
        return params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)


class Progress:
    """A bar with tokens per second.

    Args:
        total: requests.
        shown: whether it is seen at all.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="generate", unit="req", disable=not shown)
        self._shown = shown
        self._tokens = 0
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, completions: Iterable[Completion]) -> None:
        """Count finished requests."""
        if not self._shown:
            return
        for completion in completions:
            self._tokens += sum(len(output.token_ids) for output in completion.outputs)
            seconds = max(time.monotonic() - self._started, 1e-9)
            self._bar.set_postfix_str(f"{self._tokens / seconds:.0f} tok/s", refresh=False)
            self._bar.update()
