"""Tokens per second through HTTP, at 64 concurrent streams: against ``engine.agenerate``, and against ``vllm serve``.

And the rows of routes that cross from the engine's process for a session of 20 turns, over its tokens.

The same model, engine arguments, prompts of token ids and sampling; the contenders take turns within each round, and
ratios are computed per round. Engines that wait for their turn are stopped. One process has the clients of both
servers, and reads every event; it shares the machine's cores with what it measures.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.generation import SETTINGS

if __name__ == "__main__":  # before vllm is imported: its processes inherit these
    os.environ.update({**SETTINGS, "VLLM_USE_V2_MODEL_RUNNER": "1"})  # the other server's runner, too

import psutil

from benchmarks.engines.turns import Turns, engine_processes
from benchmarks.report import Row, finish, median_range

STREAMS, PROMPT_TOKENS, NEW_TOKENS = 64, 24, 128
ROUNDS, WARM_UP, SETTLE_SECONDS, START_SECONDS = 10, 2, 0.3, 180.0
SAMPLING = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
    "max_model_len": 4096,
    "max_num_seqs": STREAMS,
    "enable_return_routed_experts": True,
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
}
TURNS, TURN_TOKENS, MOST_ROWS = 20, 64, 2.0
Contender = Callable[[list[list[int]]], int]


# -- clients, in a process of their own -------------------------------------------------------------------------------


def clients(orders: Connection) -> None:
    """Answer orders, ``(url, prompts, whether to stream)``, with the number of tokens that came; ``None`` ends it."""
    while (order := orders.recv()) is not None:
        orders.send(asyncio.run(_crowd(*order)))


async def _crowd(url: str, prompts: list[list[int]], stream: bool) -> int:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=len(prompts))
    async with aiohttp.ClientSession(connector=connector) as session:
        counts = await asyncio.gather(*(_one(session, url, ids, stream) for ids in prompts))
    return sum(counts)


async def _one(session: Any, url: str, ids: list[int], stream: bool) -> int:
    asked = {"model": "tiny", "prompt": ids, "stream": stream, **SAMPLING}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    async with session.post(f"{url}/v1/completions", json=asked) as response:
        last = b""
        async for line in response.content:
            if line.startswith(b"data: {") or not stream:
                last = line.removeprefix(b"data: ")
        return int(json.loads(last)["usage"]["completion_tokens"])


# -- contenders -------------------------------------------------------------------------------------------------------


def direct(engine: Any) -> Contender:
    """Return ``engine.agenerate`` without HTTP."""

    async def crowd(prompts: list[list[int]]) -> int:
        done = await asyncio.gather(
            *(
                engine.agenerate(prompt_token_ids=ids, sampling_params=SAMPLING, return_routed_experts=False)
                for ids in prompts
            )
        )
        return sum(len(completion.outputs[0].token_ids) for completion in done)

    return lambda prompts: asyncio.run(crowd(prompts))


def over_http(orders: Connection, url: str, stream: bool = True) -> Contender:
    """Return the crowd of clients at a server."""

    def ask(prompts: list[list[int]]) -> int:
        orders.send((url, prompts, stream))
        found: int = orders.recv()
        return found

    return ask


def vllm_serve(path: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start vLLM's own server; return its process, and its URL once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [
        flag
        for name, value in ENGINE.items()
        for flag in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)])
    ]
    # what ``vllm serve`` runs: the command itself asks for a distribution of the name "vllm", which a CPU has not
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", path]
    log = ["--disable-uvicorn-access-log", "--disable-log-stats", "--uvicorn-log-level", "error"]
    process = subprocess.Popen([*command, "--served-model-name", "tiny", "--port", str(port), *flags, *log])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return process, url
        except OSError:
            time.sleep(0.5)
    process.kill()
    raise RuntimeError("vllm serve does not answer")


def race(contenders: dict[str, Contender], processes: dict[str, set[psutil.Process]]) -> dict[str, list[float]]:
    """Let the contenders take turns; return tokens per second, round by round."""
    import random

    numbers = random.Random(0)
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    with Turns(processes) as turns:
        for round_ in range(WARM_UP + ROUNDS):
            prompts = [[numbers.randrange(97, 123) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)]
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                turns.give(name.split(",")[0])
                time.sleep(SETTLE_SECONDS)
                started = time.perf_counter()
                tokens = contenders[name](prompts)
                seconds = time.perf_counter() - started
                assert tokens == STREAMS * NEW_TOKENS, (name, tokens)
                if round_ >= WARM_UP:
                    speeds[name].append(tokens / seconds)
    return speeds


def rows_of_a_session(engine: Any, server: Any) -> tuple[int, int, int]:
    """Play some turns; return the rows that came, those of all tokens at each turn, and the tokens of the session."""
    came, everything, session = 0, 0, server.session("rows")

    async def generate(**arguments: Any) -> Any:
        nonlocal came, everything
        completion = await engine.agenerate(**arguments)
        (output,) = completion.outputs
        came += len(output.routed_experts)
        everything += len(completion.prompt_token_ids) + len(output.token_ids) - 1
        return completion

    session.generate = generate
    chat: list[dict[str, str]] = []
    for turn in range(TURNS):
        chat.append({"role": "user", "content": f"{turn} and what else? ".ljust(TURN_TOKENS, ".")})
        body = json.dumps({"model": "tiny", "messages": chat, "max_tokens": TURN_TOKENS, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"{server.url}/sessions/rows/v1/chat/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            chat.append(json.load(response)["choices"][0]["message"])
    return came, everything, session.num_tokens


def main() -> None:
    """Start both servers, race, and compare."""
    from torchrl_moe.http import serve_http
    from torchrl_moe.modules import AsyncVLLM
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    orders, theirs = multiprocessing.get_context("spawn").Pipe()
    crowd = multiprocessing.get_context("spawn").Process(target=clients, args=(theirs,), daemon=True)
    crowd.start()
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_moe(folder))
        before = set(psutil.pids())
        server_of_vllm, url = vllm_serve(path)
        processes = {"vllm serve": engine_processes(before)}
        try:
            with AsyncVLLM.from_pretrained(path, **ENGINE) as engine:
                processes["ours"] = engine_processes(before)
                with serve_http(engine, served_model_name="tiny") as server:
                    contenders = {
                        "ours, agenerate": direct(engine),
                        "ours, HTTP streams": over_http(orders, server.url),
                        "ours, HTTP without streams": over_http(orders, server.url, stream=False),
                        "vllm serve, streams": over_http(orders, url),
                        "vllm serve, without streams": over_http(orders, url, stream=False),
                    }
                    print({name: len(pids) for name, pids in processes.items()}, "engine processes", flush=True)
                    speeds = race(contenders, processes)
                    came, everything, tokens = rows_of_a_session(engine, server)
        finally:
            orders.send(None)
            server_of_vllm.terminate()
            server_of_vllm.wait(30)
    rows = [Row(claim=f"{name}: tokens/s", value=median_range(values, 0)) for name, values in speeds.items()]
    for name, peer, target in (
        ("ours, HTTP streams", "ours, agenerate", 0.9),
        ("ours, HTTP without streams", "ours, agenerate", 0.9),
        ("ours, HTTP streams", "vllm serve, streams", 1.0),
        ("ours, HTTP without streams", "vllm serve, without streams", 1.0),
    ):
        ratios = [a / b for a, b in zip(speeds[name], speeds[peer], strict=True)]
        met = statistics.median(ratios) >= target
        rows.append(Row(claim=f"{name} / {peer}", value=median_range(ratios), target=f">= {target:.1f}", met=met))
    rows.append(
        Row(
            claim=f"rows of routes that came in {TURNS} turns of a session, over its {tokens} tokens",
            value=f"{came / tokens:.2f} (all rows at each turn: {everything / tokens:.1f})",
            target=f"<= {MOST_ROWS}",
            met=came <= MOST_ROWS * tokens,
        )
    )
    finish("http", rows)


if __name__ == "__main__":
    main()
