"""Our own engines conform: vLLM in all that is checked, the fake engine in all that needs no model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from support.conformance import shared_moe
from support.conforming_engine import QUICK
from support.engines import EngineShelf
from support.faulty_engines import TOKEN_SECONDS
from support.versions import Versions
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.conformance import CHECKS, NotOffered, Sampling, ServiceAdapter, Settings, check
from torchrl_moe.testing.fake_engine import LAYOUT

WITHOUT_A_MODEL = {
    *("rows", "dtype", "dense_layers", "last_token", "values", "chunked_prefill", "samples"),
    *("abort", "resume", "versions"),
}


@contextmanager
def updatable(engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path) -> Iterator[ServiceAdapter]:
    """The adapter of a real engine, whose weights are brought by hand; it has its own again afterwards."""
    versions = Versions(engine, shelf, "qwen3_moe", tmp_path, "memmap")
    numbers = itertools.count(versions.held + 1)

    def update(model: PreTrainedModel) -> None:
        versions.reference.model.load_state_dict(model.state_dict())
        manifest = versions.publish(next(numbers))
        versions.stage(manifest)
        versions.swap(manifest)

    yield ServiceAdapter(engine, update)
    versions.close()


def test_plain_transformers_conforms(second_engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path) -> None:
    with updatable(second_engine, shelf, tmp_path) as adapter:
        report = check(adapter, shelf.folder("qwen3_moe"), settings=Settings(tolerance=1e-5, tie=5e-6))
    print(report)
    assert report.failures == ()
    # no prompt is cached, and none is read in chunks
    assert {one.name for one in report.results if not one.holds} <= {"prefix_cache"}


@pytest.mark.engine("qwen3_moe", max_num_batched_tokens=64, max_num_seqs=8, enable_chunked_prefill=True)
def test_vllm_conforms(engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path) -> None:
    with updatable(engine, shelf, tmp_path) as adapter:
        report = check(adapter, shelf.folder("qwen3_moe"), settings=Settings(tolerance=1e-5, tie=5e-6))
    print(report)
    assert [one.text for one in report.results if not one.holds] == []
    assert [one.name for one in report.results] == [one.name for one in CHECKS]


def test_the_fake_engine_conforms_as_far_as_it_goes() -> None:
    with FakeAsyncVLLM(token_seconds=TOKEN_SECONDS) as engine:
        report = check(ServiceAdapter(engine), layout=LAYOUT, settings=QUICK)
    assert report.engine == "FakeAsyncVLLM('fake')"
    assert report.failures == ()
    assert {one.name for one in report.results if one.holds} == WITHOUT_A_MODEL


def test_answers_are_what_a_wrapper_would_write() -> None:
    with FakeAsyncVLLM() as engine:
        adapter = ServiceAdapter(engine)
        groups = adapter.generate([[65, 66, 67], [68]], Sampling(max_tokens=4, n=2, top_k=5), ["a", "b"])
        (request, _) = engine.replicas[0].submitted
    assert [len(group) for group in groups] == [2, 2]
    one = groups[0][1]
    assert (len(one.token_ids), len(one.log_probs), one.versions.tolist()) == (4, 4, [0] * 4)
    assert (one.routed_experts.shape, one.routed_experts.dtype) == ((7, 4, 2), np.int8)
    assert (one.routed_experts[-1] == -1).all() and (one.routed_experts[:, 0] == -1).all()
    assert (one.finish_reason, len(one.native.outputs)) == ("length", 1)
    wanted = {"max_tokens": 4, "n": 2, "logprobs": 0, "ignore_eos": True, "temperature": 1.0, "top_k": 5}
    assert request.sampling_params == wanted
    with FakeAsyncVLLM(layout=None) as engine:
        ((one,),) = ServiceAdapter(engine).generate([[65]], Sampling(max_tokens=2))
    assert one.routed_experts is None


def test_the_version_is_that_of_the_oldest_replica() -> None:
    with FakeAsyncVLLM(num_replicas=2) as engine:
        adapter = ServiceAdapter(engine)
        engine.replicas[0].version = 3
        assert adapter.weights_version() == 0
        engine.replicas[1].version = 4
        assert adapter.weights_version() == 3


def test_weights_are_brought_as_one_was_told_or_by_the_engines_sender() -> None:
    given: list[Any] = []
    sent: list[Any] = []
    with FakeAsyncVLLM() as engine:
        with pytest.raises(NotOffered, match="no sender has this engine, and ServiceAdapter was given no update="):
            ServiceAdapter(engine).update_weights(shared_moe())
        engine.register_weight_sync(lambda index: None, sent.append)
        ServiceAdapter(engine, update=given.append).update_weights(shared_moe())
        assert (given, sent) == ([shared_moe()], [])
        ServiceAdapter(engine).update_weights(shared_moe())
    (name, tensor), *_ = sent[0].items()
    assert tensor.equal(shared_moe().state_dict()[name])
    assert any(".experts.7.gate_proj.weight" in name for name in sent[0])  # the names of a checkpoint
