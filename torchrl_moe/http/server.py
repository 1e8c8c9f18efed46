"""``serve_http``: an engine behind OpenAI's and Anthropic's APIs, with sessions that keep every token.

vLLM's own server code answers: its routers, renderers, parsers and protocols, over :class:`ServiceClient`. What it has
no place for is here: who may come in, how much at a time, the session and the weight version of a request, and what is
recorded of an answer before its client has it. The server runs in a thread with its own event loop.

.. code-block:: text

    client --> Door: key, limits, session, version --> vLLM's handlers --> ServiceClient --> engine.agenerate
                 |                                          |                   |
                 +--- /sessions/ID, /metrics, /health       +--- the messages --+--- tokens, routes ---> Session
"""

from __future__ import annotations

import asyncio
import difflib
import hmac
import ipaddress
import json
import logging
import os
import socket
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, fields
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from urllib.parse import unquote

from torchrl_moe._checks import check_number, shown
from torchrl_moe._lazy import without_collections
from torchrl_moe.errors import EngineError, SessionError, TorchRLMoEError
from torchrl_moe.http.sessions import Session, SessionStore

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI
    from starlette.responses import Response

    from torchrl_moe.http.engine_client import Call, ServiceClient
    from torchrl_moe.modules.serving.service import GenerationService

__all__ = ["HttpServer", "Limits", "check_address", "serve_http"]

LOG = logging.getLogger(__name__)
Message: TypeAlias = "dict[str, Any]"
Scope: TypeAlias = "dict[str, Any]"
Receive: TypeAlias = "Callable[[], Awaitable[Any]]"
Send: TypeAlias = "Callable[[Any], Awaitable[None]]"

SESSION_HEADER, VERSION_HEADER = "x-session-id", "x-weight-version"
START_SECONDS = 300.0  # importing vLLM's server takes 10 s, on a busy machine a minute
CLOSE_SECONDS = 2  # that requests get to end by themselves
OPTIONS = (
    "chat_template", "chat_template_content_format", "default_chat_template_kwargs", "enable_auto_tool_choice",
    "enable_force_include_usage", "enable_prompt_tokens_details", "exclude_tools_when_tool_choice_none", "lora_modules",
    "reasoning_parser", "reasoning_parser_plugin", "response_role", "return_tokens_as_token_ids", "tool_call_parser",
    "tool_parser_plugin", "tool_strict_level", "trust_request_chat_template",
)  # fmt: skip
"""Options of ``vllm serve`` that say how chats are rendered and parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may ask for; beyond it they get status 429, or 413 for a body, 400 for ``answers``.

    Attributes:
        requests: under way at a time, of all clients.
        requests_per_session: under way at a time, of one session.
        tokens: that requests under way may take together: their prompts, and ``n`` times their ``max_tokens``.
        answers: the largest ``n``.
        body_bytes: of a request.
        sessions: at a time.
        tokens_per_session: that are kept, each once.
        session_seconds: after which a session that nobody uses is forgotten.
        request_seconds: that a request may take; ``None``: no limit.
        client_seconds: that a client may take to send a piece of its request, or to read a piece of its answer.
    """

    requests: int = 4096
    requests_per_session: int = 256
    tokens: int = 1 << 26
    answers: int = 128
    body_bytes: int = 32 << 20
    sessions: int = 4096
    tokens_per_session: int = 1 << 22
    session_seconds: float = 3600.0
    request_seconds: float | None = None
    client_seconds: float = 60.0

    def __post_init__(self) -> None:
        for one in fields(self):
            is_time = one.name.endswith("_seconds")
            value = getattr(self, one.name)
            if is_time:
                check_number(one.name, value, above=0, none=one.name == "request_seconds")
            else:
                check_number(one.name, value, 1, whole=True)


