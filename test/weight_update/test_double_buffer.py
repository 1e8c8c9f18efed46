"""TorchRL's double-buffer name: a sender that may know no engine, and a receiver that looks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.weight_update.llm import VLLMDoubleBufferSyncScheme as TorchRLScheme
from torchrl.weight_update.llm import VLLMDoubleBufferTransport as TorchRLTransport

from support.weights import always, value_in, values, weights
from torchrl_moe.errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.fake_weights import FakeFleet, SoftError
from torchrl_moe.weight_update import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferTransport,
    VLLMWeightSyncScheme,
    get_model_metadata,
)


def test_torchrls_lines_work_as_they_are(tmp_path: Path) -> None:
    """The example of TorchRL's own class, sender here and receiver there."""
    model = make_tiny_moe("mixtral", num_hidden_layers=1)
    engine = FakeFleet(2, expected=get_model_metadata(model))
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path / "weights"), num_threads=2, strategy="tensordict")
    sender = scheme.create_sender()
    sender.register_model(model)
    report = sender.update_weights()
    assert (report.version, report.replicas) == (1, ())
    receiver = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path / "weights")).create_receiver(engine)
    assert receiver.poll_and_apply() is True
    assert torch.equal(engine.fakes[1].weights["lm_head.weight"], model.lm_head.weight)
    assert receiver.poll_and_apply() is False  # nothing new
    assert receiver.report is not None
    assert receiver.report.seconds < 60
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    sender.update_weights()
    receiver.apply_weights()
    assert torch.equal(engine.fakes[0].weights["lm_head.weight"], model.lm_head.weight)
    assert engine.versions == [2, 2]
    sender.shutdown()
    assert (tmp_path / "weights" / "STABLE").exists()  # the folder is the user's


def test_arguments_mean_what_torchrls_do_and_engines_may_see_the_directory_elsewhere(tmp_path: Path) -> None:
    folder, seen_as = tmp_path / "trainer", tmp_path / "mounted"
    theirs, ours = (kind(str(folder), str(seen_as), 3) for kind in (TorchRLScheme, VLLMDoubleBufferSyncScheme))
    for name in ("remote_addr", "local_addr", "num_threads"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert (ours.options.staging.threads, isinstance(ours, VLLMWeightSyncScheme)) == (3, True)
    engine = FakeFleet(1)
    receiver = ours.create_receiver(engine)
    assert receiver.poll_and_apply() is False  # nothing was published
    folder.mkdir()
    seen_as.symlink_to(folder)
    ours.create_sender().publish(weights(3))
    assert receiver.poll_and_apply()
    assert engine.fakes[0].reader is not None
    assert (engine.fakes[0].reader.folder, value_in(engine, 0)) == (seen_as, 3.0)


def test_the_transport_writes_and_reads_as_torchrls_does(tmp_path: Path) -> None:
    """The same calls on both; nested names come back flat."""
    sent = TensorDict({"a": torch.arange(4.0), "b": {"c": torch.tensor(3)}})
    for kind in (TorchRLTransport, VLLMDoubleBufferTransport):
        transport = kind(str(tmp_path / kind.__module__))
        assert transport.check_connection()
        transport.send_weights("policy", sent)
        found = transport.receive_weights(1.0)
        assert set(found.keys()) == {"a", "b.c"}
        assert torch.equal(found["a"], sent["a"])
        assert found["b.c"] == 3


def test_what_was_received_can_be_applied_if_it_is_the_newest(tmp_path: Path) -> None:
    engine, scheme = FakeFleet(1), VLLMDoubleBufferSyncScheme(tmp_path)
    transport, receiver = scheme.create_transport(), scheme.create_receiver(engine)
    assert transport.receive_weights() is None
    with pytest.raises(ManifestMismatch, match="nothing was written to"):
        receiver.apply_weights(weights(1))
    transport.send_weights("policy", weights(1))
    old = transport.receive_weights()
    assert old is not None
    receiver.apply_weights(old)
    assert value_in(engine, 0) == 1.0
    transport.send_weights("policy", weights(2))
    with pytest.raises(DigestMismatch, match="version 2: bytes of a are not those published"):
        receiver.apply_weights(old)
    with pytest.raises(ManifestMismatch, match="not the tensors of version 2 in the directory, which alone can be"):
        receiver.apply_weights({"a": old["a"]})
    with pytest.raises(ManifestMismatch, match="a is of type int, not a tensor"):
        receiver.apply_weights({"a": 1})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="weights must be a model, a TensorDict, or names and tensors, got list"):
        receiver.apply_weights([1])  # type: ignore[arg-type]
    assert value_in(engine, 0) == 1.0
    transport.shutdown()


