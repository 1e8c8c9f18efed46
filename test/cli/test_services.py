"""Running services, seen from outside."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from support.sources import ROOT
from torchrl_moe.cli import services
from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.services import Exported, LocalDriver, connected, exported_rows, local_drivers
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import FakeAsyncVLLM


@contextmanager
def serving(text: str) -> Iterator[str]:
    """Serve a text over HTTP; gives its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


# -- what a driver exports --------------------------------------------------------------------------------------------


def test_exported_metrics_are_the_rows_of_stats() -> None:
    with FakeAsyncVLLM(num_replicas=2) as engine:
        engine.generate(["a", "b", "c"], {"max_tokens": 4}, use_tqdm=False)
        rows, text = engine.stats(), engine.prometheus()
    with serving(text) as url:
        found = Exported(url).stats()
    shared = {"replica", "state", "version", "inflight", "restarts", "requests", "running", "cache_usage", "hit_rate"}
    assert [{key: row[key] for key in shared} for row in found] == [{key: row[key] for key in shared} for row in rows]
    assert sum(row["requests"] for row in found) == 3


def test_a_text_without_replicas_has_no_rows() -> None:
    assert exported_rows("# TYPE up gauge\nup 1\n") == []


@pytest.mark.parametrize(
    ("url", "said"),
    [("localhost:9000", "begins with http:// or https://"), ("http://127.0.0.1:1/metrics", "nothing answers there")],
)
def test_an_address_that_does_not_answer(url: str, said: str) -> None:
    with pytest.raises(BadUse, match=said):
        Exported(url).stats()


def test_an_address_of_something_else() -> None:
    with serving("up 1\n") as url, pytest.raises(BadUse, match="there are no replicas in it: export them"):
        Exported(url).stats()


def test_a_port_that_speaks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/metrics"

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1000)
                client.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BadUse, match=r"nothing answers there \(SSH-2\.0-OpenSSH"):
            Exported(url).stats()
        thread.join()


# -- services that live in their drivers ------------------------------------------------------------------------------


def test_a_driver_is_seen_by_others_and_not_by_itself(second_engine: AsyncVLLM) -> None:
    assert second_engine.is_running
    assert os.getpid() not in [driver.pid for driver in local_drivers()]
    code = (
        "import dataclasses, json; from torchrl_moe.cli.services import local_drivers\n"
        "print(json.dumps([dataclasses.asdict(one) for one in local_drivers()]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    found = {one["pid"]: one for one in json.loads(done.stdout)}
    assert found[os.getpid()]["replicas"] == 2
    assert found[os.getpid()]["command"] == " ".join(psutil.Process().cmdline())


def test_a_process_with_another_command_has_no_driver() -> None:
    assert services._driver_of({"cmdline": ["python", "train.py"], "ppid": 1, "pid": 2}) is None
    assert services._driver_of({"cmdline": None, "ppid": 1, "pid": 2}) is None  # another user's
    words = ["python", "-m", "torchrl_moe.modules.backends.vllm.engine_process", "5", "1"]
    assert services._driver_of({"cmdline": words, "ppid": 7, "pid": 8}) == 7
    forked = {"cmdline": ["torchrl_moe::Replica"], "ppid": os.getpid(), "pid": 8}
    assert services._driver_of(forked) == os.getppid()


def refuse(*args: Any, **kwargs: Any) -> None:
    raise ConnectionError("none runs here")


@pytest.mark.parametrize("drivers", [[], [LocalDriver(12, "python train.py", 3)]])
@pytest.mark.parametrize("has_ray", [True, False])
def test_without_a_cluster_the_option_for_other_services_is_named(
    drivers: list[LocalDriver], has_ray: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "find_spec", lambda name: has_ray or None)
    monkeypatch.setattr(services, "local_drivers", lambda: drivers)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(BadUse) as caught, connected(None, None):
        pass
    said = str(caught.value)
    assert ("process 12 (python train.py) has 3 replica(s)" in said) == bool(drivers)
    assert "give --url, the address of the metrics" in said and "ray.init" not in said
    assert ("RAY_ADDRESS" if has_ray else "pip install 'torchrl_moe[ray]'") in said
