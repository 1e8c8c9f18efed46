"""The carriers of the replica protocol, and who fulfils it."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from support import toy_kind
from torchrl_moe.modules.backends.process.process_replica import LocalReplica
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionMetrics,
    CompletionOutput,
    Replica,
    ReplicaInfo,
    ReplicaStats,
    Request,
)
from torchrl_moe.testing.fake_engine import FakeReplica


def output(index: int = 0, finish_reason: str = "stop", **fields: object) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        token_ids=np.array([7, 8]),
        text="hi",
        finish_reason=finish_reason,
        policy_versions=np.zeros(2, np.int32),
        **fields,
    )


def completion(*outputs: CompletionOutput) -> Completion:
    return Completion(
        request_id="r", prompt=None, prompt_token_ids=np.array([1, 2, 3]), num_cached_tokens=1, outputs=list(outputs)
    )


def test_vllm_and_fake_replicas_fulfil_the_protocol() -> None:
    assert isinstance(LocalReplica(0, toy_kind, {"model": "m"}, {}), Replica)
    assert isinstance(FakeReplica(), Replica)
    assert not isinstance(object(), Replica)


def test_a_completion_is_aborted_if_one_answer_is() -> None:
    assert not completion(output(0), output(1, "length")).aborted
    assert completion(output(0), output(1, "abort")).aborted
    assert not completion().aborted


@pytest.mark.parametrize("params", [{"n": 2}, SimpleNamespace(n=2)], ids=["mapping", "object"])
def test_a_request_knows_its_sampling_parameters_however_they_came(params: object) -> None:
    request = Request(request_id="r", sampling_params=params, prompt="hi")
    assert (request.param("n"), request.param("logprobs")) == (2, None)
    assert Request(request_id="r", sampling_params=None, prompt="hi").param("n") is None


def test_reprs_show_counts_and_shapes_not_arrays() -> None:
    bare = "CompletionOutput(index=0, tokens=2, text='hi', finish_reason='stop', routed_experts=None)"
    routed = "CompletionOutput(index=1, tokens=2, text='hi', finish_reason='stop', routed_experts=[4, 3, 2])"
    assert repr(output()) == bare
    assert repr(output(1, routed_experts=np.zeros((4, 3, 2), np.uint8))) == routed
    assert repr(completion(output())) == f"Completion(request_id='r', prompt_tokens=3, cached=1, outputs=[{bare}])"


def test_carriers_have_no_shared_defaults_and_say_nothing_of_a_replica_until_told() -> None:
    one, two = completion(), completion()
    assert one.metrics is not two.metrics
    assert one.metrics == CompletionMetrics(queue_seconds=0.0, first_token_seconds=0.0, total_seconds=0.0, replica=-1)
    assert one.finished


def test_requests_infos_and_stats_cannot_be_changed() -> None:
    for carrier in (
        Request(request_id="r", sampling_params=None, prompt="hi"),
        ReplicaInfo(model="m", layout=None, max_model_len=8),
        ReplicaStats(),
    ):
        name = dataclasses.fields(carrier)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(carrier, name, 1)
        assert pickle.loads(pickle.dumps(carrier)) == carrier


def test_the_protocol_loads_neither_an_engine_nor_transformers() -> None:
    code = (
        "import sys; import torchrl_moe.modules.backends.replica, torchrl_moe.modules.backends.process.process_replica;"
        "print([name for name in ('vllm', 'ray', 'transformers', 'tensordict', 'torchrl') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_completion_that_an_older_release_saved_can_be_read() -> None:
    """Collectors keep them in checkpoints. Fields that it did not have yet get their defaults."""
    whole = completion(output(resume="forced"))
    whole.prompt_logprobs = np.zeros(3, np.float32)
    again = pickle.loads(pickle.dumps(whole))
    assert again.outputs[0].resume == "forced"
    assert len(again.prompt_logprobs) == 3
    old = pickle.loads(pickle.dumps(whole))
    del old.prompt_logprobs, old.outputs[0].resume, old.outputs[0].kept
    again = pickle.loads(pickle.dumps(old))
    assert (again.prompt_logprobs, again.outputs[0].resume, again.outputs[0].kept) == (None, "none", None)
    assert again.prompt_token_ids.tolist() == whole.prompt_token_ids.tolist()
