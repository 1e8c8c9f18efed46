"""Sessions: the calls of one agent as a tree of tokens, and the trajectories that losses take.

An agent sends its whole conversation with each call. A :class:`Session` keeps what is new in it: a *node* is a run of
tokens that were either all given by the client or all sampled for one answer, with what the engine reported of them.
Calls that begin alike share nodes, so a session's memory grows with its new tokens only; a retry, a sub-agent, or a
history that the client has rewritten is a branch. Nothing here knows HTTP or an engine.

Letters: T tokens, P prompt tokens, G tokens of an answer, L decoder layers, K experts per token.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorClass, TensorDict, is_leaf_nontensor
from torch import Tensor
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_moe._checks import check_number, shown
from torchrl_moe.data import UNSET_EXPERT, KeptTokens, RoutedExperts, RoutingLayout
from torchrl_moe.data.routed_experts import routes_from_vllm
from torchrl_moe.data.segments import num_segments, worst_resume
from torchrl_moe.errors import SessionClosedError, SessionLimitError
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, KeptIds, leaves_ids_out
from torchrl_moe.modules.backends.sampling_fields import fields_of
from torchrl_moe.modules.policies.rollout import CHANGES_NOTHING, SAMPLING, sampling_entry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Session", "SessionStore", "load_trajectories"]

Ids: TypeAlias = NDArray[np.int32]
Message: TypeAlias = Mapping[str, Any]
REASONING = ("reasoning", "reasoning_content")
"""Entries of a message that clients may leave out when they send it back: OpenAI's API has no place for them."""
NO_VERSION = -1
HEAD = 16
CUT = "\ufffd"
"""What half of a character is decoded to."""
LONGEST_ID = 256


# -- the tree ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class _Answer:
    """What a node has beside its ids if they were sampled: of each token, and of the answer as a whole."""

    log_probs: NDArray[np.float32]
    versions: Ids
    kept: KeptIds | None
    temperature: float
    is_trained: bool  # False if logits were changed in a way that no trainer replays
    leaves_ids_out: bool
    finish_reason: str
    resume: str
    num_cached_tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    """A run of tokens. An answer's is never split: a client that returns half of it has written something else."""

    parent: _Node | None
    ids: Ids
    routes: NDArray[np.integer[Any]] | None  # [T, L, K], as RoutedExperts; None: the engine captures none
    answer: _Answer | None = None
    read_by: int = NO_VERSION  # weights that routed its tokens; of an answer's, the last one, which the next call reads
    start: int = 0  # tokens before it
    ends: int = 0  # ends of turns among all tokens up to its last
    answers: int = 0  # on its path, its own included
    children: list[_Node] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    @property
    def routed_by(self) -> Ids:
        """The version of the weights that each token's experts are of: those that made the token after it."""
        if self.answer is None:
            return np.full(len(self.ids), self.read_by, np.int32)
        return np.append(self.answer.versions[1:], np.int32(self.read_by))

    def path(self) -> list[_Node]:
        """Return the nodes from the root's child to this one."""
        found, node = [], self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays: list[NDArray[Any] | None] = [self.ids, self.routes]
        if self.answer is not None:
            arrays += [self.answer.log_probs, self.answer.versions]
            arrays += [] if self.answer.kept is None else [self.answer.kept.ids, self.answer.kept.sizes]
        return sum(array.nbytes for array in arrays if array is not None)


def _shared(one: Ids, other: Ids) -> int:
    """The number of first tokens that two runs share."""
    most = min(len(one), len(other))
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if len(differ) else most


def _ids_of(path: Sequence[_Node]) -> Ids:
    return np.concatenate([node.ids for node in path]) if path else np.zeros(0, np.int32)


def _as_ids(ids: Sequence[int]) -> Ids:
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise ValueError(f"a prompt is a list of token ids, and not empty, got {shown(ids)}")
    return array.astype(np.int32)


# -- messages ---------------------------------------------------------------------------------------------------------


def _digest(*parts: bytes) -> bytes:
    # lengths first, so that no two lists of parts are one text
    return hashlib.blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts), digest_size=16).digest()


