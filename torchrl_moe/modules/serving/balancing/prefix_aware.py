"""``prefix-aware``: chooses a replica that has the prompt's beginning in its cache, unless it is too busy."""

from __future__ import annotations

from math import ceil

from torchrl_moe._checks import check_instance
from torchrl_moe.modules.serving.balancing.prefix_index import (
    TOKEN_BYTES,
    Branch,
    PrefixIndex,
    prompt_bytes,
    prompt_keys,
)
from torchrl_moe.modules.serving.balancing.strategy import (
    RoutingContext,
    Strategy,
    check_overload_threshold,
    check_prefix_length,
)
from torchrl_moe.modules.serving.candidates import Candidates, TableEntry, load_bound

__all__ = ["PrefixAware"]

TEMPLATE = 0.25  # share of distinct prompts
SPREAD = 2.0  # believed holders of a prefix, as a multiple of its fair number of replicas

_Match = tuple[list[int], list[Branch], bool]  # keys; the branches on their path; whether the prompt is distinct


class PrefixAware(Strategy):
    """The candidate that holds the longest beginning of the prompt, within the load bound; of equals, the least loaded.

    It learns from every placement, its own or not. A prefix of more than a quarter of all distinct prompts is a
    template: every replica has it or soon will, so it is ignored. Prefixes cached under other weights are ignored too.
    Of the replicas that got a prefix, only the latest are assumed to still hold it: one, plus twice its share of the
    prompts as a share of the fleet; else each prefix would end up in every cache, and push others out.

    No opinion without a prompt, if no replica holds more than the template, or if all that do are too busy: then the
    next strategy chooses, and one more replica holds the prefix.

    Args:
        prefix_length: leading tokens that are compared (four bytes each, for text); ``None`` for all.
        overload_threshold: a replica with more than this multiple of the mean load is too busy, but never one with at
            most one request above the mean.
        index: the prefixes known so far.
    """

    name = "prefix-aware"

    def __init__(
        self, prefix_length: int | None = None, overload_threshold: float = 1.15, index: PrefixIndex | None = None
    ) -> None:
        check_prefix_length(prefix_length)
        check_overload_threshold(overload_threshold)
        check_instance("index", index, PrefixIndex, none=True)
        self.prefix_length = prefix_length
        self.overload_threshold = overload_threshold
        self.index = PrefixIndex() if index is None else index
        self._last: tuple[RoutingContext, _Match | None] | None = None

    def choose(self, candidates: Candidates, context: RoutingContext) -> int | None:
        """Return the least loaded of those that hold the longest prefix and may take one more."""
        match = self._match(context)
        if match is None:
            return None
        _, known, is_distinct = match
        bound = load_bound(candidates, self.overload_threshold, margin=1.0) - 1.0
        for branch in reversed(known):
            share = self.index.share(branch, is_distinct)
            if share > TEMPLATE:
                return None
            best = None
            for cache in branch[3][-1 - ceil(SPREAD * share * len(candidates)) :]:
                entry = candidates.with_cache(cache)
                if entry is not None and entry.load <= bound and (best is None or _order(entry) < _order(best)):
                    best = entry
            if best is not None:
                return best.index
        return None

    def placed(self, entry: TableEntry, context: RoutingContext) -> None:
        """Learn where a request went."""
        match = self._match(context)
        self._last = None
        if match is not None:
            keys, _, is_distinct = match
            self.index.record(keys, entry.cache, is_distinct)

    def _match(self, context: RoutingContext) -> _Match | None:
        """Return what is known of a request's prompt. One result is kept, since placing directly follows choosing."""
        if self._last is None or self._last[0] is not context:
            found = prompt_bytes(context.prompt)
            match = None
            if found is not None:
                data, seed = found
                keys = prompt_keys(
                    data if self.prefix_length is None else data[: self.prefix_length * TOKEN_BYTES], seed
                )
                match = (keys, *self.index.match(keys))
            self._last = (context, match)
        return self._last[1]


def _order(entry: TableEntry) -> tuple[int, int]:
    return entry.load, entry.chosen
