"""A harness plays samples through a URL, over real HTTP: its rows, its ends, and it is an environment like any."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from tensordict import TensorDictBase

from support.collecting import Questions, new_weights, policy_of
from support.engines import EngineShelf
from support.http import serving
from support.processes import is_gone
from support.waiting import PATIENCE, in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.environments import EnvironmentTimeoutError
from torchrl_moe.errors import SessionClosedError
from torchrl_moe.http import HarnessEnv, HttpServer, run_process
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM

pytestmark = pytest.mark.needs_vllm


@pytest.fixture(scope="module")
def folder(shelf: EngineShelf) -> Path:
    return shelf.folder("qwen3_moe")


@pytest.fixture
def engine() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(num_replicas=2) as engine:
        yield engine


@pytest.fixture
def server(engine: FakeAsyncVLLM, folder: Path) -> Iterator[HttpServer]:
    with serving(engine, folder) as (server, _):
        yield server


async def ask(base_url: str, text: str) -> str:
    """The answer to a text, of four tokens."""
    async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE, verify=False) as client:
        response = await client.post("/completions", json={"model": "tiny", "prompt": text, "max_tokens": 4})
    return str(response.raise_for_status().json()["choices"][0]["text"])


Collect = Callable[..., AsyncLLMCollector]


@pytest.fixture
def collect(engine: FakeAsyncVLLM) -> Iterator[Collect]:
    made = []

    def make(env: Any, **kwargs: Any) -> AsyncLLMCollector:
        kwargs = {"policy": policy_of(engine), "dataloader": Questions(), "group_size": 2, **kwargs}
        made.append(AsyncLLMCollector(env, **kwargs))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def first(collector: AsyncLLMCollector) -> TensorDictBase:
    return in_thread(lambda: next(iter(collector))).result(2 * PATIENCE)  # a deadline says more than this does


def slow(engine: FakeAsyncVLLM, token_seconds: float = 60.0) -> None:
    for replica in engine.replicas:
        replica.token_seconds = token_seconds


def running(engine: FakeAsyncVLLM) -> int:
    return sum(replica.last_stats.running for replica in engine.replicas)


def requests_of(engine: FakeAsyncVLLM) -> list[Any]:
    return [request for replica in engine.replicas for request in replica.submitted]


async def asking_once(base_url: str, row: dict[str, Any]) -> float:
    await ask(base_url, "a")
    return 1.0


async def two_turns(base_url: str, row: dict[str, Any]) -> float:
    """Two turns, and a branch: three answers, of two leaves."""
    text = f"{row['query']}: "
    said = await asyncio.to_thread(str, await ask(base_url, text))
    await ask(base_url, f"{text}{said}, and?")
    await ask(base_url, f"{text}{said}, or?")
    return float(row["query"][1:])


def test_a_collector_takes_a_harness_as_an_environment(
    engine: FakeAsyncVLLM, server: HttpServer, collect: Collect
) -> None:
    new_weights(engine, 3)
    env = HarnessEnv(two_turns, server, sampling_params={"temperature": 0.5, "max_tokens": 2})
    collector = collect(env, groups_per_batch=2, max_staleness=0, max_in_flight=1)
    batch = first(collector)
    # groups of two samples, each of two rows: the reward is in the last
    assert [row["query"] for row in batch] == ["q0"] * 4 + ["q1"] * 4
    assert [float(row["next", "reward"]) for row in batch] == [0.0] * 4 + [0.0, 1.0, 0.0, 1.0]
    assert [bool(row["next", "done"]) for row in batch] == [False, True] * 4
    assert [int(row["group_id"]) for row in batch] == [0] * 4 + [1] * 4
    # the first answer, of max_tokens, is trained on in its first leaf only
    assert [int(row["masks", "all_assistant_mask"].sum()) for row in batch] == [4, 2] * 4
    for row in batch:
        row["routed_experts"].validate(engine.routing_layout, num_tokens=len(row["tokens", "full"]))
        assert (int(row["policy_version"]), float(row["sampling", "temperature"])) == (3, 0.5)
        assert row["text"].prompt == f"{row['query']}: " or row["text"].prompt.endswith(", or?")
    assert server.sessions.ids() == []
    assert collector.stats()["collector/failures"] == 0
    collector.show_samples(2)
    # the calls went through the collector, under its own names
    assert all(request.param("temperature") == 0.5 for request in requests_of(engine))
    assert len({request.request_id.rpartition("-")[0] for request in requests_of(engine)}) == 4


def test_an_evaluation_samples_as_it_is_asked(engine: FakeAsyncVLLM, server: HttpServer, collect: Collect) -> None:
    env = HarnessEnv(two_turns, server, sampling_params={"temperature": 0.5})
    collector = collect(env)
    found = in_thread(lambda: collector.evaluate(env, 3, dataloader=Questions(), temperature=0.25)).result(PATIENCE)
    assert [float(one) for one in found["next", "episode_reward"].flatten()] == [0.0, 1.0, 2.0]
    assert {request.param("temperature") for request in requests_of(engine)} == {0.25}
    first(collector)  # its threads are those of the collection, too, which goes on
    collector.shutdown()
    first(collect(env))  # and another collector takes it


def test_a_harness_without_a_call_is_left_out_with_a_reason(
    server: HttpServer, collect: Collect, caplog: pytest.LogCaptureFixture
) -> None:
    played = iter(range(100))

    async def run(base_url: str, row: dict[str, Any]) -> float:
        if next(played) == 1:
            return 0.25
        await ask(base_url, "a")
        return 1.0

    env = HarnessEnv(run, server)
    batch = first(collect(env, group_size=3))
    assert [row["query"] for row in batch] == ["q0", "q0"]
    assert env.left_out == {"the harness made no call": 1}
    assert "the harness made no call (its reward: 0.25)" in caplog.text


@pytest.mark.parametrize(
    ("calls", "reward", "limits", "hides", "error", "message"),
    [
        (0, 1.0, {}, True, ValueError, "a harness made no call"),
        (1, "1", {}, True, TypeError, "must return its reward, a number, got '1'"),
        (1, float("nan"), {}, True, ValueError, "must be finite"),
        (3, 1.0, {"max_turns": 2}, True, ValueError, "max_turns=2"),
        (3, 1.0, {"max_turns": 2}, False, ValueError, "max_turns=2"),
    ],
)
def test_what_a_harness_may_not_do_fails_its_group(
    calls: int, reward: Any, limits: dict[str, int], hides: bool, error: type[Exception], message: str,
    server: HttpServer, collect: Collect,
) -> None:  # fmt: skip
    async def run(base_url: str, row: dict[str, Any]) -> Any:
        for i in range(calls):
            # a harness may go on after a call that was refused, or raise
            with suppress(*[httpx.HTTPStatusError] * hides):
                await ask(base_url, str(i))
        return reward

    with pytest.raises(error, match=message):
        first(collect(HarnessEnv(run, server), **limits))
    until(lambda: server.sessions.ids() == [])


def test_a_call_that_comes_after_the_collection_has_ended_is_refused(
    server: HttpServer, collect: Collect, recwarn: pytest.WarningsRecorder
) -> None:
    asked: list[Any] = []

    async def run(base_url: str, row: dict[str, Any]) -> float:
        session = server.sessions.get(base_url.removesuffix("/v1").rpartition("/")[2])
        asked.append(session.generate)  # what the server calls for a request that it has taken
        return await asking_once(base_url, row)

    collector = collect(HarnessEnv(run, server), group_size=1)
    first(collector)
    collector.shutdown()
    with pytest.raises(SessionClosedError, match="takes no more calls"):
        asyncio.run(asked[0](prompt_token_ids=[1], sampling_params={}))
    assert not [str(one.message) for one in recwarn if "never awaited" in str(one.message)]


def test_a_harness_that_raises_costs_its_group(server: HttpServer, collect: Collect) -> None:
    async def run(base_url: str, row: dict[str, Any]) -> float:
        await ask(base_url, "a")
        if row["query"] == "q0":
            raise KeyError("of the harness")
        return 1.0

    collector = collect(HarnessEnv(run, server), max_failures=1)
    assert [row["query"] for row in first(collector)] == ["q1", "q1"]
    assert collector.stats()["collector/failures"] == 1


def test_what_still_runs_when_a_harness_returns_is_aborted(
    engine: FakeAsyncVLLM, server: HttpServer, collect: Collect
) -> None:
    slow(engine)
    left: list[asyncio.Task[str]] = []

    async def run(base_url: str, row: dict[str, Any]) -> float:
        left.append(asyncio.ensure_future(ask(base_url, "a")))
        while not running(engine):
            await asyncio.sleep(0.001)
        return 1.0

    with pytest.raises(ValueError, match="made no call"):
        first(collect(HarnessEnv(run, server), group_size=1))
    until(lambda: running(engine) == 0)
    until(left[0].done)
    assert left[0].cancelled() or isinstance(left[0].exception(), httpx.HTTPError | asyncio.CancelledError)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"deadline": 0.2}, "the harness did not return within 0.2 s"),
        ({"reward_timeout": 0.2}, "did not continue within 0.2 s"),
    ],
)
def test_a_harness_that_takes_too_long_is_cancelled(
    limits: dict[str, float], message: str, server: HttpServer, collect: Collect
) -> None:
    cancelled = []

    async def run(base_url: str, row: dict[str, Any]) -> float:
        try:  # on a busy machine it is cancelled while it asks
            await ask(base_url, "a")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(row["query"])
            raise
        return 1.0

    env = HarnessEnv(run, server, deadline=limits.get("deadline"))
    with pytest.raises(EnvironmentTimeoutError, match=message):
        first(collect(env, reward_timeout=limits.get("reward_timeout")))
    assert "q0" in cancelled
    assert server.sessions.ids() == []


def test_the_time_that_an_answer_takes_is_not_the_harnesss(
    engine: FakeAsyncVLLM, server: HttpServer, collect: Collect
) -> None:
    slow(engine, 1.5)  # an answer takes 6 s
    assert len(first(collect(HarnessEnv(asking_once, server), reward_timeout=5.0))) == 2


def test_a_shutdown_cancels_harnesses_and_their_calls(
    engine: FakeAsyncVLLM, server: HttpServer, collect: Collect
) -> None:
    slow(engine)
    collector = collect(HarnessEnv(asking_once, server), max_staleness=0)
    taken = in_thread(lambda: list(islice(collector, 1)))
    until(lambda: running(engine) == 2)
    collector.shutdown()
    assert taken.result(PATIENCE) == []
    until(lambda: running(engine) == 0)
    until(lambda: server.sessions.ids() == [])


def test_a_checkpoint_has_the_answers_of_a_harness(engine: FakeAsyncVLLM, server: HttpServer, collect: Collect) -> None:
    """Its run starts again, and gets the answers that it had had."""
    is_first = True

    async def run(base_url: str, row: dict[str, Any]) -> float:
        said = await ask(base_url, "a")
        if is_first:
            slow(engine)
        await ask(base_url, f"a{said}b")
        return 1.0

    env = HarnessEnv(run, server)
    collector = collect(env, group_size=1, max_staleness=0)
    taken = in_thread(lambda: list(islice(collector, 1)))
    until(lambda: running(engine) == 1)
    state = in_thread(collector.state_dict).result(PATIENCE)
    collector.shutdown()
    taken.result(PATIENCE)
    is_first = False
    slow(engine, 0.0)
    for replica in engine.replicas:
        replica.submitted.clear()
    again = collect(env, group_size=1, max_staleness=0)
    again.load_state_dict(state)
    assert int(first(again)["masks", "all_assistant_mask"].sum()) == 8
    (request,) = requests_of(engine)
    assert len(request.prompt_token_ids) == 6  # "a", four tokens, "b"


def test_what_a_harness_is_refused() -> None:
    with pytest.raises(TypeError, match="async function"):
        HarnessEnv(print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="deadline"):
        HarnessEnv(two_turns, deadline=0.0)


# -- clients of OpenAI, and a server of its own ------------------------------------------------------------------------


def client_of(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="none", http_client=httpx.AsyncClient(verify=False))


async def chat(base_url: str, row: dict[str, Any], model: str = "tiny") -> float:
    """Two turns, the second one a stream."""
    asked: list[Any] = [{"role": "user", "content": row["query"]}]
    async with client_of(base_url) as client:
        answer = await client.chat.completions.create(model=model, messages=asked, max_completion_tokens=6)
        asked += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        stream = await client.chat.completions.create(
            model=model, messages=asked, max_completion_tokens=6, temperature=0.5, stream=True
        )
        text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
    return float(len(text) > 0)


def test_a_client_of_openai_makes_rows_of_two_turns(
    engine: FakeAsyncVLLM, server: HttpServer, collect: Collect
) -> None:
    batch = first(collect(HarnessEnv(chat, server, sampling_params={"temperature": 1.0}), max_staleness=0))
    assert len(batch) == 2
    for row in batch:
        # the fake's bytes are no text, and are sent as they were sampled
        mask = row["masks", "all_assistant_mask"]
        assert int(mask.sum()) == 12
        assert int(mask.int().diff().eq(1).sum()) == 2
        assert float(row["sampling", "temperature"]) == 1.0
        assert float(row["next", "reward"]) == 1.0
        row["routed_experts"].validate(engine.routing_layout, num_tokens=len(row["tokens", "full"]))
    assert server.sessions.ids() == []


def test_a_server_of_its_own_begins_and_ends_with_the_collector(folder: Path, collect: Collect) -> None:
    urls = []

    async def run(base_url: str, row: dict[str, Any]) -> float:
        urls.append(base_url.partition("/sessions")[0])
        return await chat(base_url, row, model="policy")

    env = HarnessEnv(run, serve_options={"model": folder})
    collector = collect(env, max_staleness=0)
    batch = first(collector)
    # the harness asks at two temperatures, and a row is scored at one
    assert [float(row["sampling", "temperature"]) for row in batch] == [1.0, 0.5] * 2
    assert [int(row["masks", "all_assistant_mask"].sum()) for row in batch] == [6] * 4
    collector.shutdown()
    with pytest.raises(httpx.ConnectError):
        httpx.get(urls[0] + "/health")
    assert len(first(collect(env, max_staleness=0))) == 4  # with another one
    assert len(set(urls)) == 2


@pytest.mark.parametrize(
    ("asked", "temperature", "most"),
    [({}, 0.7, 7), ({"max_completion_tokens": 3}, 0.7, 3), ({"max_completion_tokens": 50, "temperature": 0.5}, 0.5, 7)],
)
def test_a_harness_samples_as_the_policy_does(
    asked: dict[str, Any], temperature: float, most: int, engine: FakeAsyncVLLM, folder: Path, collect: Collect
) -> None:
    async def run(base_url: str, row: dict[str, Any]) -> float:
        async with client_of(base_url) as client:
            said: list[Any] = [{"role": "user", "content": row["query"]}]
            reply = await client.chat.completions.create(model="policy", messages=said, **asked)
        assert reply.usage is not None
        return float(reply.usage.completion_tokens)

    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 7, "temperature": 0.7})
    batch = first(collect(HarnessEnv(run, serve_options={"model": folder}), policy=policy))
    assert [float(row["next", "reward"]) for row in batch] == [most] * 2
    assert [round(float(row["sampling", "temperature"]), 4) for row in batch] == [temperature] * 2


PROGRAM = """
import os, sys
from openai import OpenAI

