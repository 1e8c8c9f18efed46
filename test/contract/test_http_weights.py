"""Real vLLM, float32: what a session keeps is what transformers makes of it, over a branch and weight updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from support.engines import EngineShelf
from support.http import ASKED, serving, tokens_under_way
from support.reference import TOLERANCE, Reference, route_mismatches
from support.versions import Versions
from support.waiting import until
from torchrl_moe.http import HttpServer, load_trajectories
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.weight_update import VLLMWeightSyncScheme

pytestmark = pytest.mark.needs_vllm
TOKENIZER = ByteTokenizer()
FEW = [*range(200, 215), 258]
"""Bytes that are no text by themselves, and the end of the turn: what is sampled of them encodes otherwise."""


class Run:
    """An engine behind a URL, the trainer that updates it, and the weights of each version."""

    def __init__(self, engine: AsyncVLLM, folder: Path, server: HttpServer, client: httpx.Client) -> None:
        self.engine, self.server, self.client = engine, server, client
        self.reference = Reference(folder)
        self.actor = TransformersWrapper(self.reference.model, tokenizer=TOKENIZER, replay="R3", input_mode="tokens")
        self.sender = VLLMWeightSyncScheme(transport="memmap", mode="abort_resume").create_sender()
        self.sender.register_model(self.actor)
        self.sender.init_all_workers_group(None, vllm_engine=engine)
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.update()

    def update(self, seed: int | None = None) -> None:
        if seed is not None:
            self.reference.change(seed, scale=0.05)
        version = self.sender.update_weights().version
        self.weights[version] = {name: value.clone() for name, value in self.reference.model.state_dict().items()}

    def ask(self, messages: list[dict[str, Any]], session: str = "s", **params: Any) -> dict[str, Any]:
        """Ask in a session, and return the messages with the answer."""
        body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 1.0, **params}
        response = self.client.post(f"/sessions/{session}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"]}

    def gaps(self, tds: list[TensorDict]) -> list[Tensor]:
        """Return by how much each sampled token's log-prob differs from what the weights that made it say, ``[T]``."""
        gaps = [torch.zeros(len(td["tokens", "full"])) for td in tds]
        for version, weights in self.weights.items():
            self.reference.model.load_state_dict(weights)
            with torch.no_grad():
                scored = self.actor.score(lazy_stack([td.clone() for td in tds]))[0]
            for td, values, gap in zip(tds, scored, gaps, strict=True):
                made = td["masks", "all_assistant_mask"] & (td["policy_versions", "full"] == version)
                gap[made] = (values[-len(made) :] - td["log_probs", "full"])[made].abs()
        return gaps

    def wrong_rows(self, td: TensorDict, by: Tensor) -> tuple[int, int]:
        """Count rows that the weights which read them route otherwise, and the rows that were compared."""
        wrong = total = 0
        for version, weights in self.weights.items():
            self.reference.model.load_state_dict(weights)
            routes = td["routed_experts", "full"]
            _, expected = self.reference(td["tokens", "full"], routes=routes, followed=(by != version) & (by >= 0))
            rows = (by == version).nonzero()[:, 0]
            found = route_mismatches(routes[rows], {layer: row[rows] for layer, row in expected.items()})
            wrong, total = wrong + found[0], total + found[1]
        return wrong, total


@pytest.fixture
def run(engine: AsyncVLLM, shelf: EngineShelf) -> Iterator[Run]:
    folder = shelf.folder("qwen3_moe")
    with serving(engine, folder) as (server, client):
        made = Run(engine, folder, server, client)
        yield made
        made.sender.shutdown()


def read_by(td: TensorDict, shared: int, first: Tensor) -> Tensor:
    """The version that each token was read by: that of the next sampled one, or, where it was shared, as ``first``."""
    versions = td["policy_versions", "full"]
    by = torch.full_like(versions, -1)
    for t in reversed(range(len(by) - 1)):
        by[t] = versions[t + 1] if versions[t + 1] >= 0 else by[t + 1]
    by[:shared] = first[:shared]
    return by


