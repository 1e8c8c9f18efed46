"""Sessions: the calls of one agent, and the trajectories that losses take.

An agent sends its whole conversation with each call. A :class:`Session` finds what is new in it, has what was sampled
sent as it was sampled, and keeps all that the engine reports in a :class:`~torchrl_moe.http.tree.TokenTree`. Nothing
here knows HTTP or an engine.

Letters: T tokens, P prompt tokens, L decoder layers, K experts per token.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
import time
import uuid
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from torchrl_moe._checks import check_number, shown
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import SessionClosedError, SessionLimitError
from torchrl_moe.http.tree import Ids, Node, Rows, TokenTree
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.backends.sampling_fields import fields_of

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]
REASONING = ("reasoning", "reasoning_content")
"""Entries of a message that clients may leave out when they send it back: OpenAI's API has no place for them."""
HEAD, HALF = 16, 4
CUT = "\ufffd"
"""What half of a character is decoded to."""
LONGEST_ID = 256


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
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    # a model's own mistake is compared as it was made
    with suppress(TypeError, ValueError, RecursionError):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        arguments = json.loads(text, parse_float=_number)
    return [call.get("id"), function.get("name"), arguments]


def _number(text: str) -> int | float:
    """Read a number of JSON, which has one kind: 5.0 is 5, and a client may write either."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _reasoning(message: Message) -> bytes:
    """Return the digest of a message's reasoning; empty if it has none."""
    text = next((message[name] for name in REASONING if message.get(name)), None)
    return b"" if text is None else _digest(str(text).encode())


def _comes_after(node: Node, answers: Sequence[Node]) -> bool:
    """Whether an answer comes after one of these, or there are none."""
    return not answers or any(one is answer for one in node.path() for answer in answers)


# -- a session --------------------------------------------------------------------------------------------------------


