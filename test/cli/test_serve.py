"""``torchrl-moe serve``: what it refuses before it loads a model, and a whole run as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from support.engines import SMALL, EngineShelf
from support.http import ASKED
from support.waiting import until
from torchrl_moe.cli.main import main


@pytest.mark.needs_vllm
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "pass api_key="),
        (["--port", "99999"], "port"),
        (["--engine-arg", "max_model_length=3"], "max_model_len"),
        (["--engine-arg", "model=other"], "MODEL"),
        (["--tool-call-parser", "hermess"], "hermes"),
        (["--reasoning-parser", "qwen-3"], "qwen3"),
    ],
)
def test_bad_use(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nowhere", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.needs_vllm
def test_a_port_in_use_is_found_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "nowhere", "--port", str(port)]) == 2
    assert f"{port}" in (said := capsys.readouterr().err) and "Address already in use" in said


@pytest.mark.needs_vllm
@pytest.mark.engine
def test_it_serves_until_it_is_ended(no_engine: EngineShelf) -> None:
    folder = no_engine.folder("qwen3_moe")
    arguments = [f"--engine-arg={name}={json.dumps(value)}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "torchrl_moe.cli", "serve", str(folder), "--port=0", "--json", *arguments]
    environment = {**os.environ, "TORCHRL_MOE_API_KEY": "secret"}
    command.append("--served-model-name=tiny")
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        with httpx.Client(base_url=said["url"], timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer secret"
            answer = client.post("/v1/chat/completions", json=ASKED)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] <= 8
        process.send_signal(signal.SIGTERM)
        assert until(lambda: process.poll() is not None) and process.returncode == 0
