"""TorchRL's ``vLLMUpdaterV2`` over a real engine that a sender of ours has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchrl.collectors.llm.weight_update.vllm_v2 import vLLMUpdaterV2
from transformers import AutoModelForCausalLM

from support.engines import EngineShelf
from support.reference import TOLERANCE
from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.weight_update import VLLMWeightSyncScheme

IDS = [72, 105, 44, 32, 119, 111]


@pytest.mark.engine("qwen3_moe")
def test_torchrls_updater_brings_weights_through_our_sender(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    updater = vLLMUpdaterV2(engine)
    assert updater.get_tp_size() == 1
    assert updater.model_metadata == engine.get_model_metadata()
    with pytest.raises(RuntimeError, match="init_weight_update_group: no sender has this engine"):
        updater.init()
    model = AutoModelForCausalLM.from_pretrained(shelf.folder("qwen3_moe"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(None, vllm_engine=engine)
    updater.init()

    def log_probs() -> torch.Tensor:
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([IDS])).logits[0].float(), -1)
        return rows[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])]

    version, old = engine.replica_table[0].version, log_probs()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    updater.push_weights_from_transformers(SimpleNamespace(model=model))  # as a TorchRL wrapper holds it
    assert engine.replica_table[0].version == version + 1
    assert (log_probs() - old).abs().max() > 100 * TOLERANCE
    assert (engine.score(IDS)[1:] - log_probs()).abs().max() <= TOLERANCE
    with pytest.raises(ManifestMismatch, match="missing"):  # part of a model is never loaded
        updater.push_weights(iter(list(before.items())[:3]))
    updater.push_weights(iter(before.items()))
    assert (engine.score(IDS)[1:] - old).abs().max() <= TOLERANCE
    sender.shutdown()