class Session:
    """The calls of one agent; see :class:`SessionStore`. All methods may be called from any thread.

    Attributes:
        id: its name.
        key: what the engine calls it: a later session of the same name is another one.
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
        self.key = f"session {session_id} {uuid.uuid4().hex[:8]}"
        self.generate: Callable[..., Awaitable[Completion]] | None = None
        self.sampling_params: dict[str, object] = {}
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._tree = TokenTree(layout, end_of_turn_ids)
        self._lock = threading.RLock()
        # digest of a conversation that ends in an answer -> the answers that say so, and the digests of their reasoning
        self._returned: dict[bytes, list[tuple[Node, bytes]]] = defaultdict(list)
        self._under_way: dict[object, Callable[[], object]] = {}
        self.is_closed = False
        """Whether it takes no more calls."""
        self.num_calls = 0
        """Calls that were recorded."""
        self.used_at = 0.0
        """When its store last returned it, on that store's clock."""

    # -- before a call ----------------------------------------------------------------------------------------------

    def prompt_ids(self, rendered_ids: Sequence[int], messages: Sequence[Message] | None = None) -> list[int]:
        """Return the ids to send for a prompt that was rendered from text or a chat.

        Encoding an answer's text again may give other ids than were sampled. Where the prompt continues an answer of
        this session, the ids of that answer's path are sent, then those of the rest. It does so

        - if its text begins with the text of the path, token for token or not;
        - if its messages begin with those of an earlier call and the message that this call returned, and what was
          rendered before and between answers is the same. So answers keep what a template drops or rewrites, such as
          the reasoning of earlier turns. A client may leave out reasoning, but not change it.

        Otherwise the rendered ids are sent, and a branch begins. Of several such answers, the one with most answers
        before it counts, then one that was returned as it is, then the longest, then the newest.

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
                # of as many answers, those that were returned word for word: a text may begin with that of others, too
                if said is not None and said[0].answers >= node.answers:
                    node, rest = said
            ids = np.concatenate([node.path_ids(), rest]) if node.answers else rendered
            self._check_room(len(ids) - self._tree.place(ids).matched)
        return ids.tolist()

    def routes_to_follow(self, prompt_ids: Sequence[int], version: int | None = None) -> Rows | None:
        """Return the experts that an engine should follow where it reads this session's tokens again.

        New weights would route earlier tokens otherwise, and what is sampled after them would belong to a context that
        no trainer computes. Pass the rows to ``engine.agenerate(routed_experts=...)``.

        Args:
            prompt_ids: the prompt that is sent.
            version: of the engine's weights. Rows after the last one of other weights are in its prefix cache, and left
                out; ``None``: all rows that are known.

        Returns:
            ``[rows, L, K]`` for the first tokens of the prompt, -1 where the engine routes; ``None`` if for none.
        """
        with self._lock:
            return self._tree.routes_to_follow(_as_ids(prompt_ids), version)

    def known_rows(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens at the start of a prompt have routes here: ``routed_experts_prompt_start``."""
        with self._lock:
            return self._tree.known_rows(_as_ids(prompt_ids))

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
        followed: int = 0,
    ) -> None:
        """Add a call: its prompt, and an answer for each choice. Aborted and empty answers are left out.

        Args:
            prompt_ids: ``[P]``, as they were sent.
            completion: the engine's answer, with log-probs. Its routes may have all rows, or only the last ones.
            messages: the chat of the prompt, as the client sent it.
            message_returned: what the client was given for the answer; of several choices, one each, in their order.
            sampling_params: what the engine was asked with, a mapping or vLLM's object.
            followed: tokens of the prompt whose experts the engine was given.

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
        given = {**fields_of(sampling_params), **self.sampling_params}
        params = {name: value for name, value in given.items() if value is not None}
        rows = {output.index: self._tree.checked(output, len(prompt)) for output in outputs}
        with self._lock:
            self._check_open()
            new = len(prompt) - self._tree.place(prompt).matched
            self._check_room(new + sum(len(output.token_ids) for output in outputs))
            conversation = None if messages is None else self._conversation(messages)[-1][0]
            self.num_calls += 1
            asked = self._tree.add_prompt(prompt)
            for output in outputs:
                node = self._tree.add_answer(asked, completion, output, rows[output.index], params, followed)
                # an answer with ends of turns inside, as there may be if they are ignored, is not one message
                if conversation is not None and returned and not self._tree.count_ends(node.ids[:-1]):
                    message = returned[completion.outputs.index(output)]
                    self._returned[_digest(conversation, _said(message))].append((node, _reasoning(message)))

    def trajectories(self, shared: Literal["first", "all"] = "first") -> list[TensorDict]:
        """Return a TensorDict ``[]`` for each leaf of the tree, in the order in which the leaves' answers came.

        It has the keys of a rollout (docs/loop.md). ``("masks", "all_assistant_mask")`` is True on the sampled tokens
        of every turn of its path, and only there are log-probs known, so that any masking of the losses trains on these
        tokens. ``"prompt"`` are the tokens before the first of them. A leaf whose answers were sampled at several
        temperatures has one trajectory for each, since a sample is scored at one.

        Args:
            shared: how answers that several leaves have in common count. ``"first"``: they are masked in all leaves but
                the first, so that each sampled token is trained on once. ``"all"``: in each leaf.

        Raises:
            ValueError: ``shared`` is neither.
        """
        # not at the top: TorchRL's classes are in a module that imports vLLM, which a server does when it starts
        from torchrl_moe.http.trajectories import trajectories_of

        with self._lock:
            return [td for td, _ in trajectories_of(self._tree.answers, shared)]

    def to_safetensors(self, shared: Literal["first", "all"] = "first", routes: bool = True) -> bytes:
        """Return the trajectories as a file, which :func:`load_trajectories` reads.

        Args:
            shared: see :meth:`trajectories`.
            routes: False leaves the routes here, to be asked for by :meth:`routes_to_safetensors`.
        """
        from torchrl_moe.http.trajectories import to_safetensors, trajectories_of

        with self._lock:
            found = trajectories_of(self._tree.answers, shared)
        return to_safetensors(found, routes)

    def routes_to_safetensors(self, answer: int) -> bytes:
        """Return the routes ``[T, L, K]`` of the trajectory that ends in an answer, given by its number, as a file.

        Raises:
            KeyError: there is no such answer, or the engine captures no routes.
        """
        with self._lock:
            if self._tree.layout is None or not 0 <= answer < len(self._tree.answers):
                raise KeyError(f"session {self.id!r} has no routes of an answer {answer}")
            return safetensors.numpy.save({"routes": self._tree.answers[answer].path_routes()})

    @property
    def num_tokens(self) -> int:
        """Tokens that it keeps, each counted once."""
        return self._tree.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all that it keeps."""
        with self._lock:
            return self._tree.nbytes

    def close(self) -> None:
        """Take no more calls, and cancel those under way. What was recorded stays readable. Idempotent."""
        with self._lock:
            self.is_closed = True
            cancels = list(self._under_way.values())
        for cancel in cancels:
            cancel()

    def __repr__(self) -> str:
        return (
            f"Session({self.id!r}, calls={self.num_calls}, tokens={self.num_tokens}, under_way={len(self._under_way)})"
        )

    # -- where a prompt belongs -------------------------------------------------------------------------------------

    def _continued(self, rendered: Ids) -> tuple[Node, Ids]:
        """Return the answer that a prompt continues, by ids or text, and the ids after it; the root if none."""
        best = self._tree.root, rendered
        reached = [best]
        while reached:
            node, rest = reached.pop()
            if node.answer is not None and (node.answers, -len(rest)) > (best[0].answers, -len(best[1])):
                best = node, rest
            for child in node.children:  # the newest is popped first
                same = np.array_equal(child.ids, rest[: len(child.ids)])
                # half a character may begin like the mark that stands for it in the text that came back
                is_half = same and self._decode(child.ids[-HALF:]).endswith(CUT)
                left = None if same and not is_half else self._after_text(child, rest)
                if left is None and same:
                    left = rest[len(child.ids) :]
                if left is not None:
                    reached.append((child, left))
        return best

    def _after_text(self, node: Node, rest: Ids) -> Ids | None:
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
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _conversation(self, messages: Sequence[Message]) -> list[tuple[bytes, Node | None]]:
        """Return the digest of a conversation before the first and after each message, and the answer it ends in."""
        found: list[tuple[bytes, Node | None]] = [(b"", None)]
        # the answers that the last recognised message may be: several say the same, and what follows tells them apart
        possible: list[Node] = []
        for message in messages:
            if not isinstance(message, Mapping):
                raise ValueError(
                    f"messages are mappings, such as {{'role': ..., 'content': ...}}, got {shown(message)}"
                )
            digest, reasoning = _digest(found[-1][0], _said(message)), _reasoning(message)
            fits = [
                (own == reasoning, place, node)
                for place, (node, own) in enumerate(self._returned.get(digest, ()))
                if reasoning in (b"", own) and _comes_after(node, possible)
            ]
            if fits:  # one that was returned as it is, then the newest
                possible = [node for *_, node in sorted(fits, key=lambda fit: fit[:2], reverse=True)]
            elif reasoning:  # other reasoning than an answer's is another message, and so is any that was not returned
                digest = _digest(digest, reasoning)
            found.append((digest, possible[0] if fits else None))
        return found

    def _answer_to(self, messages: Sequence[Message], rendered: Ids) -> tuple[Node, Ids] | None:
        """Return the last answer that messages contain as it was returned, and the ids that were rendered after it."""
        ends = np.flatnonzero(np.isin(rendered, self._tree.end_ids))
        for _, node in reversed(self._conversation(messages)):
            if node is not None and (left := self._after_turns(node, rendered, ends)) is not None:
                return node, left
        return None

    def _after_turns(self, node: Node, rendered: Ids, ends: NDArray[np.intp]) -> Ids | None:
        """Return what was rendered after an answer, if it was rendered alike before and between the answers.

        Messages are told apart by their ends: rewriting an answer does not change how many there are. How a template
        opens an answer may differ, so that part is not compared.
        """
        at, given = 0, np.zeros(0, np.int32)
        for one in node.path():
            if one.answer is None:  # split or not
                given = np.concatenate([given, one.ids])
                continue
            given_ends = np.flatnonzero(np.isin(given, self._tree.end_ids))
            closed = given[: given_ends[-1] + 1] if len(given_ends) else given[:0]
            assert one.parent is not None
            turns = one.parent.ends
            if turns >= len(ends) or not np.array_equal(closed, rendered[at : at + len(closed)]):
                return None
            # the end of the turn is the answer's last token, unless it was cut
            at, given = int(ends[turns]) + (one.ends - turns), given[:0]
        return rendered[at:]

    # -- limits -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise SessionClosedError(f"session {self.id!r} has ended: it takes no more calls")

    def _check_room(self, new: int) -> None:
        if self.num_tokens + new > self._max_tokens:
            raise SessionLimitError(
                f"session {self.id!r} has {self.num_tokens} tokens, and this call adds {new}: the limit is "
                f"{self._max_tokens} (Limits.tokens_per_session)"
            )