def serve_http(
    engine: GenerationService,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    served_model_name: str | Sequence[str] | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> HttpServer:
    """Serve an engine over HTTP, and return once it answers.

    Args:
        engine: it serves already, and stays its owner's: closing the server leaves it running.
        host: the address to listen on.
        port: 0 for any that is free; the server's ``url`` has it.
        api_key: which clients must send, as OpenAI's and Anthropic's do. Needed unless ``host`` is this machine's own
            loopback address.
        model: folder or hub name of the model's configuration and tokenizer; default: the engine's. This process reads
            them.
        served_model_name: what clients call the model, one name or several. Default: the last part of its path, and the
            path.
        limits: see :class:`Limits`.
        **options: of ``vllm serve``: ``tool_call_parser``, ``reasoning_parser``, ``chat_template`` and others of
            :data:`OPTIONS`, as keywords. A tool parser turns ``enable_auto_tool_choice`` on.

    Raises:
        ValueError: no ``api_key`` where one is needed, an unknown option, or an engine without a model.
        RuntimeError: the engine does not run.
        OSError: the address is in use, or not this machine's.
    """
    check_address(host, port, api_key)
    _check_options(options)
    if not engine.is_running:
        raise RuntimeError("serve_http: the engine is not running: start it first")
    arguments: Mapping[str, Any] = getattr(engine, "engine_args", {})
    path = os.fspath(model if model is not None else arguments.get("model") or "")
    if not path:
        raise ValueError("this engine names no model: pass model=, a folder with its configuration and tokenizer")
    names = [served_model_name] if isinstance(served_model_name, str) else list(served_model_name or ())
    if not names:
        names = list(dict.fromkeys([Path(path).name, path]))
    # bound here: an address in use is the caller's error, and what was started would have to end again
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=2048)
    try:
        with without_collections():
            from torchrl_moe.http.engine_client import ServiceClient, frontend_config
        most = limits or Limits()
        info = engine.infos[0]
        config = frontend_config(path, info.max_model_len, info.dtype, arguments, names)
        client = ServiceClient(engine, config, most.answers, most.tokens, most.request_seconds)
        return HttpServer(client, listening, api_key, most, _arguments(path, names, options))
    except BaseException:
        listening.close()
        raise


def check_address(host: str, port: int, api_key: str | None) -> None:
    """Raise ``ValueError`` for an address that cannot be, or that needs a key and has none."""
    check_number("port", port, 0, 65535, whole=True)
    if not isinstance(host, str) or not host:
        raise ValueError(f"host must be an address or a name, got {shown(host)}")
    if api_key is not None and (not isinstance(api_key, str) or not api_key or not api_key.isascii()):
        raise ValueError("api_key must be text of ASCII characters, and not empty")
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = host == "localhost"
    if not is_own and api_key is None:
        raise ValueError(f"host={host!r} is reached from other machines: pass api_key=, or listen on 127.0.0.1")


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, 1)
            raise ValueError(
                f"serve_http has no option {name!r}"
                + (f": do you mean {near[0]}?" if near else f"; there are {', '.join(OPTIONS)}")
            )


