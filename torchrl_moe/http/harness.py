"""``HarnessEnv``: an agent harness that is given a URL, in the place of an environment.

The harness runs wherever it likes: in this process, or in one that it starts. It sees a model behind OpenAI's API; the
collector gets the trajectories of its session. This file neither serves the URL nor schedules anything.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from tensordict import NonTensorData, TensorDictBase, lazy_stack

from torchrl_moe._checks import LONGEST, check_number
from torchrl_moe.collectors.environments import MAX_TURNS, EnvironmentTimeoutError, Generate, too_many_turns
from torchrl_moe.collectors.workflow import Clock, Workflow, finite, number_of, row_of
from torchrl_moe.errors import SessionClosedError
from torchrl_moe.http.server import HttpServer, serve_http
from torchrl_moe.http.sessions import Session
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.backends.sampling_fields import fields_of
from torchrl_moe.modules.policies.prompts import Prompts, text_entry
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest, sampling_params_of, vLLMWrapper

LOG = logging.getLogger(__name__)
MODEL = "policy"
SAMPLING = {"max_tokens": "max_new_tokens", **{name: name for name in ("temperature", "top_k", "top_p", "min_p")}}
"""What a policy samples with -> its name in a generation config."""
POLL_SECONDS, DRAIN_SECONDS = 0.05, 1.0  # of a program: whether it runs, and what is still in its pipe
Harness: TypeAlias = "Callable[[str, dict[str, Any]], Awaitable[float | None]]"
"""Runs one sample: ``await run(base_url, row)`` returns its reward; ``None`` leaves it out.