def _said(message: Message) -> bytes:
    """Return what a message says, in one form for all clients: unset entries left out, parts of text joined."""
    plain = {key: value for key, value in message.items() if value not in (None, "", [], {}) and key not in REASONING}
    content = plain.get("content")
    if isinstance(content, list) and all(isinstance(one, Mapping) and one.get("type") == "text" for one in content):
        plain["content"] = "".join(str(one.get("text", "")) for one in content)
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_called(call) for call in calls]
    return json.dumps(plain, sort_keys=True, default=repr).encode()


def _called(call: object) -> object:
    """Return a tool call with its arguments as JSON's values: a client may write the same ones otherwise."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    with suppress(json.JSONDecodeError):  # a model's own mistake is compared as it was made
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call.get("id"), function.get("name"), arguments]


def _reasoning(message: Message) -> bytes:
    """Return the digest of a message's reasoning; empty if it has none."""
    text = next((message[name] for name in REASONING if message.get(name)), None)
    return b"" if text is None else _digest(str(text).encode())


# -- trajectories -----------------------------------------------------------------------------------------------------

CLASSES: Mapping[tuple[str, ...], type[TensorClass]] = {
    ("tokens",): Tokens,
    ("masks",): Masks,
    ("log_probs",): LogProbs,
    ("routed_experts",): RoutedExperts,
    (SAMPLING, "kept"): KeptTokens,
}
ROUTES_OF = "routes_of"
"""In a file without routes: the number of the answer that a trajectory ends in."""


def _unpadded(kind: type[TensorClass], **tensors: Tensor) -> TensorClass:
    return kind.from_tensordict(TensorDict({**tensors, "padded": NonTensorData(False)}))


def _to_safetensors(trajectories: Sequence[TensorDict]) -> bytes:
    tensors, plain = {}, {}
    for i, td in enumerate(trajectories):
        for key, value in td.items(True, True, is_leaf=is_leaf_nontensor):
            name = ".".join([str(i), *((key,) if isinstance(key, str) else key)])
            if isinstance(value, Tensor):
                tensors[name] = value.clone()  # parts of one array would be refused, as shared memory
            elif isinstance(value, NonTensorData) and isinstance(value.data, str):
                plain[name] = value.data
    return safetensors.torch.save(tensors, {"count": str(len(trajectories)), "plain": json.dumps(plain)})


def load_trajectories(data: bytes, routes: Callable[[int], bytes] | None = None) -> list[TensorDict]:
    """Read what :meth:`Session.to_safetensors` wrote: the same TensorDicts, bit for bit.

    Args:
        data: the file.
        routes: returns what :meth:`Session.routes_to_safetensors` writes for an answer's number, for a file without
            routes; ``None``: its trajectories have none, and the number is at ``"routes_of"``.

    Raises:
        ValueError: this is no such file.
    """
    try:
        tensors: dict[str, Any] = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        count, plain = int(metadata["count"]), json.loads(metadata["plain"])
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"these {len(data)} bytes are not the trajectories of a session: {error}") from error
    found = [TensorDict() for _ in range(count)]
    for name, value in (tensors | plain).items():
        i, *key = name.split(".")
        found[int(i)][tuple(key)] = NonTensorData(value) if isinstance(value, str) else value
    for td in found:
        if routes is not None and ROUTES_OF in td.keys():  # noqa: SIM118  a TensorDict iterates over its batch
            td["routed_experts", "full"] = safetensors.torch.load(routes(int(td.pop(ROUTES_OF))))["routes"]
        for key, kind in CLASSES.items():
            if (entry := td.get(key, None)) is not None:
                is_padded = {"padded": NonTensorData(False)} if "padded" in kind.__annotations__ else {}
                td[key] = kind.from_tensordict(entry.update(is_padded))
    return found


# -- a session --------------------------------------------------------------------------------------------------------