def _arguments(model: str, names: Sequence[str], options: Mapping[str, Any]) -> Namespace:
    """Return the arguments that vLLM's server code reads: its defaults, and what was given."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = dict(options)
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.model, arguments.served_model_name = model, list(names)
    arguments.disable_log_stats = True
    if (parser := given.pop("reasoning_parser", None)) is not None:
        arguments.structured_outputs_config = copy(arguments.structured_outputs_config)
        arguments.structured_outputs_config.reasoning_parser = parser
    if given.get("tool_call_parser") is not None:
        given.setdefault("enable_auto_tool_choice", True)
    for name, value in given.items():
        setattr(arguments, name, value)
    if arguments.tool_parser_plugin:
        ToolParserManager.import_tool_parser(arguments.tool_parser_plugin)
    if arguments.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(arguments.reasoning_parser_plugin)
    return arguments


class HttpServer:
    """A server that runs; made by :func:`serve_http`.

    Attributes:
        url: where it answers, such as ``http://127.0.0.1:8000``. OpenAI's clients take ``url + "/v1"`` as their base
            URL, Anthropic's take ``url``.
        sessions: the sessions of its clients.
    """

    def __init__(
        self, client: ServiceClient, listening: socket.socket, api_key: str | None, limits: Limits, arguments: Namespace
    ) -> None:
        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._client = client
        tokenizer = client.renderer.get_tokenizer()
        ends = {int(one) for one in _ends_of_turn(client, tokenizer)}
        self.sessions = SessionStore(
            tokenizer,
            client.engine.routing_layout,
            max_tokens_per_session=limits.tokens_per_session,
            max_sessions=limits.sessions,
            ttl=limits.session_seconds,
            end_of_turn_ids=ends or None,
        )
        self._door = _Door(client, self.sessions, api_key, limits)
        self._arguments = arguments
        self._server: uvicorn.Server | None = None
        self._is_closing = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(listening, started), name="http", daemon=True)
        self._thread.start()
        try:
            started.result(START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def requests(self) -> int:
        """Requests under way."""
        return self._door.requests

    def session(self, session_id: str) -> Session:
        """Return a session, as a client of ``/sessions/ID/v1`` has it; one that does not exist is created.

        Raises:
            ValueError: the id is not text of 1 to 256 characters.
            SessionLimitError: there are too many.
        """
        return self.sessions.get(session_id)

    def close(self) -> None:
        """Stop answering, abort what is under way, and close the sessions. Idempotent; the engine runs on."""
        self._is_closing = True  # it may not have begun yet
        for name in self.sessions.ids():
            self.sessions.close(name)  # which aborts its requests
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HttpServer({self.url}, requests={self.requests}, sessions={len(self.sessions.ids())})"

    # -- in its thread ------------------------------------------------------------------------------------------------

    def _run(self, listening: socket.socket, started: Future[None]) -> None:
        try:
            import uvloop  # as vLLM's own server does

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(listening, started))
        except BaseException as error:
            if started.done():
                LOG.exception("the HTTP server has ended: %r", error)
            else:
                started.set_exception(error)
        finally:
            self._client.shutdown()
            listening.close()

    async def _serve(self, listening: socket.socket, started: Future[None]) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                started.set_result(None)

        self._door.app = await _application(self._client, self._arguments)
        config = uvicorn.Config(
            self._door,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        self._server = Server(config)
        if not self._is_closing:
            await self._server.serve([listening])


def _ends_of_turn(client: ServiceClient, tokenizer: Any) -> Iterable[int]:
    """Return the ids that end an answer: the tokenizer's, and those of the model's generation config."""
    found = client.model_config.try_get_generation_config().get("eos_token_id") or []
    yield from [found] if isinstance(found, int) else found
    if tokenizer.eos_token_id is not None:
        yield tokenizer.eos_token_id


async def _application(client: ServiceClient, arguments: Namespace) -> FastAPI:
    """Return vLLM's routers with their state; those that control an engine are left out."""
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException
    from vllm.entrypoints.anthropic import api_router as of_messages
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.openai.chat_completion import api_router as of_chat
    from vllm.entrypoints.openai.completion import api_router as of_completions
    from vllm.entrypoints.openai.models import api_router as of_models
    from vllm.entrypoints.openai.responses import api_router as of_responses
    from vllm.entrypoints.scale_out.token_in_token_out import api_router as of_tokens
    from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)  # to a path without session
    app.state.args = arguments
    for module in (of_models, of_chat, of_completions, of_responses, of_messages, of_tokens):
        app.include_router(module.router)
    init_exception_handler(app)
    app.exception_handler(HTTPException)(http_exception_handler)  # of an unknown path
    await init_app_state(client, app.state, arguments, ("generate",))
    _wrap_handlers(app.state)
    return app


# -- what handlers do besides -----------------------------------------------------------------------------------------


def _wrap_handlers(state: Any) -> None:
    """Check the fields of each request, and tell its call what it is about; chats are recorded with their messages."""
    from anthropic.types.beta import message_create_params as of_messages
    from openai.types import completion_create_params as of_completions
    from openai.types.chat import completion_create_params as of_chat
    from openai.types.responses import response_create_params as of_responses

    for handler, name, known in (
        (state.openai_serving_chat, "create_chat_completion", of_chat.CompletionCreateParamsBase),
        (state.openai_serving_completion, "create_completion", of_completions.CompletionCreateParamsBase),
        (state.openai_serving_responses, "create_responses", of_responses.ResponseCreateParamsBase),
        (state.anthropic_serving_messages, "create_messages", of_messages.MessageCreateParamsBase),
        (state.serving_tokens, "serve_tokens", None),
    ):
        setattr(handler, name, _checked(getattr(handler, name), {} if known is None else known.__annotations__))
    for handler in (state.openai_serving_chat, state.anthropic_serving_messages):
        handler.create_chat_completion = _recorded(handler.create_chat_completion)