def shared_tokens(one: TensorDict, other: TensorDict) -> int:
    ids, others = one["tokens", "full"].tolist(), other["tokens", "full"].tolist()
    return next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))


def turns_of(td: TensorDict) -> int:
    """How many runs of tokens are trained on."""
    return len(torch.unique_consecutive(td["masks", "all_assistant_mask"])) // 2


@pytest.mark.engine("qwen3_moe", max_model_len=2048, block_size=32)
def test_a_conversation_of_six_turns_is_exactly_what_its_weights_say(run: Run) -> None:
    """Tools, a branch and a compaction, and updates between two turns and in the middle of an answer."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "2 + 3?"}]

    def turn(said: str, **params: Any) -> None:
        chat.append(run.ask(chat, **params))
        chat.append({"role": "tool", "content": said, "tool_call_id": "1"})

    turn("5")
    turn("six", allowed_token_ids=FEW, max_tokens=64)  # ends by itself, most likely
    early = list(chat)
    turn("7")
    run.update(seed=1)
    turn("8", top_p=0.9)
    # the fifth turn is interrupted by an update
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(turn, "9", max_tokens=400)
        until(lambda: tokens_under_way(run.engine) > 30)
        run.update(seed=2)
        answer.result(60)
    turn("10", allowed_token_ids=FEW, max_tokens=64)
    # a branch from the second turn, under the newest weights, and two turns after a compaction
    early[-1] = {**early[-1], "content": "sixteen"}
    run.ask(early)
    compacted = [{"role": "user", "content": "So far: 2 + 3 is 5. And 4 + 4?"}]
    compacted.append(run.ask(compacted))
    run.ask([*compacted, {"role": "user", "content": "sure?"}])

    session = run.server.session("s")
    tds = session.trajectories()
    assert [turns_of(td) for td in tds] == [6, 1, 2]  # of the branch, two turns are the conversation's
    assert session.num_tokens < sum(len(td["tokens", "full"]) for td in tds)
    assert len(tds[0]["policy_versions", "full"].unique()) == 4  # three versions, and -1
    assert len(tds[0]["policy_versions", "full"][tds[0]["masks", "all_assistant_mask"]].unique_consecutive()) == 3
    assert int(tds[0]["num_cached_tokens"]) > 0  # what is followed is in the prefix cache, too
    text = TOKENIZER.decode(tds[0]["tokens", "full"])
    assert TOKENIZER(text, add_special_tokens=False)["input_ids"] != tds[0]["tokens", "full"].tolist()
    # every sampled token, and every row, those between the turns too
    assert max(float(gap.max()) for gap in run.gaps(tds)) <= TOLERANCE
    first = read_by(tds[0], 0, torch.tensor([]))
    for td in tds:
        assert td["resume"] == "forced"
        assert run.wrong_rows(td, read_by(td, shared_tokens(tds[0], td), first)) == (
            0,
            3 * (len(td["tokens", "full"]) - 1),
        )
        td["routed_experts"].validate(run.engine.routing_layout, num_tokens=len(td["tokens", "full"]))
    # the last token of one answer, which the next call has read: by other experts the log-probs are others
    boundary = int(tds[0]["masks", "all_assistant_mask"].int().diff().eq(-1).nonzero()[0])
    row = tds[0]["routed_experts", "full"][boundary]
    row[row >= 0] = (row[row >= 0] + 1) % run.engine.routing_layout.num_experts
    assert max(float(gap.max()) for gap in run.gaps(tds)) > 10 * TOLERANCE
    # over HTTP they are the same
    files = [run.client.get("/sessions/s").content, run.client.get("/sessions/s?routes=false").content]

    def routes(answer: int) -> bytes:
        return run.client.get(f"/sessions/s/routes/{answer}").content

    for found in (load_trajectories(files[0]), load_trajectories(files[1], routes)):
        for td, other in zip(session.trajectories(), found, strict=True):
            for key in (("tokens", "full"), ("log_probs", "full"), ("routed_experts", "full")):
                assert td[key].numpy().tobytes() == other[key].numpy().tobytes()


@pytest.mark.engine("qwen3_moe", max_model_len=2048, block_size=32)
def test_each_turn_brings_the_rows_of_its_new_tokens_only(run: Run) -> None:
    """Two sessions take the same 10 turns; of one, the engine is asked for all rows at each."""
    sessions = {name: run.server.session(name) for name in ("new", "whole")}
    counts: dict[str, list[int]] = {name: [] for name in sessions}

    def asking(name: str) -> Any:
        async def generate(sampling_params: Any, **arguments: Any) -> Any:
            params = sampling_params.clone()
            if name == "whole":
                params.routed_experts_prompt_start = 0
            completion = await run.engine.agenerate(sampling_params=params, **arguments)
            counts[name].append(len(completion.outputs[0].routed_experts))
            return completion

        return generate

    for name, session in sessions.items():
        session.generate = asking(name)
    chats: dict[str, list[dict[str, Any]]] = {name: [] for name in sessions}
    for turn in range(10):
        if turn == 6:
            run.update(seed=1)  # from here on, the turns before are followed
        for name, chat in chats.items():
            chat.append({"role": "user", "content": f"And {turn} + {turn}? " + "Think. " * 5})
            chat.append(run.ask(chat, session=name, max_tokens=16, temperature=0))
    assert chats["new"] == chats["whole"]
    (new,), (whole,) = (session.trajectories() for session in sessions.values())
    for key in (("tokens", "full"), ("routed_experts", "full"), ("policy_versions", "full")):
        assert torch.equal(whole[key], new[key]), key
    torch.testing.assert_close(whole["log_probs", "full"], new["log_probs", "full"], rtol=0, atol=1e-5, equal_nan=True)
    assert whole["resume"] == new["resume"] == "forced"
    total = len(new["tokens", "full"])
    whole_turns = counts["whole"]
    assert whole_turns[-1] == total - 1
    grown = [now - before for before, now in zip([0, *whole_turns], whole_turns, strict=False)]
    for turn, (count, new_rows) in enumerate(zip(counts["new"], grown, strict=True)):
        # a block of the cache is read again if it was not full, and everything after the update
        assert new_rows <= count <= (whole_turns[turn] if turn == 6 else new_rows + 32), turn


@pytest.mark.engine("qwen3_moe", max_model_len=2048, block_size=32)
@pytest.mark.parametrize(("pause", "clear_cache"), [("abort", False), ("keep", True)])
def test_a_stream_across_an_update(engine: AsyncVLLM, versions: Versions, pause: str, clear_cache: bool) -> None:
    before, manifest = versions.now, versions.prepare(61)
    asked: dict[str, Any] = {
        **ASKED, "max_tokens": 120, "stream": True, "return_token_ids": True, "ignore_eos": True, "logprobs": True,
    }  # fmt: skip
    tokens: list[int] = []
    logprobs: list[float] = []
    with serving(engine, None) as (server, client):
        with client.stream("POST", "/sessions/one/v1/chat/completions", json=asked) as response:
            swapped = False
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[len("data: ") :])
                assert "error" not in event
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    logprobs += [one["logprob"] for one in (choice.get("logprobs") or {}).get("content") or []]
                if len(tokens) >= 20 and not swapped:
                    swapped = True
                    versions.swap(manifest, pause, clear_cache)
        (trajectory,) = server.session("one").trajectories()
    mask = trajectory["masks", "all_assistant_mask"]
    assert len(tokens) == 120
    assert trajectory["tokens", "full"][mask].tolist() == tokens
    assert trajectory["log_probs", "full"][mask].tolist() == pytest.approx(logprobs, abs=1e-5)
    assert set(trajectory["policy_versions", "full"][mask].tolist()) == {before, versions.now}
    assert trajectory["resume"] == "forced"
