"""Answers of unfinished groups, turn by turn: a checkpoint keeps them, and a restored collector continues from them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from torchrl_moe._errors import EngineError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["Answers", "snapshots"]

LOG = logging.getLogger(__name__)
SNAPSHOT_SECONDS = 10.0
Turns: TypeAlias = "dict[int, dict[int, tuple[Completion, str]]]"
"""Sample -> turn -> its answer, complete or partial, and how it was requested."""


class Answers:
    """Complete answers of the running samples, and the answers that restored samples continue from. For one thread.

    A sample is identified by its prompt's position in the data and its index in the group. After a restore its
    environment runs again from the start. A stored answer is used if its prompt is the same as before; where a random
    environment gives another prompt, a new answer is generated.
    """

    def __init__(self) -> None:
        self._prefix = uuid.uuid4().hex[:12]
        self._asked: dict[int, dict[int, list[str]]] = {}
        self._whole: dict[int, dict[int, dict[int, Completion]]] = {}
        self._restored: dict[int, Turns] = {}

    def ask(self, position: int, sample: int, arguments: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Return the arguments of ``agenerate`` for a sample's next turn: with request ids, and an answer to resume.

        Args:
            position: of the prompt.
            sample: index in the group.
            arguments: of this turn.
            version: the engine's newest weights; an answer with tokens of a later version is not used.
        """
        asked = self._asked.setdefault(position, {}).setdefault(sample, [])
        turn = len(asked)
        asked.append(_how(arguments))
        name = f"{self._prefix}-{position}-{sample}"
        named = {"session_id": name, **arguments, "request_id": f"{name}-{turn}"}
        had = self._restored.get(position, {}).get(sample, {}).get(turn)
        if had is None or not _fits(had, arguments, version):
            return named
        del named["prompt_token_ids"]
        return {**named, "resume": had[0]}

    def add(self, position: int, sample: int, completion: Completion) -> None:
        """Keep a complete answer until its group is complete or dropped."""
        turn = int(completion.request_id.rpartition("-")[2])
        self._whole.setdefault(position, {}).setdefault(sample, {})[turn] = completion

    def forget(self, position: int) -> None:
        """Forget a prompt whose group is complete, or dropped."""
        self._asked.pop(position, None)
        self._whole.pop(position, None)
        self._restored.pop(position, None)

    def state_dict(self, under_way: Mapping[str, Completion]) -> dict[int, Turns]:
        """Return all answers: position -> sample -> turn -> answer.

        Args:
            under_way: the partial answers by request id; see :func:`snapshots`.
        """
        state = {at: {sample: dict(turns) for sample, turns in of.items()} for at, of in self._restored.items()}
        everything = ((at, sample, asked) for at, of in self._asked.items() for sample, asked in of.items())
        for position, sample, asked in everything:
            turns = state.setdefault(position, {}).setdefault(sample, {})
            whole = self._whole.get(position, {}).get(sample, {})
            for turn, how in enumerate(asked):
                answer = whole.get(turn) or under_way.get(f"{self._prefix}-{position}-{sample}-{turn}")
                if answer is not None:
                    turns[turn] = answer, how
        return state

    def load_state_dict(self, state: Mapping[int, Turns]) -> None:
        """Continue from the answers of a checkpoint."""
        self._restored = dict(state)


def _how(arguments: Mapping[str, Any]) -> str:
    """What an answer depends on besides its prompt, as text."""
    return f"{arguments['sampling_params']!r}, routes: {arguments.get('return_routed_experts', True)}"


def _fits(had: tuple[Completion, str], arguments: Mapping[str, Any], version: int) -> bool:
    """Whether an answer has the prompt and arguments of the current request, and weights that the engine has had."""
    completion, how = had
    is_known = all(output.policy_versions.max(initial=0) <= version for output in completion.outputs)
    same_ids = np.array_equal(completion.prompt_token_ids, np.asarray(arguments["prompt_token_ids"]))
    return is_known and same_ids and how == _how(arguments)


def snapshots(engine: Any) -> dict[str, Completion]:
    """Return the partial answers of the requests that an engine's replicas run, by request id; generation continues.

    A replica that does not answer is left out and logged; its answers start again after a restore.
    """
    found: dict[str, Completion] = {}
    for entry in list(engine.replica_table):
        if entry.state in (ReplicaState.STARTING, ReplicaState.DEAD):
            continue
        try:
            found.update({one.request_id: one for one in entry.replica.snapshot(SNAPSHOT_SECONDS)})
        except EngineError as error:
            LOG.warning("running answers at replica %d are not in the checkpoint: %r", entry.index, error)
    return found