class Session:
    """The calls of one agent; see :class:`SessionStore`. All methods may be called from any thread.

    Attributes:
        id: its name.
        generate: asks the engine in the place of ``engine.agenerate``, with the same arguments, for a collector that
            bounds ages and counts requests; ``None``: the engine is asked.
        sampling_params: go before those of each call.
    """

    def __init__(
        self,
        session_id: str,
        tokenizer: PreTrainedTokenizerBase,
        layout: RoutingLayout | None,
        max_tokens: int,
        end_of_turn_ids: Collection[int],
    ) -> None:
        self.id = session_id
        self.generate: Callable[..., Awaitable[Completion]] | None = None
        self.sampling_params: dict[str, object] = {}
        self._tokenizer, self._layout, self._max_tokens = tokenizer, layout, max_tokens
        self._end_ids = np.array(sorted(end_of_turn_ids), np.int32)
        self._lock = threading.RLock()
        self._root = _Node(parent=None, ids=np.zeros(0, np.int32), routes=self._unset(0))
        self._answers: list[_Node] = []
        # digest of a conversation that ends in an answer -> that answer, and the digest of its reasoning
        self._returned: dict[bytes, tuple[_Node, bytes]] = {}
        self._under_way: dict[object, Callable[[], object]] = {}
        self._is_closed = False
        self.num_tokens = 0
        """Tokens in the tree, each counted once."""
        self.num_calls = 0
        """Calls that were recorded."""

    # -- before a call ----------------------------------------------------------------------------------------------

    def prompt_ids(self, rendered_ids: Sequence[int], messages: Sequence[Message] | None = None) -> list[int]:
        """Return the ids to send for a prompt that was rendered from text or a chat.

        Encoding an answer's text again may give other ids than were sampled. Where the prompt continues an answer of
        this session, its own ids are sent, then those of the rest:

        - if its text begins with the text of the answer's path, token for token or not;
        - if its messages begin with those of an earlier call and the message that this call returned, and what was
          rendered before and between answers is the same. So answers keep what a template drops or rewrites in them,
          such as the reasoning of earlier turns. A client may leave out reasoning, but not change it.

        Otherwise the rendered ids are sent as they are, and a branch begins. Of several such answers, the one with most
        answers before it counts, then the newest.

        Args:
            rendered_ids: ``[P]``, the whole prompt.
            messages: the chat that it was rendered from, as plain JSON; ``None`` for text.

        Raises:
            SessionLimitError: the session has no room for it.
            ValueError: there are no ids.
        """
        rendered = _as_ids(rendered_ids)
        with self._lock:
            node, rest = self._continued(rendered)
            if messages:
                said = self._answer_to(messages, rendered)
                if said is not None and said[0].answers > node.answers:
                    node, rest = said
            ids = np.concatenate([_ids_of(node.path()), rest]) if node.answers else rendered
            self._check_room(len(ids) - self._place(ids)[0])
        found: list[int] = ids.tolist()
        return found

    def routes_to_follow(
        self, prompt_ids: Sequence[int], version: int | None = None
    ) -> NDArray[np.integer[Any]] | None:
        """Return the experts that an engine should follow where it reads this session's tokens again.

        Weights that have changed would route earlier tokens otherwise; what is sampled after them would then belong to
        a context that no trainer computes. Pass the rows to ``engine.agenerate(routed_experts=...)``.

        Args:
            prompt_ids: the prompt that is sent.
            version: of the engine's weights. Rows after the last one of other weights are left to the engine, which
                has them in its prefix cache; ``None``: all rows that are known.

        Returns:
            ``[rows, L, K]`` for the first tokens of the prompt, -1 where the engine routes; ``None`` if for none.
        """
        with self._lock:
            if self._layout is None:
                return None
            matched, node, partial = self._place(_as_ids(prompt_ids))
            path = [*node.path(), *([] if partial is None else [partial])]
            if not path:
                return None
            rows = np.concatenate([node.routes for node in path if node.routes is not None])[:matched]
            follow = rows[:, self._layout.moe_layers[0], 0] != UNSET_EXPERT
            if version is not None:
                follow &= np.concatenate([node.routed_by for node in path])[:matched] != version
            found = np.flatnonzero(follow)
            return rows[: found[-1] + 1] if len(found) else None

    @contextmanager
    def under_way(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Hold a request within the context: if the session is closed meanwhile, ``cancel`` is called.

        Raises:
            SessionClosedError: it is closed already.
        """
        request = object()
        with self._lock:
            self._check_open()
            self._under_way[request] = cancel
        try:
            yield
        finally:
            with self._lock:
                self._under_way.pop(request, None)

    # -- after a call -----------------------------------------------------------------------------------------------

    def record(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        messages: Sequence[Message] | None = None,
        message_returned: Message | Sequence[Message] | None = None,
        sampling_params: object = None,
    ) -> None:
        """Add a call: its prompt, and an answer for each choice. Aborted and empty answers are left out.

        Args:
            prompt_ids: ``[P]``, as they were sent.
            completion: the engine's answer, with log-probs. Its routes may have all rows, or only the last ones.
            messages: the chat of the prompt, as the client sent it.
            message_returned: what the client was given for the answer; of several choices, one each, in their order.
            sampling_params: what the engine was asked with, a mapping or vLLM's object.

        Raises:
            SessionClosedError: it is closed.
            SessionLimitError: the session has no room for it.
            ValueError: the completion is of another prompt, or lacks log-probs, or returned messages.
        """
        prompt = _as_ids(prompt_ids)
        outputs = [one for one in completion.outputs if len(one.token_ids) and one.finish_reason != "abort"]
        if not np.array_equal(prompt, completion.prompt_token_ids):
            raise ValueError("the completion is of another prompt than was sent")
        if any(output.logprobs is None for output in outputs):
            raise ValueError("the completion has no log-probs: ask the engine with logprobs=0")
        returned = [message_returned] if isinstance(message_returned, Mapping) else list(message_returned or ())
        if returned and len(returned) != len(completion.outputs):
            raise ValueError(f"{len(returned)} messages were returned for {len(completion.outputs)} choices")
        params = {**fields_of(sampling_params), **self.sampling_params}
        rows = {output.index: self._rows(output, len(prompt)) for output in outputs}
        with self._lock:
            self._check_open()
            self._check_room(len(prompt) - self._place(prompt)[0] + sum(len(output.token_ids) for output in outputs))
            conversation = None if messages is None else self._conversation(messages)[-1][0]
            self.num_calls += 1
            asked = self._given(prompt)
            for output in outputs:
                node = self._add(asked, completion, output, params)
                self._learn(node, rows[output.index])
                # an answer with ends of turns inside, as there may be if they are ignored, is not one message
                if conversation is not None and returned and not self._count_ends(node.ids[:-1]):
                    message = returned[completion.outputs.index(output)]
                    self._returned[_digest(conversation, _said(message))] = node, _reasoning(message)

    def trajectories(self, shared: Literal["first", "all"] = "first") -> list[TensorDict]:
        """Return a TensorDict ``[]`` for each leaf of the tree, in the order in which the leaves' answers came.

        It has the keys of a rollout (docs/rollouts.md). ``("masks", "all_assistant_mask")`` is True on the sampled
        tokens of every turn of its path, and only there are log-probs known, so that any masking of the losses trains
        on these tokens. ``"prompt"`` are the tokens before the first of them. A leaf whose answers were sampled at
        several temperatures has one trajectory for each, since a sample is scored at one.

        Args:
            shared: how answers that several leaves have in common count. ``"first"``: they are masked in all leaves but
                the first, so that each sampled token is trained on once. ``"all"``: in each leaf.

        Raises:
            ValueError: ``shared`` is neither.
        """
        return [td for td, _ in self._trajectories(shared)]

    def to_safetensors(self, shared: Literal["first", "all"] = "first", routes: bool = True) -> bytes:
        """Return the trajectories as a file, which :func:`load_trajectories` reads.

        Args:
            shared: see :meth:`trajectories`.
            routes: False leaves the routes here, to be asked for by :meth:`routes_to_safetensors`.
        """
        found = self._trajectories(shared)
        if not routes and self._layout is not None:
            for td, answer in found:
                td.exclude("routed_experts", inplace=True).set(ROUTES_OF, torch.tensor(answer))
        return _to_safetensors([td for td, _ in found])

    def routes_to_safetensors(self, answer: int) -> bytes:
        """Return the routes ``[T, L, K]`` of the trajectory that ends in an answer, given by its number, as a file.

        Raises:
            KeyError: there is no such answer, or the engine captures no routes.
        """
        with self._lock:
            if self._layout is None or not 0 <= answer < len(self._answers):
                raise KeyError(f"session {self.id!r} has no routes of an answer {answer}")
            return safetensors.torch.save({"routes": self._routes(self._answers[answer].path())})

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of all nodes."""
        with self._lock:
            return sum(node.nbytes for node in self._nodes())

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._is_closed

    def close(self) -> None:
        """Take no more calls, and cancel those under way. What was recorded stays readable. Idempotent."""
        with self._lock:
            self._is_closed = True
            cancels = list(self._under_way.values())
        for cancel in cancels:
            cancel()

    def __repr__(self) -> str:
        return (
            f"Session({self.id!r}, calls={self.num_calls}, tokens={self.num_tokens}, under_way={len(self._under_way)})"
        )

    # -- where a prompt belongs -------------------------------------------------------------------------------------

    def _continued(self, rendered: Ids) -> tuple[_Node, Ids]:
        """Return the answer that a prompt continues, by ids or text, and the ids after it; the root if none."""
        best = self._root, rendered
        reached = [best]
        while reached:
            node, rest = reached.pop()
            if node.answer is not None and node.answers > best[0].answers:
                best = node, rest
            for child in node.children:  # the newest is popped first
                same = np.array_equal(child.ids, rest[: len(child.ids)])
                left = rest[len(child.ids) :] if same else self._after_text(child, rest)
                if left is not None:
                    reached.append((child, left))
        return best

    def _after_text(self, node: _Node, rest: Ids) -> Ids | None:
        """Return the ids that follow a node's text; ``None`` if other text comes first."""
        # most texts differ at once, and a long one need not be decoded to see it
        heads = [self._decode(ids[:HEAD]).rstrip(CUT) for ids in (node.ids, rest)]
        if not heads[0].startswith(heads[1]) and not heads[1].startswith(heads[0]):
            return None
        said = self._decode(node.ids)
        near = rest[: 4 * len(said) + 8]  # a character is at most four tokens
        if not said or not self._decode(near).startswith(said):
            return None
        # the ids of the rest stay as they were rendered, if one begins where the text ends
        count = bisect_right(range(len(near) + 1), len(said), key=lambda n: len(self._decode(near[:n]))) - 1
        if self._decode(near[:count]) == said:
            return rest[count:]
        text = self._decode(rest)[len(said) :]
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def _decode(self, ids: Ids) -> str:
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text

    def _conversation(self, messages: Sequence[Message]) -> list[tuple[bytes, _Node | None]]:
        """Return the digest of a conversation before the first and after each message, and the answer it ends in."""
        found: list[tuple[bytes, _Node | None]] = [(b"", None)]
        for message in messages:
            if not isinstance(message, Mapping):
                raise ValueError(
                    f"messages are mappings, such as {{'role': ..., 'content': ...}}, got {shown(message)}"
                )
            digest = _digest(found[-1][0], _said(message))
            node, own = self._returned.get(digest, (None, b""))
            # other reasoning than the answer's is another message, and so is any that was not returned here
            if (reasoning := _reasoning(message)) not in (b"", own):
                digest, node = _digest(digest, reasoning), None
            found.append((digest, node))
        return found

    def _answer_to(self, messages: Sequence[Message], rendered: Ids) -> tuple[_Node, Ids] | None:
        """Return the last answer that messages contain as it was returned, and the ids that were rendered after it."""
        ends = np.flatnonzero(np.isin(rendered, self._end_ids))
        for _, node in reversed(self._conversation(messages)):
            if node is not None and (left := self._after_turns(node, rendered, ends)) is not None:
                return node, left
        return None

    def _after_turns(self, node: _Node, rendered: Ids, ends: NDArray[np.intp]) -> Ids | None:
        """Return what was rendered after an answer, if it was rendered alike before and between the answers.

        Messages are told apart by their ends: rewriting an answer does not change how many there are. How a template
        opens an answer may differ, so that part is not compared.
        """
        at, given = 0, np.zeros(0, np.int32)
        for one in node.path():
            if one.answer is None:  # split or not
                given = np.concatenate([given, one.ids])
                continue
            closed = given[: len(given) - _length_after_last(given, self._end_ids)]
            assert one.parent is not None
            turns = one.parent.ends
            if turns >= len(ends) or not np.array_equal(closed, rendered[at : at + len(closed)]):
                return None
            # the end of the turn is the answer's last token, unless it was cut
            at, given = int(ends[turns]) + (one.ends - turns), given[:0]
        return rendered[at:]

    def _place(self, prompt: Ids) -> tuple[int, _Node, _Node | None]:
        """Return how many tokens of a prompt are in the tree, the last whole node of these, and one that is begun.

        Of several places, that with most answers before it counts, then that of most tokens, then the newest.
        """
        best: tuple[int, _Node, _Node | None] = (0, self._root, None)
        reached = [self._root]
        while reached:
            node = reached.pop()
            begun, stop = None, node.stop
            for child in node.children:  # the newest is popped first
                count = _shared(child.ids, prompt[node.stop :])
                if count == len(child.ids):
                    reached.append(child)
                elif count and child.answer is None:  # one at most: prompts' nodes that begin alike are one
                    begun, stop = child, node.stop + count
            if (node.answers, stop) > (best[1].answers, best[0]):
                best = stop, node, begun
        return best

    # -- growth -----------------------------------------------------------------------------------------------------

    def _given(self, prompt: Ids) -> _Node:
        """Return the node that ends with a prompt's last token; what is not in the tree yet becomes a node."""
        matched, node, partial = self._place(prompt)
        if partial is not None:
            node = self._split(partial, matched - node.stop)
        if matched < len(prompt):
            node = self._child(node, prompt[matched:])
        return node

    def _split(self, node: _Node, count: int) -> _Node:
        """Split a prompt's node, and return its first ``count`` tokens."""
        parent = node.parent
        assert parent is not None
        ids, routes = node.ids[:count].copy(), None if node.routes is None else node.routes[:count].copy()
        ends = parent.ends + self._count_ends(ids)
        upper = replace(node, ids=ids, routes=routes, ends=ends, children=[node])
        parent.children[parent.children.index(node)] = upper
        node.ids, node.routes = node.ids[count:].copy(), None if node.routes is None else node.routes[count:].copy()
        node.parent, node.start = upper, upper.stop
        return upper

    def _child(self, parent: _Node, ids: Ids, answer: _Answer | None = None) -> _Node:
        node = _Node(
            parent=parent,
            ids=ids.copy(),  # not a part of a prompt, which would be kept whole
            routes=self._unset(len(ids)),
            answer=answer,
            start=parent.stop,
            ends=parent.ends + self._count_ends(ids),
            answers=parent.answers + (answer is not None),
        )
        parent.children.append(node)
        self.num_tokens += len(ids)
        return node

    def _add(self, asked: _Node, completion: Completion, output: CompletionOutput, params: Mapping[str, Any]) -> _Node:
        assert output.logprobs is not None
        kept = None if output.kept is None else KeptIds(output.kept.ids.copy(), output.kept.sizes.copy())
        answer = _Answer(
            log_probs=output.logprobs.astype(np.float32),
            versions=output.policy_versions.astype(np.int32),
            kept=kept,
            temperature=float(sampling_entry(params, None, 0, 0, None, None)["temperature"]),
            is_trained=all(params.get(name) in values for name, values in CHANGES_NOTHING.items()),
            leaves_ids_out=kept is not None or bool(leaves_ids_out(params.get)),
            finish_reason=output.finish_reason,
            resume=output.resume,
            num_cached_tokens=completion.num_cached_tokens,
        )
        # two answers that begin alike were sampled twice: they share no node
        node = self._child(asked, output.token_ids.astype(np.int32), answer)
        self._answers.append(node)
        return node

    def _learn(self, added: _Node, rows: NDArray[np.integer[Any]] | None) -> None:
        """Fill in the routes that were unknown on an answer's path, and note how the engine read the known ones again.

        The rows are those of the last tokens, without the answer's last.
        """
        if self._layout is None or rows is None:
            return
        assert added.answer is not None
        by, column = int(added.answer.versions[0]), self._layout.moe_layers[0]
        first = added.stop - 1 - len(rows)
        for node in added.path():
            start, stop = max(node.start, first), min(node.stop, first + len(rows))
            if start >= stop:
                continue
            assert node.routes is not None
            own, new = node.routes[start - node.start : stop - node.start], rows[start - first : stop - first]
            known = own[:, column, 0] != UNSET_EXPERT
            how = "none"
            if not _same_experts(own[known], new[known]):
                how = "live"
            elif (node.routed_by[start - node.start : stop - node.start][known] != by).any():
                how = "forced"
            added.answer.resume = worst_resume(added.answer.resume, how)
            own[~known] = new[~known]
            if node is not added and not known.all():
                node.read_by = by

    def _rows(self, output: CompletionOutput, prompt: int) -> NDArray[np.integer[Any]] | None:
        """Return the rows of an answer in the form that they are kept in, checked."""
        rows = output.routed_experts
        if self._layout is None or rows is None:
            return None
        if len(rows) > prompt + len(output.token_ids) - 1:
            raise ValueError(f"{len(rows)} rows of routes for {prompt} + {len(output.token_ids)} tokens")
        return routes_from_vllm(rows, len(rows) + 1, self._layout)[:-1]

    def _unset(self, tokens: int) -> NDArray[np.integer[Any]] | None:
        layout = self._layout
        if layout is None:
            return None
        return np.full((tokens, layout.num_layers, layout.top_k), UNSET_EXPERT, layout.numpy_dtype)

    def _count_ends(self, ids: Ids) -> int:
        return int(np.isin(ids, self._end_ids).sum())

    # -- leaves -----------------------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[_Node]:
        reached = [self._root]
        while reached:
            node = reached.pop()
            yield node
            reached += node.children

    def _trajectories(self, shared: str) -> list[tuple[TensorDict, int]]:
        """Return each trajectory with the number of the answer that it ends in."""
        if shared not in ("first", "all"):
            raise ValueError(f"shared must be 'first' or 'all', got {shown(shared)}")
        found = []
        with self._lock:
            inner = {id(_answer_before(node)) for node in self._answers}
            taken: set[int] = set()
            for number, leaf in enumerate(self._answers):
                if id(leaf) in inner:
                    continue
                # the answers that are trained on here, by temperature
                counted: dict[float, list[_Node]] = {}
                for node in leaf.path():
                    if node.answer is not None and node.answer.is_trained and id(node) not in taken:
                        counted.setdefault(node.answer.temperature, []).append(node)
                        if shared == "first":
                            taken.add(id(node))
                found += [(self._trajectory(leaf, nodes, value), number) for value, nodes in counted.items()]
        return found

    def _trajectory(self, leaf: _Node, counted: Sequence[_Node], temperature: float) -> TensorDict:
        """Return the trajectory of a leaf's path, to be trained on some of its answers."""
        path, prompt, trained = leaf.path(), counted[0].start, set(map(id, counted))
        full = torch.from_numpy(_ids_of(path)).long()
        mask = torch.zeros(leaf.stop, dtype=torch.bool)
        log_probs = torch.full((leaf.stop,), float("nan"))
        versions = torch.full((leaf.stop,), NO_VERSION, dtype=torch.int32)
        sizes, ids = torch.zeros(leaf.stop, dtype=torch.int32), [torch.zeros(0, dtype=torch.int32)]
        answers = [(node, node.answer) for node in path if node.answer is not None]
        for node, answer in answers:
            span = slice(node.start, node.stop)
            versions[span] = torch.from_numpy(answer.versions)
            if id(node) in trained:
                mask[span], log_probs[span] = True, torch.from_numpy(answer.log_probs)
                if answer.kept is not None:
                    sizes[span] = torch.from_numpy(answer.kept.sizes)
                    ids.append(torch.from_numpy(answer.kept.ids))
        sampling = TensorDict({"temperature": torch.tensor(temperature)})
        if any(node.answer is not None and node.answer.leaves_ids_out for node in counted):
            sampling["kept"] = KeptTokens(ids=torch.cat(ids), sizes=sizes)
        last = answers[-1][1]
        source: dict[str, object] = {
            "tokens": _unpadded(Tokens, prompt=full[:prompt].clone(), response=full[prompt:].clone(), full=full),
            "masks": _unpadded(Masks, all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask),
            "log_probs": _unpadded(LogProbs, response=log_probs[prompt:].clone(), full=log_probs),
            "policy_versions": TensorDict({"full": versions}),
            "policy_version": versions[mask].min().long(),
            "num_segments": torch.tensor(num_segments(versions[mask])),
            "num_cached_tokens": torch.tensor(last.num_cached_tokens),
            "resume": NonTensorData(worst_resume(*(answer.resume for _, answer in answers))),
            "finish_reason": NonTensorData(last.finish_reason),
            SAMPLING: sampling,
        }
        if self._layout is not None:
            source["routed_experts"] = RoutedExperts(full=self._routes(path))
        return TensorDict(source)

    def _routes(self, path: Sequence[_Node]) -> Tensor:
        return torch.from_numpy(np.concatenate([node.routes for node in path if node.routes is not None]))

    # -- limits -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionClosedError(f"session {self.id!r} has ended: it takes no more calls")

    def _check_room(self, new: int) -> None:
        if self.num_tokens + new > self._max_tokens:
            raise SessionLimitError(
                f"session {self.id!r} has {self.num_tokens} tokens, and this call adds {new}: the limit is "
                f"{self._max_tokens} (max_tokens_per_session)"
            )


def _length_after_last(ids: Ids, wanted: Ids) -> int:
    """The number of tokens after the last one that is among the wanted; all if none is."""
    found = np.flatnonzero(np.isin(ids, wanted))
    return len(ids) - 1 - int(found[-1]) if len(found) else len(ids)


def _answer_before(node: _Node) -> _Node | None:
    """The last answer on the path to a node."""
    before = node.parent
    while before is not None and before.answer is None:
        before = before.parent
    return before


def _same_experts(one: NDArray[np.integer[Any]], other: NDArray[np.integer[Any]]) -> bool:
    """Whether rows name the same experts, in any order."""
    if np.array_equal(one, other):
        return True
    differ = (one != other).any((1, 2))  # sorting is slow, and few differ
    return np.array_equal(np.sort(one[differ], -1), np.sort(other[differ], -1))


# -- all sessions -----------------------------------------------------------------------------------------------------


class SessionStore:
    """The sessions of a server, by their ids. All methods may be called from any thread.

    Args:
        tokenizer: the model's, which prompts are rendered with.
        layout: the routers of the model, ``engine.routing_layout``; ``None``: no routes are kept.
        max_tokens_per_session: tokens that a session keeps, each counted once however often it is sent.
        max_sessions: sessions at a time.
        ttl: seconds after which a session that nobody uses is forgotten, with its routes; one with requests under way
            stays.
        end_of_turn_ids: the ids that end a message, by which messages are told apart in a rendered chat. Default: the
            tokenizer's end of text.
        clock: the time in seconds, for tests.

    Raises:
        ValueError: a limit is out of range.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        layout: RoutingLayout | None = None,
        *,
        max_tokens_per_session: int = 1 << 22,
        max_sessions: int = 4096,
        ttl: float = 3600.0,
        end_of_turn_ids: Collection[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_number("max_tokens_per_session", max_tokens_per_session, 1, whole=True)
        check_number("max_sessions", max_sessions, 1, whole=True)
        check_number("ttl", ttl, above=0, hint="It is in seconds.")
        own = getattr(tokenizer, "eos_token_id", None)
        self._ends = ({own} if own is not None else set()) if end_of_turn_ids is None else set(end_of_turn_ids)
        # its own: the server encodes with the given one, in other threads
        self._tokenizer, self._layout = copy.deepcopy(tokenizer), layout
        self._max_tokens, self._max_sessions, self._ttl, self._clock = max_tokens_per_session, max_sessions, ttl, clock
        self._sessions: OrderedDict[str, tuple[Session, float]] = OrderedDict()  # the longest unused first
        self._lock = threading.Lock()

    def get(self, session_id: str) -> Session:
        """Return a session; one that does not exist is created.

        Raises:
            ValueError: the id is not text of 1 to 256 characters.
            SessionLimitError: there are ``max_sessions`` others.
        """
        if not isinstance(session_id, str) or not 0 < len(session_id) <= LONGEST_ID:
            raise ValueError(f"a session's id is text of 1 to {LONGEST_ID} characters, got {shown(session_id)}")
        with self._lock:
            self._forget_unused()
            session = self._sessions.get(session_id, (None, 0.0))[0]
            if session is None:
                if len(self._sessions) >= self._max_sessions:
                    raise SessionLimitError(
                        f"there are {len(self._sessions)} sessions, as many as max_sessions allows: close one"
                    )
                session = Session(session_id, self._tokenizer, self._layout, self._max_tokens, self._ends)
            self._sessions[session_id] = session, self._clock()
            self._sessions.move_to_end(session_id)
            return session

    def close(self, session_id: str) -> None:
        """Close a session and forget it; an unknown one is ignored."""
        with self._lock:
            session = self._sessions.pop(session_id, (None, 0.0))[0]
        if session is not None:
            session.close()

    def ids(self) -> list[str]:
        """Return the ids of the sessions, the longest unused first."""
        with self._lock:
            self._forget_unused()
            return list(self._sessions)

    def _forget_unused(self) -> None:
        now = self._clock()
        for session_id, (session, used) in list(self._sessions.items()):
            if now - used < self._ttl:
                return
            if session._under_way:
                self._sessions[session_id] = session, now
                self._sessions.move_to_end(session_id)
            else:
                del self._sessions[session_id]
                session.close()