def test_a_restarted_replica_is_brought_to_the_newest_version_that_can_be_read(tmp_path: Path) -> None:
    engine, scheme = FakeFleet(2), VLLMDoubleBufferSyncScheme(tmp_path / "weights")
    sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
    assert engine.weight_sync == receiver.bring
    engine.restart(0)
    receiver.bring(0)
    assert (engine.states, value_in(engine, 0)) == (["SERVING"] * 2, None)  # its checkpoint, as the other
    sender.publish(weights(1))
    receiver.poll_and_apply()
    sender.publish(weights(2))
    engine.restart(1).fail["swap_weights"] = lambda asked: None if asked else SoftError("not now", restored=True)
    with pytest.raises(WeightSyncError, match="replica 1 was not brought to version 2: not now"):
        receiver.bring(1)
    receiver.bring(1)
    assert (engine.states, values(engine)) == (["SERVING"] * 2, [1.0, 2.0])
    sender.publish({**weights(3), "a": torch.zeros(3, 3)})  # this sender knows no engine
    engine.restart(1)
    with pytest.raises(WeightSyncError, match=r"replica 1 was not brought to version 3: .*a has shape \[3, 3\]"):
        receiver.bring(1)
    receiver.bring(1)
    assert (engine.states, values(engine)) == (["SERVING"] * 2, [1.0, 2.0])
    sender.publish(weights(4))
    receiver.poll_and_apply()
    assert values(engine) == [4.0, 4.0]
    shutil.rmtree(tmp_path / "weights")
    engine.restart(1)
    with pytest.raises(WeightSyncError, match="has no version any more: send the weights again"):
        receiver.bring(1)  # and not the checkpoint's beside the other's
    sender.publish(weights(5))
    receiver.bring(1)
    assert value_in(engine, 1) == 5.0
    sender.shutdown()


def test_a_receiver_leaves_an_engine_to_the_sender_that_knows_it(tmp_path: Path) -> None:
    engine, scheme = FakeFleet(1), VLLMDoubleBufferSyncScheme(tmp_path)
    sender = scheme.create_sender()
    sender.init_all_workers_group(None, vllm_engine=engine)
    scheme.create_receiver(engine)
    assert engine.weight_sync == sender.bring
    assert sender.update_weights(weights(2)).failed == {}
    sender.shutdown()


def test_a_trainer_that_was_restarted_counts_on_from_its_directory(tmp_path: Path) -> None:
    engine = FakeFleet(2)
    receiver = VLLMDoubleBufferSyncScheme(tmp_path).create_receiver(engine)
    for number in (1, 2, 3):  # each a process of its own
        sender = VLLMDoubleBufferSyncScheme(tmp_path).create_sender()
        assert sender.publish(weights(number), wait=number < 3) == number
        sender.wait_published()
        sender.shutdown()
        assert receiver.poll_and_apply()
        assert values(engine) == [number] * 2
    assert engine.versions == [3, 3]


def test_versions_of_a_directory_that_began_again_are_refused_until_they_are_newer(tmp_path: Path) -> None:
    folder, engine = tmp_path / "weights", FakeFleet(2)
    receiver = VLLMDoubleBufferSyncScheme(folder).create_receiver(engine)
    sender = VLLMDoubleBufferSyncScheme(folder).create_sender()
    for number in (1, 2):
        sender.publish(weights(number))
        assert receiver.poll_and_apply()
    sender.shutdown()
    shutil.rmtree(folder)
    assert not receiver.poll_and_apply()
    sender = VLLMDoubleBufferSyncScheme(folder).create_sender()
    for number, words in ((1, ""), (2, ", with other weights")):
        assert sender.publish(weights(10 * number)) == number
        engine.restart(1)
        for ask in (receiver.poll_and_apply, lambda: receiver.bring(1)):
            with pytest.raises(WeightSyncError, match=f"weights is {number}{words}, and the replicas hold version 2"):
                ask()
    assert (values(engine), engine.states) == ([2.0, None], ["SERVING", "STARTING"])
    sender.publish(weights(30))
    receiver.bring(1)
    assert receiver.poll_and_apply()
    assert (values(engine), engine.versions) == ([30.0, 30.0], [3, 3])
    sender.shutdown()


def test_too_few_replicas_are_an_error_and_only_the_late_ones_are_asked_again(tmp_path: Path) -> None:
    engine, scheme = FakeFleet(3), VLLMDoubleBufferSyncScheme(tmp_path)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
    sender.publish(weights())
    for index in (0, 1):
        engine.fakes[index].fail["swap_weights"] = always(SoftError("not now", restored=True))
    with pytest.raises(WeightSyncError, match="fewer than 2 replicas hold version 1") as caught:
        receiver.poll_and_apply()
    assert caught.value.report is receiver.report
    assert engine.versions == [0, 0, 1]
    engine.fakes[0].fail.clear()
    assert receiver.poll_and_apply()
    assert (engine.versions, engine.fakes[2].asked["swap_weights"]) == ([1, 0, 1], 1)
    sender.shutdown()


def test_a_bad_argument_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        VLLMDoubleBufferSyncScheme(tmp_path, num_threads=0)
    scheme = VLLMDoubleBufferSyncScheme(tmp_path)
    with pytest.raises(ValueError, match="vllm_engine must be an AsyncVLLM"):
        scheme.create_receiver("x")
    with pytest.raises(ValueError, match=r"apply_weights\(inplace=False\): the engine's weights are replaced in place"):
        scheme.create_receiver(FakeFleet(1)).apply_weights(inplace=False)
    with pytest.raises(ValueError, match="model, strategy: weights are returned, not loaded: load them yourself"):
        scheme.create_transport().receive_weights(model=1, strategy=2)