# -- all sessions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may ask for; beyond it they get status 429.

    Or 413 for a body, 400 for ``answers`` and headers, 504 for ``request_seconds``; for ``client_seconds`` 408 or a
    closed connection.

    Attributes:
        requests: under way at a time, of all clients.
        requests_per_session: under way at a time, of one session.
        tokens: that requests under way may take together: their prompts, and ``n`` times their ``max_tokens``.
        answers: the largest ``n``.
        head_bytes: of a request's headers.
        body_bytes: of a request.
        sessions: at a time.
        tokens_per_session: that are kept, each once.
        session_seconds: after which a session that nobody uses is forgotten.
        request_seconds: that a request may take; ``None``: no limit.
        client_seconds: that a client may take to send the headers of a request, or a piece of its body, and to read a
            piece of its answer.
    """

    requests: int = 4096
    requests_per_session: int = 256
    tokens: int = 1 << 26
    answers: int = 128
    head_bytes: int = 64 << 10
    body_bytes: int = 32 << 20
    sessions: int = 4096
    tokens_per_session: int = 1 << 22
    session_seconds: float = 3600.0
    request_seconds: float | None = None
    client_seconds: float = 60.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name.endswith("_seconds"):
                check_number(one.name, getattr(self, one.name), above=0, none=one.name == "request_seconds")
            else:
                check_number(one.name, getattr(self, one.name), 1, whole=True)


class SessionStore:
    """The sessions of a server, by their ids. All methods may be called from any thread.

    Args:
        tokenizer: the model's, which prompts are rendered with.
        layout: the routers of the model, ``engine.routing_layout``; ``None``: no routes are kept.
        limits: those of sessions count here. A session with requests under way is not forgotten.
        end_of_turn_ids: the ids that end a message, by which messages are told apart in a rendered chat. Default: the
            tokenizer's end of text.
        clock: the time in seconds, for tests.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        layout: RoutingLayout | None = None,
        limits: Limits | None = None,
        *,
        end_of_turn_ids: Collection[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        own = getattr(tokenizer, "eos_token_id", None)
        self._ends = ({own} if own is not None else set()) if end_of_turn_ids is None else set(end_of_turn_ids)
        # its own: the server encodes with the given one, in other threads
        self._tokenizer, self._layout = copy.deepcopy(tokenizer), layout
        self._limits, self._clock = limits or Limits(), clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the longest unused first
        self._ended: OrderedDict[str, None] = OrderedDict()  # ids that are over for good, the last few
        self._lock = threading.Lock()

    def get(self, session_id: str) -> Session:
        """Return a session; one that does not exist is created.

        Raises:
            ValueError: the id is not text of 1 to 256 characters.
            SessionLimitError: there are as many others as the limits allow.
            SessionClosedError: it was closed for good.
        """
        if not isinstance(session_id, str) or not 0 < len(session_id) <= LONGEST_ID:
            raise ValueError(f"a session's id is text of 1 to {LONGEST_ID} characters, got {shown(session_id)}")
        with self._lock:
            self._forget_unused()
            if session_id in self._ended:
                raise SessionClosedError(f"session {session_id!r} is over")
            session = self._sessions.get(session_id)
            if session is None:
                if len(self._sessions) >= self._limits.sessions:
                    raise SessionLimitError(
                        f"there are {len(self._sessions)} sessions, as many as Limits.sessions allows: close one"
                    )
                most = self._limits.tokens_per_session
                session = Session(session_id, self._tokenizer, self._layout, most, self._ends)
                self._sessions[session_id] = session
            session.used_at = self._clock()
            self._sessions.move_to_end(session_id)
            return session

    def close(self, session_id: str, *, for_good: bool = False) -> None:
        """Close a session and forget it; an unknown one is ignored. ``for_good``: nobody begins another of its id."""
        with self._lock:
            if for_good:
                self._ended[session_id] = None
                while len(self._ended) > self._limits.sessions:
                    self._ended.popitem(last=False)
            session = self._sessions.pop(session_id, None)
        if session is not None:
            session.close()

    def open(self) -> list[Session]:
        """Return the sessions, which are not used by this."""
        with self._lock:
            self._forget_unused()
            return list(self._sessions.values())

    def ids(self) -> list[str]:
        """Return the ids of the sessions, the longest unused first."""
        with self._lock:
            self._forget_unused()
            return list(self._sessions)

    def _forget_unused(self) -> None:
        now = self._clock()
        for session in list(self._sessions.values()):
            if now - session.used_at < self._limits.session_seconds:
                return
            if session._under_way:
                session.used_at = now
                self._sessions.move_to_end(session.id)
            else:
                del self._sessions[session.id]
                session.close()