client = OpenAI()
said = [{"role": "user", "content": sys.argv[1]}]
print(client.chat.completions.create(model="tiny", messages=said, max_completion_tokens=5).usage.completion_tokens)
"""


def test_a_program_of_its_own_process_is_a_harness(server: HttpServer, collect: Collect) -> None:
    async def run(base_url: str, row: dict[str, Any]) -> float:
        status, output = await run_process(base_url, [sys.executable, "-c", PROGRAM, row["query"]])
        assert status == 0, output
        return float(output)

    batch = first(collect(HarnessEnv(run, server, deadline=PATIENCE), max_staleness=0))
    assert [float(row["next", "reward"]) for row in batch] == [5.0, 5.0]
    assert [int(row["masks", "all_assistant_mask"].sum()) for row in batch] == [5, 5]


# -- a program --------------------------------------------------------------------------------------------------------


def test_a_program_gets_the_url_and_says_what_it_wrote() -> None:
    code = "import os, sys; print(*[os.environ[k] for k in sys.argv[1:]]); sys.exit(3)"
    names = ["OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "MORE"]
    command = [sys.executable, "-c", code, *names]
    status, output = asyncio.run(run_process("http://h/sessions/s/v1", command, api_key="k", env={"MORE": "m"}))
    assert (status, output) == (3, "http://h/sessions/s/v1 http://h/sessions/s k k m\n")


SLEEPER = "import subprocess; print('done', subprocess.Popen(['sleep', '1000']).pid, flush=True)"


def test_a_program_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    """Nor what it has started itself."""
    numbers = tmp_path / "numbers"
    code = (
        f"import os, sys, time; sys.stdout = open({str(numbers)!r} + '.new', 'w'); print(os.getpid()); {SLEEPER}; "
        f"os.rename({str(numbers)!r} + '.new', {str(numbers)!r}); time.sleep(1000)"
    )

    async def cancel() -> None:
        task = asyncio.ensure_future(run_process("http://h/v1", [sys.executable, "-c", code]))
        while not numbers.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    own, _, child = numbers.read_text().split()
    until(lambda: is_gone(int(own)) and is_gone(int(child)))


def test_a_program_is_not_waited_for_longer_than_it_runs() -> None:
    """What it leaves behind holds its pipe, and is ended."""

    async def run() -> tuple[int, str]:
        return await asyncio.wait_for(run_process("http://h/v1", [sys.executable, "-c", SLEEPER]), 60.0)

    status, output = asyncio.run(run())
    word, number = output.split()
    assert (status, word) == (0, "done")
    until(lambda: is_gone(int(number)))
