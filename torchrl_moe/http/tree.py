"""The tokens of a session as a tree, with what the engine reported of them.

A *node* is a run of tokens that were either all given by the client or all sampled for one answer. Calls that begin
alike share nodes, so the tree grows with new tokens only; a retry, a sub-agent, or a history that the client has
rewritten is a branch. Nothing here knows text or messages, and nothing guards against several threads.

Letters: T tokens, P prompt tokens, L decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.data import UNSET_EXPERT, RoutingLayout
from torchrl_moe.data.routed_experts import routes_from_vllm
from torchrl_moe.data.segments import worst_resume
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds

Ids: TypeAlias = NDArray[np.int32]
Rows: TypeAlias = NDArray[np.integer[Any]]
"""Routes ``[T, L, K]``, as those of :class:`~torchrl_moe.data.RoutedExperts`."""
NO_VERSION = -1


@dataclass(slots=True, eq=False, kw_only=True)
class Answer:
    """What a node has beside its ids if they were sampled: of each token, and of the answer as a whole."""

    log_probs: NDArray[np.float32]
    versions: Ids
    kept: KeptIds | None
    sampling_params: Mapping[str, Any]
    finish_reason: str
    resume: str
    num_cached_tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A run of tokens. An answer's is never split: a client that returns half of it has written something else."""

    parent: Node | None
    ids: Ids
    routes: Rows | None  # None: the engine captures none
    answer: Answer | None = None
    read_by: int = NO_VERSION  # weights that routed its tokens; of an answer's, the last one, which the next call reads
    start: int = 0  # tokens before it
    ends: int = 0  # ends of turns among all tokens up to its last
    answers: int = 0  # on its path, its own included
    children: list[Node] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """Tokens up to its last."""
        return self.start + len(self.ids)

    @property
    def routed_by(self) -> Ids:
        """The version of the weights that each token's experts are of: those that made the token after it."""
        if self.answer is None:
            return np.full(len(self.ids), self.read_by, np.int32)
        return np.append(self.answer.versions[1:], np.int32(self.read_by))

    def path(self) -> list[Node]:
        """Return the nodes from the root's child to this one."""
        found, node = [], self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def path_ids(self) -> Ids:
        """Return the ids of its path."""
        return np.concatenate([np.zeros(0, np.int32), *(node.ids for node in self.path())])

    def path_routes(self) -> Rows:
        """Return the routes of its path."""
        return np.concatenate([node.routes for node in self.path() if node.routes is not None])


class Place(NamedTuple):
    """Where a prompt is in the tree."""

    matched: int
    """Its first tokens that are there already."""
    node: Node
    """The last whole node of these."""
    last: Node
    """The node of the last of these: the same one, or one after it, of which only a part is the prompt's."""


