"""``serve_http``: an engine behind OpenAI's and Anthropic's APIs, with sessions that keep every token.

vLLM's own server code answers: its routers, renderers, parsers and protocols, over :class:`ServiceClient`, behind a
:class:`~torchrl_moe.http.door.Door`. The server runs in a thread with its own event loop.

.. code-block:: text

    client --> Door: key, limits, session, version --> vLLM's handlers --> ServiceClient --> engine.agenerate
                 |                                          |                   |
                 +--- /sessions/ID, /metrics, /health       +--- the messages --+--- tokens, routes ---> Session
"""

from __future__ import annotations

import asyncio
import difflib
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torchrl_moe._checks import check_number, shown
from torchrl_moe._lazy import without_collections
from torchrl_moe.http.sessions import Limits, Session

if TYPE_CHECKING:
    import uvicorn

    from torchrl_moe.http.door import Door
    from torchrl_moe.http.sessions import Session
    from torchrl_moe.modules.serving.service import GenerationService

LOG = logging.getLogger(__name__)
SAMPLING = ("generation_config", "override_generation_config")
"""Options that say how a request samples that does not."""
START_SECONDS = 300.0  # importing vLLM's server takes 10 s, on a busy machine a minute
CLOSE_SECONDS = 2  # that requests get to end by themselves
OPTIONS = (
    "chat_template", "chat_template_content_format", "default_chat_template_kwargs", "enable_auto_tool_choice",
    "enable_force_include_usage", "enable_prompt_tokens_details", "exclude_tools_when_tool_choice_none", "lora_modules",
    "reasoning_parser", "reasoning_parser_plugin", "response_role", "return_tokens_as_token_ids", "tool_call_parser",
    "tool_parser_plugin", "tool_strict_level", "trust_request_chat_template", *SAMPLING,
)  # fmt: skip
"""Options of ``vllm serve`` that say how chats are rendered, sampled and parsed."""


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
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, 1)
            hint = f": do you mean {near[0]}?" if near else f"; there are {', '.join(OPTIONS)}"
            raise ValueError(f"serve_http has no option {name!r}{hint}")
    if not engine.is_running:
        raise RuntimeError("serve_http: the engine is not running: start it first")
    arguments: dict[str, Any] = dict(getattr(engine, "engine_args", {}))
    arguments.update((name, options.pop(name)) for name in SAMPLING if name in options)
    path = os.fspath(model if model is not None else arguments.get("model") or "")
    if not path:
        raise ValueError("this engine names no model: pass model=, a folder with its configuration and tokenizer")
    names = [served_model_name] if isinstance(served_model_name, str) else list(served_model_name or ())
    if not names:
        names = list(dict.fromkeys([Path(path).name, path]))
    # bound here: an address in use is the caller's error, and what was started would have to end again
    listening = listen(host, port)
    try:
        with without_collections():
            from torchrl_moe.http.door import Door, server_arguments
            from torchrl_moe.http.engine_client import ServiceClient, frontend_config
        limits = limits or Limits()
        info = engine.infos[0]
        config = frontend_config(path, info.max_model_len, info.dtype, arguments, names)
        client = ServiceClient(engine, config, limits)
        return HttpServer(Door(client, api_key, limits, server_arguments(path, names, options)), listening)
    except BaseException:
        listening.close()
        raise


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; ``OSError`` where that cannot be."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)


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


def bounded(limits: Limits) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol for clients that may neither be silent nor talk on before there is a request.

    Uvicorn bounds neither the seconds nor the bytes until a request's headers are complete.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def _await_head(self) -> None:
            self._head, self._patience = 0, self.loop.call_later(limits.client_seconds, self.transport.close)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._patience.cancel()
            self._await_head()

        def on_headers_complete(self) -> None:
            self._patience.cancel()
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            self._head += len(data)
            super().data_received(data)  # where a head begins, which may be behind another body, counting begins again
            if not self._patience.cancelled() and self._head > limits.head_bytes:
                self.send_400_response(f"The headers of a request may have {limits.head_bytes} bytes.")

        def connection_lost(self, exc: Exception | None) -> None:
            self._patience.cancel()
            super().connection_lost(exc)

    return Bounded


class HttpServer:
    """A server that runs; made by :func:`serve_http`.

    Attributes:
        url: where it answers, such as ``http://127.0.0.1:8000``. OpenAI's clients take ``url + "/v1"`` as their base
            URL, Anthropic's take ``url``.
        sessions: the sessions of its clients.
    """

    def __init__(self, door: Door, listening: socket.socket) -> None:
        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.sessions = door.sessions
        self._door = door
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
            SessionClosedError: it was closed.
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

    def __exit__(self, *error: object) -> None:
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
            self._door.client.shutdown()
            listening.close()

    async def _serve(self, listening: socket.socket, started: Future[None]) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                started.set_result(None)

        await self._door.open()
        config = uvicorn.Config(
            self._door,
            http=bounded(self._door.limits),
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
