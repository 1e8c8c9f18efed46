"""The door: who comes in, with what and how many at a time, before vLLM's server code answers; and what is recorded.

vLLM's routers and handlers render, parse and write the answers of each API. What they have no place for is here: keys,
limits, sessions, weight versions, and the session's record of an answer before its client has it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from copy import copy
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import unquote

from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from fastapi import FastAPI
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chat
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.anthropic import api_router as messages_api
from vllm.entrypoints.cli.serve import make_arg_parser  # its own module is another one in 0.33
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.openai.chat_completion import api_router as chat_api
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion import api_router as completions_api
from vllm.entrypoints.openai.models import api_router as models_api
from vllm.entrypoints.openai.responses import api_router as responses_api
from vllm.entrypoints.scale_out.token_in_token_out import api_router as tokens_api
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest, GenerateTokensResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from torchrl_moe.errors import EngineError, SessionError, TorchRLMoEError
from torchrl_moe.http.engine_client import CALL, Call, NamedTokens, ServiceClient, http_error
from torchrl_moe.http.sessions import Limits, SessionStore

LOG = logging.getLogger(__name__)
Message: TypeAlias = "dict[str, Any]"
Create: TypeAlias = "Callable[..., Awaitable[Any]]"
"""A handler's method: from a request to an answer, or a stream of events."""

SESSION_HEADER, VERSION_HEADER = "x-session-id", "x-weight-version"


def server_arguments(model: str, names: Sequence[str], options: Mapping[str, Any]) -> Namespace:
    """Return the arguments that vLLM's server code reads: its defaults, and what was given.

    Raises:
        ValueError: vLLM has no parser of that name.
    """
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
    for option, parsers in (("tool_call_parser", ToolParserManager), ("reasoning_parser", ReasoningParserManager)):
        if (parser := options.get(option)) is not None and parser not in (known := parsers.list_registered()):
            raise ValueError(f"{option}={parser!r}: vLLM has no such parser; it has {', '.join(sorted(known))}")
    return arguments


