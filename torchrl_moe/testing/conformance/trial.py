"""One run of the checks over one engine: its requests, and the weights that the engine has.

Answers that several checks use are generated once. A check that changes the weights restores them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, TypeVar

from torchrl_moe.data import RoutingLayout
from torchrl_moe.testing.conformance.adapter import (
    EngineAdapter,
    NotOffered,
    ReportsVersion,
    Sampling,
    UpdatesWeights,
)
from torchrl_moe.testing.conformance.background import in_thread, result
from torchrl_moe.testing.conformance.findings import DoesNotHold
from torchrl_moe.testing.conformance.judge import Judge
from torchrl_moe.testing.conformance.reference import Reference
from torchrl_moe.testing.conformance.sampled import Sampled
from torchrl_moe.testing.conformance.settings import Settings

__all__ = ["Trial"]

Made = TypeVar("Made")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class Trial:
    """The checks' access to an engine.

    Args:
        adapter: of the engine.
        reference: over the model that the engine serves; ``None``: checks that need it are not offered.
        layout: of the model's routers, if there is no reference; ``None`` for a model without routers.
        settings: of the requests, and tolerances.

    Attributes:
        judge: judges with the model's own weights.
        serving: reference with the weights that the engine has now.
    """

    def __init__(
        self, adapter: EngineAdapter, reference: Reference | None, layout: RoutingLayout | None, settings: Settings
    ) -> None:
        self.adapter = adapter
        self.settings = settings
        known = layout if reference is None or reference.layout is None else reference.layout
        self.judge = Judge(settings, known, reference)
        self._reference = reference
        self.serving = reference
        self._altered: Reference | None = None
        self._made: dict[Any, Future[Any]] = {}

    # -- asking -----------------------------------------------------------------------------------------------------

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Return a prompt of random ids, none of them special."""
        special: set[int | None] = set()
        vocabulary = self.settings.vocabulary
        if self._reference is not None:
            config = self._reference.model.config
            vocabulary = min(vocabulary, int(config.vocab_size))
            for value in (getattr(config, name, None) for name in SPECIAL):
                special.update(value if isinstance(value, list) else [value])
        words = [word for word in range(vocabulary) if word not in special]
        return random.Random(f"{self.settings.seed} {seed} {length}").choices(words, k=length)

    def ask(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, request_ids: Sequence[str] | None = None
    ) -> list[Sampled]:
        """Return all answers to prompts, in order.

        Raises:
            DoesNotHold: not ``sampling.n`` answers to each prompt, none within ``patience``, or an answer without
                tokens that no abort explains.
        """
        asked = in_thread(lambda: self.adapter.generate(prompts, sampling, request_ids))
        groups = result(asked, self.settings.patience)
        if [len(group) for group in groups] != [sampling.n] * len(prompts):
            raise DoesNotHold(
                f"generate gave {[len(group) for group in groups]} answers to {len(prompts)} prompts, wanted "
                f"{sampling.n} to each"
            )
        found = [
            Sampled(tuple(prompt), sampling, answer)
            for prompt, group in zip(prompts, groups, strict=True)
            for answer in group
        ]
        empty = sum(not sampled.tokens for sampled in found)
        if empty and request_ids is None:
            raise DoesNotHold(f"{empty} of {len(found)} answers have no token")
        return found

    @cached_property
    def plain(self) -> list[Sampled]:
        """Answers sampled from the model's own distribution, to prompts of several lengths."""
        prompts = [self.prompt(length) for length in self.settings.prompts]
        return self.ask(prompts, Sampling(max_tokens=self.settings.answer))

    @cached_property
    def repeated(self) -> tuple[Sampled, Sampled]:
        """Answers to one long prompt, sent twice in a row: the second time it is cached, if the engine caches."""
        prompt, sampling = self.prompt(self.settings.long_prompt, seed=1), Sampling(max_tokens=self.settings.answer)
        (first,), (second,) = self.ask([prompt], sampling), self.ask([prompt], sampling)
        return first, second

    def once(self, make: Callable[[Trial], Made]) -> Made:
        """Return the cached result of a function of this trial; it is called once, and its error is raised again."""
        if make not in self._made:
            made: Future[Made] = Future()
            try:
                made.set_result(make(self))
            except (DoesNotHold, NotOffered) as error:
                made.set_exception(error)
            self._made[make] = made
        return self._made[make].result()

    # -- weights ----------------------------------------------------------------------------------------------------

    @property
    def judge_now(self) -> Judge:
        """A judge with the weights that the engine has now."""
        return self.judge if self.serving is None else self.judge.by(self.serving)

    def check_updates(self) -> UpdatesWeights:
        """Return the adapter, if it takes weights.

        Raises:
            NotOffered: it does not.
        """
        if not isinstance(self.adapter, UpdatesWeights):
            raise NotOffered("the adapter has no update_weights(model)")
        return self.adapter

    def switch_weights(self) -> Reference:
        """Send other weights to the engine, alternately altered ones and the model's own; return those it has then.

        :attr:`judge` still uses the model's own.

        Raises:
            NotOffered: the engine takes none, or there is no model.
        """
        engine, own = self.check_updates(), self.judge.reference
        if self._altered is None:
            self._altered = own.altered(self.settings.seed + 1)
        target = self._altered if self.serving is own else own
        engine.update_weights(target.model)
        self.serving = target
        return target

    def restore_weights(self) -> None:
        """Restore the model's own weights, if the engine has others."""
        if self.serving is not self._reference:
            self.switch_weights()

    def version(self) -> int | None:
        """Return the version of the engine's weights, if it reports one."""
        return self.adapter.weights_version() if isinstance(self.adapter, ReportsVersion) else None

    def close(self) -> None:
        """Restore engine and model."""
        try:
            self.restore_weights()
        finally:
            if self._reference is not None:
                self._reference.close()
