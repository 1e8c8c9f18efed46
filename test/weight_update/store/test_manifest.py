"""Manifests: what they say of tensors, and what is refused in one that is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.weight_update.store.manifest import Manifest, TensorEntry, check_tensors

ENTRIES = (
    TensorEntry("a", "float32", (2, 3), 0, "0123456789abcdef"),
    TensorEntry("b", "bfloat16", (), 64, "f" * 16),
    TensorEntry("c", "bool", (0, 4), 128, "0" * 16),
)


def test_sizes_and_ends_follow_from_shapes() -> None:
    assert [entry.nbytes for entry in ENTRIES] == [24, 2, 0]
    assert [entry.end for entry in ENTRIES] == [24, 66, 128]
    manifest = Manifest(3, 1, ENTRIES)
    assert (manifest.nbytes, manifest.extent) == (26, 128)
    assert Manifest(3, None, (ENTRIES[0]._replace(base=2),)).extent == 0
    assert manifest.tensors["b"] == (torch.bfloat16, torch.Size([]))


@pytest.mark.parametrize(
    "manifest", [Manifest(3, 1, ENTRIES), Manifest(3, None, (ENTRIES[0]._replace(base=2),)), Manifest(0, 0, ())]
)
def test_a_manifest_survives_its_file(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_the_digest_does_not_depend_on_where_the_bytes_lie() -> None:
    here, there = Manifest(3, 1, ENTRIES), Manifest(4, None, tuple(e._replace(base=2, offset=640) for e in ENTRIES))
    assert here.digest == there.digest
    assert here.digest != Manifest(3, 1, ENTRIES[:2]).digest


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(Manifest(3, None, ENTRIES).to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ('{"format": 2, "vers', "not JSON"),
        ("[]", "its fields are not format, version, slot, name"),
        (changed(path="/etc/passwd"), "its fields are not"),
        (changed(format=1), "format 1, this release reads 2"),
        (changed(version=-1), "version -1 or slot None is not a count"),
        (changed(version=True), "version True"),
        (changed(slot="../../x"), "slot '../../x' is not a count"),
        (changed(slot=1 << 70), "is not a count"),
        (changed(name=["a", "b"]), "its lists differ in length"),
        (changed(offset="abc"), "its lists differ in length"),
        (changed(name=["a", "b", 3]), "name 3"),
        (changed(name=["a", "b", "b"]), "a name comes twice"),
        (changed(dtype=["float32", "__class__", "bool"]), "dtype '__class__'"),
        (changed(dtype=["float32", "complex64", "bool"]), "dtype 'complex64'"),
        (changed(shape=[[2, 3], [], [-1]]), r"shape \[-1\]"),
        (changed(shape=[[2, 3], [], 4]), "shape 4"),
        (changed(shape=[[2, 3.0], [], [1]]), r"shape \[2, 3.0\]"),
        (changed(offset=[-64, 64, 128]), "offset -64"),
        (changed(offset=[3, 64, 128]), "offset 3"),
        (changed(digest=["0" * 16, "f" * 15, "0" * 16]), "digest 'fffffffffffffff'"),
        (changed(digest=["0" * 16, "../../../../../x", "0" * 16]), "digest"),
        (changed(base=[None, 3, None]), "base 3"),
        (changed(base=[None, "../x", None]), "base '../x'"),
        (changed(slot=1, base=[None, 2, None]), "base 2"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(text: str, words: str) -> None:
    with pytest.raises(ManifestMismatch, match=words):
        Manifest.from_json(text)


# -- what is expected -------------------------------------------------------------------------------------------------

EXPECTED = {"a": (torch.float32, torch.Size([2, 3])), "n": (torch.int64, torch.Size([4]))}


def test_exactly_the_expected_tensors_pass_and_floats_may_differ() -> None:
    check_tensors(EXPECTED, EXPECTED)
    check_tensors({"n": EXPECTED["n"], "a": (torch.bfloat16, torch.Size([2, 3]))}, EXPECTED)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"a": EXPECTED["a"]}, r"not the engine's tensors: 1 missing \(n\)\. Publish the whole model"),
        ({**EXPECTED, "x": EXPECTED["a"]}, r"1 unknown to the engine \(x\)\. "),
        ({"b": EXPECTED["a"], "n": EXPECTED["n"]}, r"1 missing \(a\); 1 unknown to the engine \(b\)\. "),
        (
            {**EXPECTED, **{f"x{i}": EXPECTED["a"] for i in range(6)}},
            r"6 unknown to the engine \(x0, x1, x2, x3, \.\.\.\)",
        ),
        ({**EXPECTED, "a": (torch.float32, torch.Size([3, 2]))}, r"a has shape \[3, 2\], the engine expects \[2, 3\]"),
        ({**EXPECTED, "n": (torch.int32, torch.Size([4]))}, r"n is torch\.int32, the engine expects torch\.int64"),
        ({**EXPECTED, "n": (torch.float32, torch.Size([4]))}, r"n is torch\.float32, the engine expects torch\.int64"),
        ({**EXPECTED, "a": (torch.int64, torch.Size([2, 3]))}, r"a is torch\.int64, the engine expects torch\.float32"),
    ],
)
def test_what_differs_is_named(found: dict[str, tuple[torch.dtype, torch.Size]], words: str) -> None:
    with pytest.raises(ManifestMismatch, match=words):
        check_tensors(found, EXPECTED)