async def _application(client: ServiceClient, arguments: Namespace) -> FastAPI:
    """Return vLLM's routers with their state; those that control an engine are left out."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)  # to a path without session
    app.state.args = arguments
    for module in (models_api, chat_api, completions_api, responses_api, messages_api, tokens_api):
        app.include_router(module.router)
    init_exception_handler(app)
    app.exception_handler(HTTPException)(http_exception_handler)  # of an unknown path
    for kind, handle in list(app.exception_handlers.items()):
        app.exception_handler(kind)(_in_form_of_api(handle))
    await init_app_state(client, app.state, arguments, ("generate",))
    _wrap_handlers(app.state)
    return app


def _in_form_of_api(handle: Callable[..., Any]) -> Callable[..., Awaitable[Response]]:
    async def answer(request: Any, error: Exception) -> Response:
        response = await handle(request, error)
        return _formed(json.loads(response.body), request.url.path)

    return answer


# -- what handlers do besides -----------------------------------------------------------------------------------------


def _wrap_handlers(state: Any) -> None:
    """Check the fields of each request, and tell its call what it is about; chats are recorded with their messages."""

    def raised(error: Exception) -> str:
        raise error

    state.anthropic_serving_messages.create_streaming_error_response = raised  # it reads OpenAI's events, not errors
    for handler in (state.openai_serving_chat, state.anthropic_serving_messages):
        handler.create_chat_completion = _recorded(handler, handler.create_chat_completion)
    for handler, name, known in (
        (state.openai_serving_chat, "create_chat_completion", of_chat.CompletionCreateParamsBase),
        (state.openai_serving_completion, "create_completion", of_completions.CompletionCreateParamsBase),
        (state.openai_serving_responses, "create_responses", ResponseCreateParamsBase),
        (state.anthropic_serving_messages, "create_messages", MessageCreateParamsBase),
        (state.serving_tokens, "serve_tokens", None),
    ):
        setattr(handler, name, _checked(getattr(handler, name), {} if known is None else known.__annotations__))


def _checked(create: Create, known: Mapping[str, Any]) -> Create:
    """Refuse fields that neither vLLM nor the API has: a misspelled one would change nothing, in silence."""

    async def checked(request: Any, raw_request: Any = None) -> Any:
        body, kind = await raw_request.json(), type(request)
        ours = {one.alias for one in kind.model_fields.values() if one.alias} | kind.model_fields.keys()
        if unknown := sorted(body.keys() - ours - known.keys()):
            raise VLLMValidationError(f"unknown fields: {', '.join(map(repr, unknown))}", parameter=unknown[0])
        bias = getattr(request, "logit_bias", None) or {}  # as it was read: a number may have come as text
        if not all(map(math.isfinite, bias.values())):  # vLLM would read NaN as -100
            raise VLLMValidationError("logit_bias must be finite numbers", parameter="logit_bias")
        call = CALL.get()
        prompt, takes_tokens = body.get("prompt"), isinstance(request, GenerateRequest)
        is_ids = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
        call.wants_routes = takes_tokens or "routed_experts_prompt_start" in body
        call.is_text = not takes_tokens and not is_ids
        try:
            answer = await create(request, raw_request)
        except RecursionError:
            raise VLLMValidationError("JSON in it, such as a tool call's arguments, is nested too deeply") from None
        return NamedTokens.model_construct(**dict(answer)) if isinstance(answer, GenerateTokensResponse) else answer

    return checked


def _recorded(handler: Any, create: Create) -> Create:
    """Record the answers to a chat in its session, with the messages that the client got, before it has all of them."""

    async def recorded(request: Any, raw_request: Any = None) -> Any:
        call = CALL.get()
        if call.session is None:
            return await create(request, raw_request)
        call.messages = [_plain(message) for message in request.messages]
        answer = await create(request, raw_request)
        if isinstance(answer, ChatCompletionResponse):
            _record(call, [choice.message.model_dump(exclude_none=True) for choice in answer.choices])
        elif isinstance(answer, AsyncIterator):
            return _recorded_stream(handler, call, answer, request.n or 1)
        return answer

    return recorded


async def _recorded_stream(handler: Any, call: Call, stream: AsyncIterator[str], choices: int) -> AsyncIterator[str]:
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
                except VLLMError as error:
                    yield f"data: {handler.create_streaming_error_response(error)}\n\n"
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
    for record in call.records:
        try:
            record(messages=call.messages, message_returned=messages)
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


class Door:
    """The ASGI application around vLLM's."""

    def __init__(self, client: ServiceClient, api_key: str | None, limits: Limits, arguments: Namespace) -> None:
        self.client, self._arguments, self.limits = client, arguments, limits
        self.requests = 0
        tokenizer, layout = client.renderer.get_tokenizer(), client.engine.routing_layout
        # the ids that end an answer: the tokenizer's, and those of the model's generation config
        found = client.model_config.try_get_generation_config().get("eos_token_id") or []
        ends = {tokenizer.eos_token_id, *([found] if isinstance(found, int) else found)} - {None}
        self.sessions = SessionStore(tokenizer, layout, limits, end_of_turn_ids=ends or None)
        self._app: Any = None
        self._key = None if api_key is None else api_key.encode()
        self._of_session: Counter[str | None] = Counter()  # requests under way
        self._statuses: Counter[int] = Counter()

    async def open(self) -> None:
        """Make vLLM's application, in the event loop that it answers in."""
        self._app = await _application(self.client, self._arguments)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def in_time(message: Any) -> None:  # a client must read each piece of an answer
            async with asyncio.timeout(self.limits.client_seconds):
                await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["raw_path"].decode("latin-1")
        try:
            try:
                answer = await self._answer(path, headers, scope, receive, in_time)
            except (TorchRLMoEError, VLLMError, ValueError) as error:
                known = http_error(error) if isinstance(error, TorchRLMoEError) else error
                answer = _formed(create_error_response(known).model_dump(), path)
            if answer is not None:
                await answer(scope, receive, in_time)
        except TimeoutError:
            LOG.warning("a client of %s does not read its answer: the request was aborted", path)

    async def _answer(
        self, path: str, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> Response | None:
        """Return the answer to a request; ``None`` if vLLM's application has sent it, or the client is gone."""
        session_id, rest = _session_in(path, headers)
        if rest == "/health":
            await self.client.check_health()
            return Response()
        given = headers.get("x-api-key") or re.sub("^bearer +", "", headers.get("authorization", ""), flags=re.I)
        if self._key is not None and not hmac.compare_digest(given.encode("latin-1"), self._key):
            raise GracefulHTTPError("the api_key is missing or wrong", HTTPStatus.UNAUTHORIZED)
        if rest == "/metrics":
            return self._metrics()
        if session_id is not None and (rest == "" or rest.startswith("/routes/")):
            return self._of_a_session(session_id, rest, scope)
        most = self.limits
        is_full = self.requests >= most.requests
        if is_full or (session_id is not None and self._of_session[session_id] >= most.requests_per_session):
            whose = "" if is_full else "of this session "
            raise GracefulHTTPError(f"too many requests {whose}are under way", HTTPStatus.TOO_MANY_REQUESTS)
        self.requests += 1
        self._of_session[session_id] += 1
        try:
            await self._pass(session_id, rest, headers, scope, receive, send)
        finally:
            self.requests -= 1
            self._of_session[session_id] -= 1
            if not self._of_session[session_id]:
                del self._of_session[session_id]
        return None

    async def _pass(
        self,
        session_id: str | None,
        path: str,
        headers: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Read a request, and have vLLM's application answer it, as a call of its session."""
        body = await self._body(headers, receive)
        if body is None:  # the client is gone
            return
        version = _version(headers.get(VERSION_HEADER))
        call = Call(session=None if session_id is None else self.sessions.get(session_id), version=version)
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Any:
            return messages.pop() if messages else await receive()

        async def write(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._statuses[message["status"]] += 1
                if call.versions:
                    oldest = str(min(call.versions)).encode()
                    message["headers"] = [*message["headers"], (VERSION_HEADER.encode(), oldest)]
            await send(message)

        CALL.set(call)  # of this task, which serves this request only
        try:
            await self._app({**scope, "path": unquote(path), "raw_path": path.encode("latin-1")}, read, write)
        finally:
            self.client.over(call)

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes | None:
        """Return the whole body; ``None`` if its client is gone."""
        most, length = self.limits.body_bytes, headers.get("content-length", "")
        too_large = GracefulHTTPError(f"a body has at most {most} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if length.isdecimal() and int(length) > most:
            raise too_large
        pieces, size, more = [], 0, True
        while more:
            try:
                async with asyncio.timeout(self.limits.client_seconds):
                    message = await receive()
            except TimeoutError:
                raise GracefulHTTPError("the request did not arrive in time", HTTPStatus.REQUEST_TIMEOUT) from None
            if message["type"] != "http.request":
                return None
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > most:
                raise too_large
            more = message.get("more_body", False)
        return b"".join(pieces)

    # -- answers of its own -------------------------------------------------------------------------------------------

    def _of_a_session(self, session_id: str, rest: str, scope: Scope) -> Response:
        """Answer ``GET /sessions/ID``, ``GET /sessions/ID/routes/N`` and ``DELETE /sessions/ID``."""
        method, number = scope["method"], rest.removeprefix("/routes/")
        if session_id not in self.sessions.ids():
            raise GracefulHTTPError(f"there is no session {session_id!r}", HTTPStatus.NOT_FOUND)
        if method == "DELETE" and not rest:
            self.sessions.close(session_id)
            return Response(status_code=HTTPStatus.NO_CONTENT)
        if method != "GET":
            raise GracefulHTTPError(f"{method} is not for sessions", HTTPStatus.METHOD_NOT_ALLOWED)
        session = self.sessions.get(session_id)
        if not rest:
            data = session.to_safetensors(routes=b"routes=false" not in scope["query_string"])
        else:
            try:
                data = session.routes_to_safetensors(int(number))
            except (LookupError, ValueError):
                reason = f"session {session_id!r} has no routes of an answer {number}"
                raise GracefulHTTPError(reason, HTTPStatus.NOT_FOUND) from None
        return Response(data, media_type="application/octet-stream")

    def _metrics(self) -> Response:
        """Return the engine's metrics in Prometheus' format, and the server's own."""
        kept = self.sessions.open()
        gauges = {
            "requests": self.requests,
            "tokens": self.client.tokens,
            "sessions": len(kept),
            "session_bytes": sum(one.nbytes for one in kept),
        }
        prefix = "torchrl_moe_http_"
        lines = [f"# TYPE {prefix}{name} gauge\n{prefix}{name} {value}" for name, value in gauges.items()]
        lines.append(f"# TYPE {prefix}answers counter")
        lines += [f'{prefix}answers_total{{status="{code}"}} {count}' for code, count in sorted(self._statuses.items())]
        try:
            own = self.client.engine.prometheus()
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


def _formed(body: Mapping[str, Any], path: str) -> Response:
    """Return an error, which vLLM writes in OpenAI's form, in that of the API that was asked."""
    status = body["error"]["code"]
    if path.endswith(("/v1/messages", "/v1/messages/count_tokens")):
        body = {"type": "error", "error": {name: body["error"][name] for name in ("type", "message")}}
    return JSONResponse(body, status_code=status)
