"""An environment of ``verifiers`` as an environment of a collector: its tasks, tools and rubric, our engine and routes.

``verifiers`` and vLLM take different releases of what both use, so it runs in a Python of its own::

    python -m venv vf && vf/bin/pip install verifiers==0.4.0 uv aiohttp MY_ENVIRONMENT

    with Verifiers("my-environment", python="vf/bin/python") as harness:
        env = HarnessEnv(harness, serve_options={"tool_call_parser": "hermes"})
        collector = AsyncLLMCollector(env, policy=policy, dataloader=harness.rows, group_size=8)

An episode is played through a session of the engine's HTTP server, which keeps its token ids, log-probs, routes and
kept tokens. Its reward is that of its last trace. A broken episode fails with the environment's name and its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

AGENT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}

# -- in this process --------------------------------------------------------------------------------------------------


class Verifiers:
    """What :class:`torchrl_moe.http.HarnessEnv` takes as ``run``; ``rows`` are the tasks, for a dataloader.

    Args:
        name: of a taskset that the other Python can import; ``"ENV+TASKSET"`` names its environment, too.
        python: the Python that has verifiers and the environment.
        config: fields of its ``EnvConfig``. Without an ``"agent"`` it is :data:`AGENT`: on this machine, running no
            code of the model. An ``"agent"`` replaces all of that; verifiers' own default has a shell.

    Raises:
        RuntimeError: it has no such environment, or did not start.
    """

    def __init__(self, name: str, python: str = sys.executable, config: dict[str, Any] | None = None) -> None:
        environment, _, taskset = name.rpartition("+")
        given = config or {}
        settings = {"agent": AGENT, **given, "id": environment, "taskset": {**given.get("taskset", {}), "id": taskset}}
        # a verifiers environment lists what it can import: not this package, whose releases it does not take
        own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        own["PATH"] = os.path.dirname(os.path.abspath(python)) + os.pathsep + own.get("PATH", "")  # uv is there
        self.process = subprocess.Popen(
            [python, __file__, json.dumps(settings)], stdout=subprocess.PIPE, env=own, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        try:
            started = json.loads(self.process.stdout.readline() or '{"error": "it ended, what it wrote is above"}')
            if "error" in started:
                raise RuntimeError(f"verifiers environment {name!r} in {python}: {started['error']}")
        except BaseException:  # a Ctrl-C does not reach its session
            self.__exit__()
            raise
        self.harnesses: dict[str, str] = started["harnesses"]  # role -> verifiers' name of what plays it
        self.name, self.url = name, f"http://127.0.0.1:{started['port']}/"
        self.rows: list[dict[str, Any]] = [
            {"prompt": text, "task": place} for place, text in enumerate(started["tasks"])
        ]

    async def __call__(self, base_url: str, row: dict[str, Any]) -> float:
        """Play one task through a session's URL; return its reward."""
        import httpx

        async with httpx.AsyncClient(trust_env=False, timeout=None, verify=False) as client:
            reply = await client.post(self.url, json={"base_url": base_url, "task": row["task"]})
        found = reply.json()
        if "error" in found:
            raise RuntimeError(f"verifiers environment {self.name!r}, task {row['task']}: {found['error']}")
        return float(found["reward"])

    def __enter__(self) -> Verifiers:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()


# -- in the other Python ----------------------------------------------------------------------------------------------


async def serve(settings: dict[str, Any]) -> None:
    """Play an episode for each POST of a session's URL and the number of a task, until the process is ended."""
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    os.environ.setdefault("OPENAI_API_KEY", "none")
    sys.path.insert(0, os.getcwd())  # an environment that is being written
    env = load_environment(resolve_env_config(settings))
    tasks = list(env.taskset)

    async def play(request: web.Request) -> web.Response:
        asked = await request.json()
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var="OPENAI_API_KEY")
        try:
            episode = await env.run_episode(tasks[asked["task"]], vf.ModelContext(model="policy", client=client))
        except Exception as error:  # noqa: BLE001  # it becomes the sample's error in the other process
            return web.json_response({"error": f"{type(error).__name__}: {error}"})
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok or not episode.traces:
            said = "; ".join(f"{error.type}: {error.message}" for error in errors)
            return web.json_response({"error": said or "the episode is not ok"})
        return web.json_response({"reward": episode.traces[-1].reward})

    app = web.Application()
    app.router.add_post("/", play)
    # a cancelled sample closes its connection, and that cancels its episode
    runner = web.AppRunner(app, handler_cancellation=True)
    async with env.serving():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        texts = [task.data.prompt_text for task in tasks]
        harnesses = {name: harness.id for name, harness in env.config.agent_harnesses().items()}
        started = {"port": runner.addresses[0][1], "tasks": texts, "harnesses": harnesses}
        print(json.dumps(started), file=answers, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment and its programs print is not read
    try:
        asyncio.run(serve(json.loads(sys.argv[1])))
    except (Exception, SystemExit) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise
