"""``torchrl-moe serve``: what it refuses before it loads a model, and a whole run, in this process and as one."""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.engines import SMALL, EngineShelf
from support.http import ASKED
from support.waiting import PATIENCE, until
from torchrl_moe.cli.main import main


def words(shelf: EngineShelf) -> list[str]:
    folder = shelf.folder("qwen3_moe")
    arguments = [f"--engine-arg={name}={json.dumps(value)}" for name, value in SMALL.items()]
    return [
        "serve",
        "--port=0",
        "--json",
        *("--served-model-name", "tiny", "--served-model-name", "small"),
        str(folder),
        *arguments,
    ]


def ask(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "small"]
        answer = client.post("/v1/chat/completions", json=ASKED)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] <= 8


class Said(io.StringIO):
    """Standard output, whose lines another thread takes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: queue.Queue[str] = queue.Queue()

    def write(self, text: str) -> int:
        if text.strip():
            self.lines.put(text)
        return len(text)


@pytest.mark.needs_vllm
def test_a_port_in_use_is_found_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "nowhere", "--port", str(port)]) == 2
    assert f"{port}" in (said := capsys.readouterr().err) and "Address already in use" in said


@pytest.mark.needs_vllm
@pytest.mark.engine
def test_it_serves_until_it_is_ended(no_engine: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    said, missed = Said(), []
    monkeypatch.setenv("TORCHRL_MOE_API_KEY", "secret")
    monkeypatch.setattr(sys, "stdout", said)
    before = signal.signal(signal.SIGTERM, lambda *_: missed.append("the command's own handler was not there"))
    try:
        with ThreadPoolExecutor(1) as pool:
            client = pool.submit(lambda: ask(json.loads(said.lines.get(timeout=PATIENCE))["url"]))
            client.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
            assert main(words(no_engine)) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    client.result()
    assert missed == []


@pytest.mark.soak  # a process of its own imports vLLM: half a minute
@pytest.mark.needs_vllm
@pytest.mark.engine
def test_as_a_process_it_serves_until_it_is_ended(no_engine: EngineShelf) -> None:
    command = [sys.executable, "-m", "torchrl_moe.cli", *words(no_engine)]
    environment = {**os.environ, "TORCHRL_MOE_API_KEY": "secret"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        ask(json.loads(process.stdout.readline())["url"])
        process.send_signal(signal.SIGTERM)
        assert until(lambda: process.poll() is not None) and process.returncode == 0
