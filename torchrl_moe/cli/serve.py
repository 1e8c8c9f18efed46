"""``torchrl-moe serve``: a model behind an OpenAI-compatible URL, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading

from torchrl_moe.cli.command import FINE, BadUse, Command, Output, note
from torchrl_moe.cli.models import MODEL_HELP, TINY, check_served, is_tiny, model_folder
from torchrl_moe.cli.services import add_engine_arg, check_engine, engine_arguments

KEY_VARIABLE = "TORCHRL_MOE_API_KEY"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free (default: 8000)")
    parser.add_argument("--api-key", metavar="KEY", help=f"that clients must send (default: ${KEY_VARIABLE})")
    parser.add_argument("--num-replicas", type=int, default=1, metavar="N", help="how many engines (default: 1)")
    parser.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="what clients call the model; may be given again"
    )
    parser.add_argument("--tool-call-parser", metavar="NAME", help="vLLM's parser of tool calls, such as hermes")
    parser.add_argument("--reasoning-parser", metavar="NAME", help="vLLM's parser of reasoning, such as qwen3")
    parser.add_argument("--chat-template", metavar="FILE", help="a template other than the tokenizer's own")
    add_engine_arg(parser)


def _run(options: argparse.Namespace, output: Output) -> int:
    # all that can be wrong before a model is loaded
    check_engine("vllm", options.engine_args)
    from torchrl_moe.http.server import check_address, listen, serve_http

    key = options.api_key or os.environ.get(KEY_VARIABLE) or None
    try:
        check_address(options.host, options.port, key)
    except ValueError as error:
        raise BadUse(f"{error} (--api-key, or ${KEY_VARIABLE})") from error
    given = {
        name: getattr(options, name)
        for name in ("served_model_name", "tool_call_parser", "reasoning_parser", "chat_template")
        if getattr(options, name) is not None
    }
    listen(options.host, options.port).close()  # serve_http does so again, minutes later
    from torchrl_moe.http.door import server_arguments
    from torchrl_moe.modules import AsyncVLLM

    try:
        server_arguments(options.model, [options.model], given)
    except ValueError as error:
        raise BadUse(str(error)) from error
    arguments = engine_arguments(options.engine_args)
    check_served(options.model, arguments)
    # Ctrl-C is how it ends; a supervisor's SIGTERM is the same
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    note("starting vllm ...")
    named = {"served_model_name": TINY} if is_tiny(options.model) else {}  # its folder's name is a random one
    with (
        contextlib.suppress(KeyboardInterrupt),
        model_folder(options.model) as folder,
        AsyncVLLM.from_pretrained(folder, num_replicas=options.num_replicas, **arguments) as engine,
        serve_http(engine, options.host, options.port, key, **{**named, **given}) as server,
    ):
        text = f"{options.model} is served at {server.url}/v1; a session at {server.url}/sessions/NAME/v1. Ctrl-C ends"
        output.show(text, {"url": server.url, "model": options.model}, indent=None)
        stop.wait()
    return FINE


COMMAND = Command(
    name="serve",
    help="a model behind an OpenAI-compatible URL",
    description="Starts vLLM replicas of a model and serves them over HTTP, to clients of OpenAI's and of Anthropic's "
    "API. Calls below /sessions/NAME are kept token by token, with log-probs and experts.",
    examples=[
        ("torchrl-moe serve Qwen/Qwen3-30B-A3B --tool-call-parser hermes", "for this machine, on port 8000"),
        ("torchrl-moe serve FOLDER --port 0 --json", "on any free port, which is printed"),
        ("torchrl-moe serve MODEL --host 0.0.0.0 --api-key KEY", "for other machines, which need the key"),
        ("torchrl-moe serve MODEL --num-replicas 4 --engine-arg max_model_len=32768", "four engines"),
    ],
    add_arguments=_add_arguments,
    run=_run,
)