``base_url`` is OpenAI's, of a session of its own; Anthropic's has no ``/v1`` at its end. ``row`` is a row of the data.
"""


class HarnessEnv(Workflow):
    """Runs samples with a harness; an :class:`~torchrl_moe.collectors.AsyncLLMCollector` takes it as ``env``.

    Each sample has a session of its own, and a row for each trajectory of that. The reward is in the last row. The
    collector sends the harness's calls to the engine: they are bounded in age and number, and an update of the weights
    resumes them, as for any environment. A sample fails if ``run`` raises, takes longer than ``deadline``, or more than
    the collector's ``reward_timeout`` between one answer and the next call, or makes more than ``max_turns`` calls.
    Whatever still runs when ``run`` has ended, one way or another, is aborted. If there is nothing to train on, because
    no call was made, say, the sample is left out of its group, with a warning; :attr:`left_out` counts these by reason.

    Args:
        run: an async function. It runs in the collector's event loop, beside others: blocking code belongs in
            ``asyncio.to_thread``, a program in :func:`run_process`.
        server: serves the policy's engine; default: one that is started with the first sample, and ends with the
            collector. It calls the model ``"policy"``, samples what a request leaves out as the policy of the first
            sample does, and cuts each answer at that policy's ``max_new_tokens``.
        serve_options: of that default, see :func:`~torchrl_moe.http.serve_http`.
        deadline: seconds that one ``run`` may take in all; ``None`` for no limit.
        sampling_params: go before those of the harness, which may not know that it trains, ``{"temperature": 1.0}``;
            by vLLM's names, such as ``max_tokens``.
        shared: see :meth:`~torchrl_moe.http.sessions.Session.trajectories`.

    Raises:
        TypeError: ``run`` is no async function.
        ValueError: ``deadline`` is no number of seconds.

    Example::

        async def run(base_url: str, row: dict) -> float:
            code, output = await run_process(base_url, ["python", "my_agent.py", row["query"]])
            return float(row["answer"] in output)


        collector = AsyncLLMCollector(HarnessEnv(run), policy=policy, dataloader=rows, group_size=8)
    """

    def __init__(
        self,
        run: Harness,
        server: HttpServer | None = None,
        *,
        serve_options: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        shared: Literal["first", "all"] = "first",
    ) -> None:
        if not (inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(getattr(run, "__call__", None))):  # noqa: B004
            raise TypeError(f"run must be an async function of a URL and a row, got {run!r:.100}")
        super().__init__(run)
        check_number("deadline", deadline, above=0, most=LONGEST, none=True, hint="It is in seconds.")
        self._server, self._deadline, self._shared = server, deadline, shared
        self._serve_options = {"served_model_name": MODEL, **(serve_options or {})}
        self._own: HttpServer | None = None
        self._starting = threading.Lock()
        self._loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        self._sampling_params = dict(sampling_params or {})
        self.left_out: Counter[str] = Counter()
        """Reason -> samples that were left out because there was nothing to train on."""

    async def play(
        self,
        policy: vLLMWrapper,
        generate: Generate,
        data: TensorDictBase,
        timeout: float | None,
        max_turns: int = MAX_TURNS,
        **generate_kwargs: Any,
    ) -> list[TensorDictBase]:
        """Run a sample and return its trajectories, each ``[1]``; none if there is nothing to train on."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:  # an evaluation has another, which ends its threads when it ends
            self._loops.add(loop)
            loop.set_default_executor(self._new_threads())  # of asyncio.to_thread
        generate_kwargs.pop("return_routed_experts", None)  # a session keeps them
        server = self._server or self._own
        if server is None:
            server = await asyncio.to_thread(self._started, policy)
        sampling_params = self._sampling_params | sampling_params_of(generate_kwargs)
        row = {str(key): _plain(data.get(key)) for key in data.keys()}  # noqa: SIM118
        clock = Clock(timeout)
        calls, refused = 0, None

        async def ask(arguments: dict[str, Any]) -> Completion:
            nonlocal calls, refused
            calls += 1
            if calls > max_turns:
                refused = too_many_turns(max_turns, "the harness asks for another answer")
                raise refused
            arguments["sampling_params"] = {**fields_of(arguments["sampling_params"]), **sampling_params}
            prompts = Prompts([list(arguments["prompt_token_ids"])])
            # the time that the engine takes is not the harness's
            with clock.stopped():
                return await generate(SampleRequest(data, prompts, 0, policy.keys, arguments), 0)

        async def from_server(**arguments: Any) -> Completion:  # is called in the server's event loop
            asked = ask(arguments)
            try:
                future = asyncio.run_coroutine_threadsafe(asked, loop)
            except RuntimeError:  # this loop was closed after the sample, while the call was on its way
                asked.close()
                raise SessionClosedError(f"session {session.id!r} has ended: it takes no more calls") from None
            return await asyncio.wrap_future(future)

        session = server.sessions.get(f"harness-{uuid.uuid4().hex}")
        session.sampling_params, session.generate = sampling_params, from_server
        try:
            async with asyncio.timeout(self._deadline) as whole:
                reward = await clock.run(self._function(f"{server.url}/sessions/{session.id}/v1", row))
        except Exception as error:
            if refused is not None:  # its client may have raised what the server made of it
                raise refused from error
            if not (isinstance(error, TimeoutError) and whole.expired()):  # of its own, or between two calls
                raise
            raise EnvironmentTimeoutError(f"the harness did not return within {self._deadline:g} s") from error
        finally:
            server.sessions.close(session.id, for_good=True)  # a call that comes late begins no other
        if refused is not None:
            raise refused
        if reward is None:
            return []
        value = number_of(reward)
        if value is None:
            raise TypeError(f"a harness must return its reward, a number, got {reward!r:.200}")
        rows = self._rows(session, data, finite(value, "the harness"), policy.tokenizer)
        return [lazy_stack([row]) for row in rows]

    def _started(self, policy: vLLMWrapper) -> HttpServer:
        """Start the default server, which samples as the policy does; the first of several threads does."""
        with self._starting:
            if self._own is None:
                given = policy.sampling_params
                sampling = {name: given[key] for key, name in SAMPLING.items() if given.get(key) is not None}
                like_policy = {"generation_config": "vllm", "override_generation_config": sampling}
                self._own = serve_http(policy.engine, **like_policy | self._serve_options)
            return self._own

    def _rows(self, session: Session, data: TensorDictBase, reward: float, tokenizer: Any) -> list[TensorDictBase]:
        """Return a row ``[]`` for each trajectory; the last one is done, and has the reward."""
        trajectories = session.trajectories(self._shared)
        if not trajectories:
            reason = "it was not scored as it was sampled" if session.num_calls else "the harness made no call"
            self.left_out[reason] += 1
            LOG.warning("a sample has nothing to train on: %s (its reward: %g)", reason, reward)
        rows = []
        for i, trajectory in enumerate(trajectories, 1):
            parts = (trajectory["tokens", part] for part in ("prompt", "response"))
            texts = (tokenizer.decode(ids, skip_special_tokens=False) for ids in parts)
            trajectory["text"] = text_entry(*texts)  # for people, and logs
            is_last = i == len(trajectories)
            rows.append(row_of(data, trajectory, reward if is_last else 0.0, is_last))
        return rows

    def close(self, keep: object = None) -> None:
        """End the threads and the default server, unless this is to be kept; a later collector starts others."""
        if keep is self:
            return
        super().close()
        self._threads = self._new_threads()
        if self._own is not None:
            self._own.close()
            self._own = None


def _plain(value: object) -> Any:
    return value.data if isinstance(value, NonTensorData) else value.tolist() if hasattr(value, "tolist") else value


async def run_process(
    base_url: str, command: Sequence[str], *, api_key: str = "none", env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a program that calls a model; when this ends, also by a cancellation, none of its processes is left.

    Args:
        base_url: is at ``OPENAI_BASE_URL``, and without ``/v1`` at ``ANTHROPIC_BASE_URL``.
        command: the program and its arguments.
        api_key: the server's, at ``OPENAI_API_KEY`` and ``ANTHROPIC_API_KEY``.
        env: further variables, beside those of this process.

    Returns:
        Its exit status, negative for a signal, and what it wrote, standard error included.
    """
    urls = {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1")}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), api_key)
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **urls, **keys, **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # a group of its own, so that what it starts ends with it
    )
    assert process.stdout is not None
    written: list[bytes] = []
    reading = asyncio.ensure_future(_read(process.stdout, written))
    try:
        while process.returncode is None:  # what it leaves behind may hold its pipe, for which wait() would wait
            await asyncio.sleep(POLL_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([reading], timeout=DRAIN_SECONDS)
        reading.cancel()
    return process.returncode, b"".join(written).decode(errors="replace")


async def _read(stream: asyncio.StreamReader, into: list[bytes]) -> None:
    while piece := await stream.read(1 << 16):
        into.append(piece)