def _checked(create: Callable[..., Awaitable[Any]], known: Mapping[str, Any]) -> Callable[..., Awaitable[Any]]:
    """Refuse fields that neither vLLM nor the API has: a misspelled one would change nothing, in silence."""
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest, GenerateTokensResponse
    from vllm.exceptions import VLLMValidationError

    from torchrl_moe.http.engine_client import CALL, NamedTokens

    async def checked(request: Any, raw_request: Any = None) -> Any:
        body = await raw_request.json()
        kind = type(request)
        ours = {one.alias for one in kind.model_fields.values() if one.alias} | kind.model_fields.keys()
        if unknown := sorted(body.keys() - ours - known.keys()):
            raise VLLMValidationError(f"unknown fields: {', '.join(map(repr, unknown))}", parameter=unknown[0])
        call = CALL.get()
        call.wants_routes = isinstance(request, GenerateRequest) or "routed_experts_prompt_start" in body
        call.is_text = not isinstance(request, GenerateRequest) and not _is_ids(body.get("prompt"))
        answer = await create(request, raw_request)
        return NamedTokens.model_construct(**dict(answer)) if isinstance(answer, GenerateTokensResponse) else answer

    return checked


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)


def _recorded(create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Record the answers to a chat in its session, with the messages that the client got, before it has all of them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

    from torchrl_moe.http.engine_client import CALL

    async def recorded(request: Any, raw_request: Any = None) -> Any:
        call = CALL.get()
        if call.session is None:
            return await create(request, raw_request)
        call.messages = [_plain(message) for message in request.messages]
        answer = await create(request, raw_request)
        if isinstance(answer, ChatCompletionResponse):
            _record(call, [choice.message.model_dump(exclude_none=True) for choice in answer.choices])
        elif isinstance(answer, AsyncIterator):
            return _recorded_stream(call, answer, request.n or 1)
        return answer

    return recorded


async def _recorded_stream(call: Call, stream: AsyncIterator[str], choices: int) -> AsyncIterator[str]:
    messages: list[Message] = [{"role": "assistant", "content": ""} for _ in range(choices)]
    over: set[int] = set()
    async for event in stream:
        if len(over) < choices and event.startswith("data: {"):
            for choice in json.loads(event[len("data: ") :]).get("choices", ()):
                _add(messages[choice["index"]], choice["delta"])
                if choice.get("finish_reason") is not None:
                    over.add(choice["index"])
            if len(over) == choices:  # before the client knows that it may go on
                try:
                    _record(call, messages)
                except SessionError as error:
                    yield f"data: {json.dumps(_error(HTTPStatus.TOO_MANY_REQUESTS, str(error)))}\n\n"
                    yield "data: [DONE]\n\n"
                    return
        yield event


def _add(message: Message, delta: Mapping[str, Any]) -> None:
    """Add a delta of a stream to its message."""
    for name in ("content", "reasoning"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= piece["index"]:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        one, function = calls[piece["index"]], piece.get("function") or {}
        one["id"] = piece.get("id") or one["id"]
        for name in ("name", "arguments"):
            one["function"][name] += function.get(name) or ""


def _record(call: Call, messages: Sequence[Message]) -> None:
    from torchrl_moe.http.engine_client import http_error

    assert call.session is not None
    for answered in call.answered:
        try:
            call.session.record(
                answered.prompt_ids,
                answered.completion,
                messages=call.messages,
                message_returned=messages,
                sampling_params=answered.sampling_params,
            )
        except SessionError as error:
            raise http_error(error) from error


def _plain(value: Any) -> Any:
    """Return a message as JSON has it: vLLM's requests hold some of its lists as iterators."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True)
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# -- the door ---------------------------------------------------------------------------------------------------------


class _TooLargeError(Exception):
    """A body has more bytes than it may have."""


class _Door:
    """The ASGI application around vLLM's: who comes in, with what, and how many at a time."""

    def __init__(self, client: ServiceClient, sessions: SessionStore, api_key: str | None, limits: Limits) -> None:
        self.app: Any = None
        self.requests = 0
        self._client, self._sessions, self._limits = client, sessions, limits
        self._key = None if api_key is None else api_key.encode()
        self._of_session: Counter[str] = Counter()  # requests under way
        self._statuses: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        send = self._in_time(send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["raw_path"].decode("latin-1")
        if path == "/health":
            await (await self._health())(scope, receive, send)
            return
        answer: Response | None = None
        session_id, rest = _session_in(path, headers)
        if not self._knows(headers):
            answer = _refusal(HTTPStatus.UNAUTHORIZED, "the api_key is missing or wrong", path)
        elif path == "/metrics":
            answer = self._metrics()
        elif session_id is not None and (rest == "" or rest.startswith("/routes/")):
            answer = self._of_a_session(session_id, rest, scope)
        if answer is not None:
            try:
                await answer(scope, receive, send)
            except TimeoutError:
                LOG.warning("a client of %s does not read its answer", path)
            return
        scope = {**scope, "path": unquote(rest), "raw_path": rest.encode("latin-1")}
        await self._counted(session_id, headers, scope, receive, send)

    def _in_time(self, send: Send) -> Send:
        """Return what sends a piece of an answer to a client that must read it within its time."""

        async def in_time(message: Any) -> None:
            async with asyncio.timeout(self._limits.client_seconds):
                await send(message)

        return in_time

    def _knows(self, headers: Mapping[str, str]) -> bool:
        if self._key is None:
            return True
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode("latin-1"), self._key)

    async def _counted(
        self, session_id: str | None, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a request on if there is a place for it."""
        most, path = self._limits, scope["path"]
        name = session_id or ""
        if self.requests >= most.requests or (name and self._of_session[name] >= most.requests_per_session):
            whose = "of this session " if self.requests < most.requests else ""
            refusal = _refusal(HTTPStatus.TOO_MANY_REQUESTS, f"too many requests {whose}are under way", path)
            await refusal(scope, receive, send)
            return
        self.requests += 1
        self._of_session[name] += 1
        try:
            await self._passed(session_id, headers, scope, receive, send)
        finally:
            self.requests -= 1
            self._of_session[name] -= 1
            if not self._of_session[name]:
                del self._of_session[name]

    async def _passed(
        self, session_id: str | None, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Read a request, and have vLLM's application answer it, as a call of its session."""
        from torchrl_moe.http.engine_client import CALL, STATUS, Call

        path, refusal = scope["path"], None
        try:
            body = await self._body(headers, receive)
            if body is None:  # the client is gone
                return
            version = _version(headers.get(VERSION_HEADER))
            session = None if session_id is None else self._sessions.get(session_id)
        except _TooLargeError as error:
            refusal = _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error), path)
        except TimeoutError:
            refusal = _refusal(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time", path)
        except ValueError as error:
            refusal = _refusal(HTTPStatus.BAD_REQUEST, str(error), path)
        except TorchRLMoEError as error:
            refusal = _refusal(STATUS.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR), str(error), path)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        call = Call(session=session, version=version)
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Any:
            return messages.pop() if messages else await receive()

        async def write(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._statuses[message["status"]] += 1
                if call.answered:
                    oldest = min(_oldest(one.completion) for one in call.answered)
                    message["headers"] = [*message["headers"], (VERSION_HEADER.encode(), str(oldest).encode())]
            await send(message)

        CALL.set(call)  # of this task, which serves this request only
        try:
            await self.app(scope, read, write)
        except TimeoutError:
            LOG.warning("a client of %s does not read its answer: the request was aborted", path)
        finally:
            self._client.over(call)

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes | None:
        """Return the whole body; ``None`` if its client is gone."""
        most = self._limits.body_bytes
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise _TooLargeError(f"a body of {length} bytes: {most} at most")
        pieces, size, more = [], 0, True
        while more:
            async with asyncio.timeout(self._limits.client_seconds):
                message = await receive()
            if message["type"] != "http.request":
                return None
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > most:
                raise _TooLargeError(f"a body of more than {most} bytes")
            more = message.get("more_body", False)
        return b"".join(pieces)

    # -- answers of its own -------------------------------------------------------------------------------------------

    def _of_a_session(self, session_id: str, rest: str, scope: Scope) -> Response:
        """Answer ``GET /sessions/ID``, ``GET /sessions/ID/routes/N`` and ``DELETE /sessions/ID``."""
        from starlette.responses import Response

        method, number = scope["method"], rest.removeprefix("/routes/")
        if session_id not in self._sessions.ids():
            return _refusal(HTTPStatus.NOT_FOUND, f"there is no session {session_id!r}")
        if method == "DELETE" and not rest:
            self._sessions.close(session_id)
            return Response(status_code=HTTPStatus.NO_CONTENT)
        if method != "GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not for sessions")
        session = self._sessions.get(session_id)
        try:
            if number.isdecimal():
                data = session.routes_to_safetensors(int(number))
            elif rest:
                return _refusal(HTTPStatus.NOT_FOUND, f"routes are named by the number of an answer, not {number!r}")
            else:
                data = session.to_safetensors(routes=b"routes=false" not in scope["query_string"])
        except (LookupError, ValueError) as error:
            return _refusal(HTTPStatus.NOT_FOUND, str(error))
        return Response(data, media_type="application/octet-stream")

    async def _health(self) -> Response:
        from starlette.responses import Response
        from vllm.exceptions import VLLMError

        try:
            await self._client.check_health()
        except VLLMError as error:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        return Response(status_code=HTTPStatus.OK)

    def _metrics(self) -> Response:
        """Return the engine's metrics in Prometheus' format, and the server's own."""
        from starlette.responses import PlainTextResponse

        kept = self._sessions.open()
        prefix = "torchrl_moe_http_"
        lines = [
            f"# TYPE {prefix}requests gauge\n{prefix}requests {self.requests}",
            f"# TYPE {prefix}tokens gauge\n{prefix}tokens {self._client.tokens}",
            f"# TYPE {prefix}sessions gauge\n{prefix}sessions {len(kept)}",
            f"# TYPE {prefix}session_bytes gauge\n{prefix}session_bytes {sum(one.nbytes for one in kept)}",
            f"# TYPE {prefix}answers counter",
            *(f'{prefix}answers_total{{status="{code}"}} {count}' for code, count in sorted(self._statuses.items())),
        ]
        try:
            own = self._client.engine.prometheus()
        except (EngineError, ImportError, RuntimeError) as error:  # one that was shut down
            own = f"# the engine has no metrics: {error}\n"
        return PlainTextResponse(own + "\n".join(lines) + "\n")


def _session_in(path: str, headers: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the session that a request names, in its path or in a header, and the rest of its path.

    >>> _session_in("/sessions/a%2Fb/v1/models", {})
    ('a/b', '/v1/models')
    >>> _session_in("/v1/models", {"x-session-id": "c"})
    ('c', '/v1/models')
    """
    if path.startswith("/sessions/"):
        name, slash, rest = path.removeprefix("/sessions/").partition("/")
        return unquote(name), slash + rest
    return headers.get(SESSION_HEADER) or None, path


def _version(text: str | None) -> str | int | None:
    """Return what a request says of its weights' version."""
    if text is None or text in ("pin", "latest"):
        return text
    if not text.isdecimal():
        raise ValueError(
            f"{VERSION_HEADER}: {text!r} is not 'pin' (the version that the session began with), 'latest', or a "
            "number, the oldest version that will do"
        )
    return int(text)


def _oldest(completion: Any) -> int:
    return min((int(one.policy_versions.min()) for one in completion.outputs if len(one.policy_versions)), default=-1)


def _error(status: HTTPStatus, message: str) -> dict[str, Any]:
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    plain: dict[str, Any] = create_error_response(message, status.phrase, status).model_dump()
    return plain


def _refusal(status: HTTPStatus, message: str, path: str = "") -> Response:
    """Return an error in the form of the API that was asked."""
    from starlette.responses import JSONResponse

    body = _error(status, message)
    if path.endswith(("/v1/messages", "/v1/messages/count_tokens")):
        body = {"type": "error", "error": {"type": body["error"]["type"], "message": message}}
    return JSONResponse(body, status_code=status)
