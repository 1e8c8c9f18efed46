"""The choices of a weight sync: what is refused and why, what follows from them, whose folder it is, and the canary."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update.llm import VLLMWeightSyncScheme as TorchRLScheme

from torchrl_moe.store.folder import WriterLock, is_in_memory
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.options import SwapOptions, canary_of
from torchrl_moe.weight_update.scheme import _remove_orphans

GLOO = {"transport": "gloo"}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"transport": "mpi"}, "transport must be one of 'memmap', 'gloo', 'nccl', got 'mpi'"),
        ({"master_address": "nccl"}, "'nccl' is TorchRL's first argument, and not the transport: write transport='nc"),
        ({"num_buffers": 2}, "num_buffers=2 belongs to transport='nccl'"),
        ({"transport": "nccl", "num_buffers": 0}, "num_buffers must be an integer of at least 1, or None, got 0"),
        ({"transport": "nccl", "device": "cpu"}, "device='cpu': transport='nccl' sends from a GPU"),
        ({"mode": "abort"}, "mode must be one of 'hot_swap', 'drain', 'abort_resume', got 'abort'"),
        ({"verify": True}, "verify must be one of 'digest', 'canary', 'off', got True"),
        ({"prefetch": 0}, "prefetch must be at least 1 thread, got 0"),
        ({"delta": 1}, "delta, unless True or False, must be one of 'auto', got 1"),
        ({"delta": True, **GLOO}, "delta=True needs transport='memmap': 'gloo' sends whole versions"),
        ({"fsync": 1}, "fsync must be True or False, got 1"),
        ({"strategy": "pickle"}, "strategy must be one of 'tensordict', 'state_dict', got 'pickle'"),
        ({"kv": "keep"}, "kv must be one of 'salt', 'recompute', got 'keep'"),
        ({"min_serving": -1}, "min_serving must be at least 0, got -1"),
        ({"min_serving": float("nan")}, "min_serving must be a share above 0"),
        ({"min_serving": "all"}, "min_serving must be a number of replicas or a share of them"),
        ({"rolling": 0}, "rolling must be at least 1, got 0"),
        ({"rolling": 1.5}, r"rolling must be a share above 0 and at most 1\.0, or a whole number"),
        ({"timeout_seconds": 0}, "timeout_seconds must be a number above 0, got 0"),
        ({"dtype": "float32"}, "dtype must be one of 'engine', 'trainer', got 'float32'"),
        ({"dtype": torch.int8}, "dtype must be a floating one, got torch.int8"),
        ({"lora": "both"}, "lora must be one of 'merged', 'adapter', got 'both'"),
        ({"master_port": 1 << 16, **GLOO}, "master_port must be an integer from 0 to 65535, or None, got 65536"),
        ({"device": "cuda:0", **GLOO}, "device='cuda:0': transport='gloo' sends from the CPU"),
        ({"gpus_per_replica": 0}, "gpus_per_replica must be an integer of at least 1, or None, got 0"),
        ({"buffer_bytes": 0, **GLOO}, "buffer_bytes must be an integer of at least 1, or None, got 0"),
        ({"buffer_bytes": 1}, "buffer_bytes belongs to transport='gloo' and 'nccl'"),
        ({"master_address": "10.0.0.1", **GLOO}, "master_address='10.0.0.1': transport='gloo' reaches .* one host"),
        ({"min_servin": 1}, "unexpected keyword argument 'min_servin'"),
        *(
            ({"lora": "adapter", name: value, **others}, f"{name}={value!r} has no meaning with lora='adapter'")
            for name, value, others in [
                ("transport", "gloo", {}),
                ("mode", "drain", {}),
                ("kv", "recompute", {}),
                ("verify", "canary", {}),
                ("dtype", torch.bfloat16, {}),
                ("delta", True, {"folder": "x"}),
                ("fsync", True, {"folder": "x"}),
            ]
        ),
    ],
)
def test_a_bad_choice_is_refused_with_the_good_ones(kwargs: dict[str, Any], words: str) -> None:
    is_type = re.search("must be a number of replicas|unexpected keyword", words)
    with pytest.raises(TypeError if is_type else ValueError, match=words):
        VLLMWeightSyncScheme(**kwargs)


def test_it_is_torchrls_scheme_with_its_arguments_in_their_places() -> None:
    theirs = list(inspect.signature(TorchRLScheme).parameters)
    assert list(inspect.signature(VLLMWeightSyncScheme).parameters)[: len(theirs)] == theirs
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # TorchRL's own calls its state_dict strategy experimental
        scheme = VLLMWeightSyncScheme("10.0.0.1", 29500, 2, 3, "state_dict", 1)
    assert isinstance(scheme, WeightSyncScheme)
    assert (scheme.strategy.extract_as, scheme.options.num_replicas) == ("state_dict", 3)
    options = scheme.options.collective
    assert (options.master_address, options.master_port, options.gpus_per_replica) == ("10.0.0.1", 29500, 2)
    assert (options.device, options.torch_device) == (1, torch.device("cuda:1"))  # TorchRL's way to name it


@pytest.mark.parametrize("side", ["init_on_sender", "init_on_receiver"])
def test_a_collectors_half_is_refused_with_what_to_do(side: str) -> None:
    """A multi-process collector that gets the scheme as its ``weight_sync_schemes`` calls these."""
    scheme = VLLMWeightSyncScheme()
    with pytest.raises(TypeError, match=rf"{side}\(model_id, context\): .*an engine holds the weights. Use create_"):
        getattr(scheme, side)(model_id="policy", context=None)
    with pytest.raises(RuntimeError, match="Must be initialized on sender"):
        scheme.send()


def test_a_pickled_scheme_has_a_store_of_its_own_or_the_given_one(tmp_path: Path) -> None:
    own, given = VLLMWeightSyncScheme(mode="drain"), VLLMWeightSyncScheme(folder=tmp_path)
    copy, same = pickle.loads(pickle.dumps(own)), pickle.loads(pickle.dumps(given))
    assert copy.options.store.folder == copy.options.store.seen_as == copy.folder != own.folder
    assert (copy.options.swapping, same.folder, same.options) == (own.options.swapping, tmp_path, given.options)
    copy.shutdown()
    same.shutdown()
    assert [folder.is_dir() for folder in (own.folder, copy.folder, tmp_path)] == [True, False, True]


def test_it_shows_its_choices() -> None:
    assert repr(VLLMWeightSyncScheme(mode="drain", kv="recompute")) == (
        "VLLMWeightSyncScheme(transport='memmap', mode='drain', kv='recompute', verify='digest', delta=False)"
    )


def test_its_own_folder_goes_at_shutdown_and_a_given_one_stays(tmp_path: Path) -> None:
    own, given = VLLMWeightSyncScheme(), VLLMWeightSyncScheme(folder=tmp_path / "store")
    sender = given.create_sender()
    sender.publish({"a": torch.ones(1)})
    sender.shutdown()
    assert own.folder.is_dir()
    for scheme in (own, given, own):
        scheme.shutdown()
    assert not own.folder.exists()
    assert (tmp_path / "store").is_dir()
    forgotten = VLLMWeightSyncScheme().folder
    gc.collect()
    assert not forgotten.exists()


def test_what_a_killed_trainer_left_in_memory_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, writing, new, empty = (tmp_path / f"torchrl_moe-weights-{i}" for i in range(4))
    other = tmp_path / "other"
    for store in (killed, writing, new, empty, other):
        store.mkdir()
    lock = WriterLock(writing)
    for store in (killed, new, other):
        (store / "writer").touch()
    (killed / "v1.safetensors").touch()
    for store in (killed, writing, other):
        os.utime(store / "writer", (0, 0))
    _remove_orphans(tmp_path)
    assert set(tmp_path.iterdir()) == {writing, new, empty, other}
    lock.close()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    _remove_orphans(tmp_path)
    assert writing.exists()  # another user's


def test_a_refused_scheme_leaves_no_folder_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = tempfile.mkdtemp, []  # by this process: others make some in the same place meanwhile
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1])
    VLLMWeightSyncScheme().shutdown()  # one that is not refused makes its folder in this way
    assert len(made) == 1
    with pytest.raises(ValueError, match="keep_versions must be an integer of at least 2"):
        VLLMWeightSyncScheme(keep_versions=1)
    assert not [folder for folder in made if Path(folder).exists()]


def test_element_wise_patches_are_for_weights_in_folders_that_are_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert VLLMWeightSyncScheme(folder="/dev/shm/a/b", delta=True).options.store.delta
    disk = VLLMWeightSyncScheme(folder=tmp_path / "new" / "store")
    assert disk.options.store.delta is not is_in_memory(tmp_path)
    monkeypatch.setattr("torchrl_moe.weight_update.scheme.is_in_memory", lambda folder: folder != tmp_path)
    choices: list[dict[str, Any]] = [{}, {"folder": tmp_path}, {"folder": tmp_path, **GLOO}]
    choices.append({"folder": tmp_path, "lora": "adapter"})
    schemes = [VLLMWeightSyncScheme(**given) for given in choices]
    assert [scheme.options.store.delta for scheme in schemes] == [False, True, False, False]
    schemes[0].shutdown()


@pytest.mark.parametrize(
    ("choices", "replicas", "hold", "serve"),
    [
        ({}, 1, 1, 0),
        ({}, 2, 1, 1),
        ({}, 4, 3, 3),
        ({"rolling": 3}, 4, 3, 1),
        ({"rolling": 9}, 4, 3, 0),
        ({"min_serving": 4}, 4, 4, 3),  # one may always be away
        ({"min_serving": 2, "rolling": 4}, 4, 2, 2),
        ({"min_serving": 0}, 4, 0, 0),
        ({}, 10, 9, 9),
        ({}, 64, 57, 58),  # nine tenths hold it, a tenth is away
        ({}, 1024, 921, 922),
        ({"rolling": 0.5, "min_serving": 0.25}, 8, 2, 2),
        ({"rolling": 0.5}, 8, 7, 4),
        ({"rolling": 0.01}, 8, 7, 7),  # one at least
        ({"min_serving": 1.0}, 8, 8, 7),
        ({"min_serving": 0.7}, 10, 7, 7),  # not 6, as floor(0.7 * 10) would be if 0.7 were a little less
    ],
)
def test_how_many_must_hold_a_version_and_how_many_must_serve_meanwhile(
    choices: dict[str, Any], replicas: int, hold: int, serve: int
) -> None:
    options = SwapOptions(**choices)
    assert (options.must_hold(replicas), options.must_serve(replicas)) == (hold, serve)


def test_the_canary_has_the_models_own_log_probs_and_leaves_it_as_it_was() -> None:
    model = make_tiny_moe("mixtral").train()
    model.model.layers[0].eval()
    dropout = torch.nn.Dropout(0.5)
    model.lm_head = torch.nn.Sequential(dropout, model.lm_head)
    canary = canary_of(model)
    assert (model.training, dropout.training, model.model.layers[0].training) == (True, True, False)
    ids = canary["token_ids"]
    assert (len(ids), len(set(ids))) == (16, 16)
    assert all(type(value) is float for value in canary["log_probs"])
    with torch.no_grad():
        table = model.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
    wanted = [table[position, ids[position + 1]].item() for position in range(15)]
    assert canary["log_probs"] == pytest.approx(wanted, abs=1e-6)


def test_the_coarser_dtype_sets_the_canarys_tolerance() -> None:
    fine, coarse = make_tiny_moe(dtype=torch.float32), make_tiny_moe(dtype=torch.bfloat16)
    for trainer, engine, tolerance in (
        (fine, None, 1e-3),
        (fine, torch.float32, 1e-3),
        (fine, torch.bfloat16, 1.0),
        (coarse, torch.float32, 1.0),
    ):
        assert canary_of(trainer, engine)["tolerance"] == tolerance


@pytest.mark.soak
def test_a_process_that_ends_without_shutdown_leaves_no_memory_behind() -> None:
    script = (
        "from torchrl_moe.weight_update import VLLMWeightSyncScheme as S; s = S(); print(s.folder, s.folder.is_dir())"
    )
    folder, existed = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert (existed, Path(folder).exists()) == ("True", False)