class TokenTree:
    """The calls of one agent.

    Args:
        layout: the routers of the model; ``None``: no routes are kept.
        end_of_turn_ids: the ids that end a message.
    """

    def __init__(self, layout: RoutingLayout | None, end_of_turn_ids: Collection[int]) -> None:
        self.layout = layout
        self.end_ids = np.array(sorted(end_of_turn_ids), np.int32)
        self.root = Node(parent=None, ids=np.zeros(0, np.int32), routes=self._unset(0))
        self.answers: list[Node] = []
        """In the order in which they came."""
        self.num_tokens = 0

    def place(self, prompt: Ids) -> Place:
        """Find a prompt: the place with most answers before it counts, then that of most tokens, then the newest."""
        best = Place(0, self.root, self.root)
        reached = [self.root]
        while reached:
            node = reached.pop()
            found = Place(node.stop, node, node)
            for child in node.children:  # the newest is popped first
                count = _shared(child.ids, prompt[node.stop :])
                if count == len(child.ids):
                    reached.append(child)
                elif count and child.answer is None:  # one at most: prompts' nodes that begin alike are one
                    found = Place(node.stop + count, node, child)
            if (node.answers, found.matched) > (best.node.answers, best.matched):
                best = found
        return best

    def routes_to_follow(self, prompt: Ids, version: int | None) -> Rows | None:
        """Return the rows of a prompt up to the last one that weights of another version routed; see ``Session``."""
        matched, _, last = self.place(prompt)
        if self.layout is None or not matched:
            return None
        rows = last.path_routes()[:matched]
        follow = ~self._is_unset(rows)
        if version is not None:
            follow &= np.concatenate([node.routed_by for node in last.path()])[:matched] != version
        found = np.flatnonzero(follow)
        return rows[: found[-1] + 1] if len(found) else None

    def known_rows(self, prompt: Ids) -> int:
        """Return how many tokens at the start of a prompt have routes."""
        if self.layout is None:
            return 0
        matched, _, last = self.place(prompt)
        for node in last.path():
            assert node.routes is not None
            unset = np.flatnonzero(self._is_unset(node.routes))
            if len(unset):
                return min(node.start + int(unset[0]), matched)
        return matched

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of all nodes."""
        arrays: list[NDArray[Any] | None] = []
        reached = [self.root]
        while reached:
            node = reached.pop()
            reached += node.children
            arrays += [node.ids, node.routes]
            if (answer := node.answer) is not None:
                kept = [] if answer.kept is None else [answer.kept.ids, answer.kept.sizes]
                arrays += [answer.log_probs, answer.versions, *kept]
        return sum(array.nbytes for array in arrays if array is not None)

    # -- growth -----------------------------------------------------------------------------------------------------

    def checked(self, output: CompletionOutput, prompt: int) -> Rows | None:
        """Return the rows of an answer as they are kept, the last of its and the prompt's tokens; raises if wrong."""
        rows = output.routed_experts
        if self.layout is None or rows is None:
            return None
        if len(rows) > prompt + len(output.token_ids) - 1:
            raise ValueError(f"{len(rows)} rows of routes for {prompt} + {len(output.token_ids)} tokens")
        return routes_from_vllm(rows, len(rows) + 1, self.layout)[:-1]

    def add_prompt(self, prompt: Ids) -> Node:
        """Return the node that ends with a prompt's last token; what is not in the tree yet becomes a node."""
        matched, node, last = self.place(prompt)
        if last is not node:
            node = self._split(last, matched - node.stop)
        return node if matched == len(prompt) else self._child(node, prompt[matched:])

    def add_answer(
        self,
        asked: Node,
        completion: Completion,
        output: CompletionOutput,
        rows: Rows | None,
        sampling_params: Mapping[str, Any],
        followed: int,
    ) -> Node:
        """Add an answer after its prompt. Two answers that begin alike were sampled twice: they share no node."""
        assert output.logprobs is not None
        answer = Answer(
            log_probs=output.logprobs.astype(np.float32),
            versions=output.policy_versions.astype(np.int32),
            kept=None if output.kept is None else KeptIds(output.kept.ids.copy(), output.kept.sizes.copy()),
            sampling_params=sampling_params,
            finish_reason=output.finish_reason,
            resume=output.resume,
            num_cached_tokens=completion.num_cached_tokens,
        )
        node = self._child(asked, output.token_ids.astype(np.int32), answer)
        self.answers.append(node)
        if rows is not None:
            self._learn(node, answer, rows, followed)
        return node

    def _split(self, node: Node, count: int) -> Node:
        """Split a prompt's node, and return its first ``count`` tokens."""
        parent, routes = node.parent, node.routes
        assert parent is not None
        ends = parent.ends + self.count_ends(node.ids[:count])
        first = None if routes is None else routes[:count].copy()
        upper = replace(node, ids=node.ids[:count].copy(), routes=first, ends=ends, children=[node])
        parent.children[parent.children.index(node)] = upper
        node.ids, node.routes = node.ids[count:].copy(), None if routes is None else routes[count:].copy()
        node.parent, node.start = upper, upper.stop
        return upper

    def _child(self, parent: Node, ids: Ids, answer: Answer | None = None) -> Node:
        node = Node(
            parent=parent,
            ids=ids.copy(),  # not a part of a prompt, which would be kept whole
            routes=self._unset(len(ids)),
            answer=answer,
            start=parent.stop,
            ends=parent.ends + self.count_ends(ids),
            answers=parent.answers + (answer is not None),
        )
        parent.children.append(node)
        self.num_tokens += len(ids)
        return node

    def _learn(self, added: Node, answer: Answer, rows: Rows, followed: int) -> None:
        """Fill in the routes that were unknown on an answer's path, and note how the engine read the known ones again.

        The rows are those of the last tokens, without the answer's last. Those before were in the engine's cache, where
        rows of other weights are only if they were followed.
        """
        by, first = int(answer.versions[0]), added.stop - 1 - len(rows)
        for node in added.path():
            assert node.routes is not None
            read = node.routes[: added.stop - 1 - node.start]
            known = ~self._is_unset(read)
            others = np.flatnonzero(known & (node.routed_by[: len(read)] != by))
            cached = min(max(first - node.start, 0), len(read))
            own, new = read[cached:], rows[max(node.start - first, 0) :][: len(read) - cached]
            again = known[cached:]
            is_live = (others[others < cached] + node.start >= followed).any()
            if is_live or not _same_experts(own[again], new[again]):
                answer.resume = "live"
            elif len(others):
                answer.resume = worst_resume(answer.resume, "forced")
            own[~again] = new[~again]
            if node is not added and not again.all():
                node.read_by = by

    def _is_unset(self, rows: Rows) -> NDArray[np.bool_]:
        assert self.layout is not None
        return np.asarray(rows[:, self.layout.moe_layers[0], 0] == UNSET_EXPERT)

    def _unset(self, tokens: int) -> Rows | None:
        layout = self.layout
        if layout is None:
            return None
        return np.full((tokens, layout.num_layers, layout.top_k), UNSET_EXPERT, layout.numpy_dtype)

    def count_ends(self, ids: Ids) -> int:
        """Return how many of some tokens end a turn."""
        return int(np.isin(ids, self.end_ids).sum())


def _shared(one: Ids, other: Ids) -> int:
    """The number of first tokens that two runs share."""
    most = min(len(one), len(other))
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if len(differ) else most


def _same_experts(one: Rows, other: Rows) -> bool:
    """Whether rows name the same experts, in any order."""
    if np.array_equal(one, other):
        return True
    differ = (one != other).any((1, 2))  # sorting is slow, and few differ
    return np.array_equal(np.sort(one[differ], -1), np.sort(other[differ], -1))
