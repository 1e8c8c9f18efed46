"""Services seen from outside, as text and as a table, and the engines that commands start."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from support.actors import toy_actors
from support.clusters import ClusterHolder
from support.sources import ROOT
from torchrl_moe.cli import services
from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.main import main
from torchrl_moe.cli.services import Exported, LocalDriver, connected, local_drivers, started, table
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import FakeAsyncVLLM


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A port that sends this to who comes; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1000)
                client.sendall(answer)

        thread = threading.Thread(target=send)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        thread.join()


OK = b"HTTP/1.0 200 OK\r\n\r\n"


# -- what a driver exports --------------------------------------------------------------------------------------------
def test_exported_metrics_are_the_rows_of_stats() -> None:
    with FakeAsyncVLLM(num_replicas=2) as engine:
        engine.generate(["a", "b", "c"], {"max_tokens": 4}, use_tqdm=False)
        rows, text = engine.stats(), engine.prometheus()
    with answering(OK + text.encode()) as url:
        found = Exported(url).stats()
    shared = {"replica", "state", "version", "inflight", "restarts", "requests", "running", "cache_usage", "hit_rate"}
    assert [{key: row[key] for key in shared} for row in found] == [{key: row[key] for key in shared} for row in rows]
    assert sum(row["requests"] for row in found) == 3


@pytest.mark.parametrize(
    ("url", "said"),
    [("localhost:9000", "begins with http:// or https://"), ("http://127.0.0.1:1/metrics", "nothing answers there")],
)
def test_an_address_that_does_not_answer(url: str, said: str) -> None:
    with pytest.raises(BadUse, match=said):
        Exported(url).stats()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OK + b"up 1\n", "there are no replicas in it: export them"),
        (b"SSH-2.0-OpenSSH\r\n", r"nothing answers there \(SSH-2\.0-OpenSSH"),
    ],
)
def test_an_address_of_something_else(answer: bytes, said: str) -> None:
    with answering(answer) as url, pytest.raises(BadUse, match=said):
        Exported(url).stats()


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


@pytest.mark.parametrize("drivers", [[], [LocalDriver(12, "python train.py", 3)]])
@pytest.mark.parametrize("has_ray", [True, False])
def test_without_a_cluster_the_option_for_other_services_is_named(
    drivers: list[LocalDriver], has_ray: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "find_spec", lambda name: has_ray or None)
    monkeypatch.setattr(services, "local_drivers", lambda: drivers)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", MagicMock(side_effect=ConnectionError("none runs here")))
    with pytest.raises(BadUse) as caught, connected(None, None):
        pass
    said = str(caught.value)
    assert ("process 12 (python train.py) has 3 replica(s)" in said) == bool(drivers)
    assert "give --url, the address of the metrics" in said and "ray.init" not in said
    assert ("RAY_ADDRESS" if has_ray else "pip install 'torchrl_moe[ray]'") in said


ROW = {"replica": 0, "state": "SERVING", "version": 3, "cache_usage": 0.25, "tokens_per_second": 1200.0}
URL = ["top", "--url", "http://localhost:9000/metrics"]


def exporting(monkeypatch: pytest.MonkeyPatch, *answers: list[dict[str, Any]]) -> None:
    """Have ``--url`` give these rows, one after the other, then a Ctrl-C."""
    monkeypatch.setattr(Exported, "stats", MagicMock(side_effect=[*answers, KeyboardInterrupt]))


def test_a_line_for_each_replica() -> None:
    dead = {"replica": 1, "state": "DEAD", "version": 2, "last_error": "killed\nits log " + "x" * 99}
    lines = table("mine", [{**ROW, "last_error": None}, dead]).splitlines()
    assert lines[0] == "mine: 1 of 2 serving, 1,200 tokens/s"
    assert lines[1].split() == ["replica", "state", "version", "KV", "use", "tokens/s", "last", "error"]
    assert lines[2].split() == ["#0", "SERVING", "3", "25%", "1,200"]
    assert lines[3].split() == ["#1", "DEAD", "2", "killed"]


def test_once_is_a_table_and_a_dead_replica_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting(monkeypatch, [ROW], [{**ROW, "state": "DEAD"}])
    assert main([*URL, "--once"]) == 0
    assert capsys.readouterr().out == table("http://localhost:9000/metrics", [ROW]) + "\n"
    assert main([*URL, "--once", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["service"], found["replicas"]) == ("http://localhost:9000/metrics", [{**ROW, "state": "DEAD"}])


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_table_again_and_again_until_an_interrupt(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporting(monkeypatch, [ROW], [{**ROW, "version": 4}])
    assert main([*URL, "--interval", "0.001", *more]) == 0
    out = capsys.readouterr().out
    if more:
        assert [json.loads(line)["replicas"][0]["version"] for line in out.splitlines()] == [3, 4]
    else:
        assert out.count("1 of 1 serving") == 2 and out.count("Ctrl-C ends") == 2


@pytest.mark.ray
def test_a_service_in_ray_is_found_by_its_name_or_as_the_only_one(
    ray_cluster: ClusterHolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        toy_actors(),
        AsyncVLLM.launch({"model": "toy"}, 2, backend="ray", name="found", resources={"CPU": 1}) as engine,
    ):
        for name in (["found"], []):
            assert main(["top", *name, "--once", "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            assert found["service"] == "found"
            assert [row["state"] for row in found["replicas"]] == ["SERVING", "SERVING"]
        assert main(["top", "none", "--once"]) == 2
        said = capsys.readouterr().err
        assert "no service 'none' is running. Services in namespace 'torchrl_moe': 'found' (2 replica(s))." in said
        assert engine.ready()  # it keeps running


# -- engines that a command starts ------------------------------------------------------------------------------------
def config(family: str = "qwen3_moe", positions: int = 512) -> Any:
    text = SimpleNamespace(max_position_embeddings=positions)
    return SimpleNamespace(model_type=family, get_text_config=lambda: text)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    made = MagicMock(return_value=contextlib.nullcontext("an engine"))
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", made)
    return made


@pytest.mark.parametrize(
    ("of", "dtype", "given", "length"),
    [(("qwen3_moe", 512), "float32", ["max_model_len=64"], 64), (("deepseek_v3", 1 << 20), "bfloat16", [], 2048)],
)
def test_an_engine_is_small_unless_told_otherwise(
    start: MagicMock, of: Any, dtype: str, given: list[str], length: int
) -> None:
    """Memory and kernels are left to where engines are built."""
    with started("m", config(*of), "vllm", dtype, given) as engine:
        assert engine == "an engine"
    start.assert_called_once_with("m", engine="vllm", dtype=dtype, max_model_len=length, enforce_eager=True)


def test_without_vllm_another_engine_is_named(start: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "find_spec", lambda name: None)
    said = r"torchrl_moe\[vllm\].*--engine transformers"
    with pytest.raises(BadUse, match=said), started("m", config(), "vllm", "x", []):
        pass
    with started("m", config(), "transformers", "float32", []):
        pass
    start.assert_called_once_with("m", engine="transformers", dtype="float32", max_model_len=512)
