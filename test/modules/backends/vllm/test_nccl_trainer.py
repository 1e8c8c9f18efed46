"""How vLLM's trainer engine is used; and over two GPUs, that bytes arrive."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from torchrl_moe.modules.backends.vllm.nccl_trainer import NcclTrainer, ready_key

CPU = torch.device("cpu")


class FakeEngine:
    """vLLM's, without NCCL: it sends what the source gives, in its order, between the client's steps."""

    def __init__(self, info: Any, client: Any, source: Any) -> None:
        self.info, self.client, self.source = info, client, source
        self.sent: list[Any] = []
        self.closed = False
        self.set = set[str]()
        store = SimpleNamespace(check=lambda keys: set(keys) <= self.set)
        self.model_update_group = SimpleNamespace(group=SimpleNamespace(store=store))
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": info.world_size})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        metadata = [(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata()]
        self.client.update_weights({})
        self.sent.append((metadata, dict(self.source)))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.closed = True


def test_the_engine_meets_the_workers_and_sends_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        NCCLTrainerWeightTransferEngine,
        "trainer_init",
        classmethod(lambda cls, info, *, client, source: FakeEngine(info, client, source)),
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    options: list[dict[str, Any]] = []
    trainer = NcclTrainer(options.append, "127.0.0.1", 29501, 3, CPU)
    engine: Any = trainer._engine
    assert options == [{"rank_offset": 1, "world_size": 3}]
    info = engine.info
    assert (info.master_address, info.master_port, info.world_size, info.rank) == ("127.0.0.1", 29501, 3, 0)
    assert info.is_sender
    engine.set = {ready_key(0, 1)}
    assert not trainer.is_ready(0)
    engine.set |= {ready_key(0, 2), ready_key(1, 1)}
    assert trainer.is_ready(0)
    assert not trainer.is_ready(1)
    trainer.send({"b": torch.ones(2), "a": torch.zeros(1, 3, dtype=torch.bfloat16)})
    ((metadata, tensors),) = engine.sent
    assert metadata == [("b", torch.float32, (2,)), ("a", torch.bfloat16, (1, 3))]
    assert list(tensors) == ["b", "a"]
    assert torch.equal(tensors["b"], torch.ones(2))
    assert list(engine.source) == []  # nothing of a version is kept
    trainer.close()
    assert engine.closed


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_bytes_arrive_on_another_gpu() -> None:
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    sent = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    got: dict[str, torch.Tensor] = {}
    threads: list[threading.Thread] = []

    def work(options: dict[str, Any]) -> None:
        torch.cuda.set_device(1)
        group = stateless_init_process_group(options["master_address"], options["master_port"], 1, 2, 1)
        group.group.store.set(ready_key(0, 1), b"")
        packed_nccl_broadcast_consumer(
            iterator=iter([(name, (tensor.shape, tensor.dtype)) for name, tensor in sent.items()]),
            group=group,
            src=0,
            post_unpack_func=lambda pairs: got.update({name: tensor.cpu() for name, tensor in pairs}),
            buffer_size_bytes=options["packed_buffer_size_bytes"],
            num_buffers=options["packed_num_buffers"],
            device=torch.device("cuda", 1),
        )

    def init(options: dict[str, Any]) -> None:
        threads.append(threading.Thread(target=work, args=(options,)))
        threads[0].start()

    trainer = NcclTrainer(init, "127.0.0.1", 29502, 2, torch.device("cuda", 0))
    while not trainer.is_ready(0):
        pass
    trainer.send(sent)
    threads[0].join(60)
    trainer.close()
    assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
