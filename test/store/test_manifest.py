"""Manifests: what they say of tensors, how often they are read, and what is refused in one that is read."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from support.weights import note_made
from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.store.manifest import Manifest, TensorEntry, check_tensors

ENTRIES = (
    TensorEntry("a", "float32", (2, 3), 0, "0123456789abcdef"),
    TensorEntry("b", "bfloat16", (), 64, "f" * 16),
    TensorEntry("c", "bool", (0, 4), 128, "0" * 16),
)


PATCHED = (  # 2 of 6 numbers, the whole, nothing
    TensorEntry("a", "float32", (2, 3), 0, "0123456789abcdef", 2),
    TensorEntry("b", "bfloat16", (), 16, "f" * 16, 1),
    TensorEntry("c", "bool", (0, 4), 24, "0" * 16, 0),
)


def test_sizes_and_ends_follow_from_shapes_and_what_changed() -> None:
    """A patch holds elements, and two bytes for the place of each."""
    assert [(entry.nbytes, entry.end) for entry in ENTRIES] == [(24, 24), (2, 66), (0, 128)]
    manifest, patch = Manifest(3, None, ENTRIES), Manifest(3, 2, PATCHED)
    assert (manifest.nbytes, manifest.extent) == (26, 128)
    assert manifest.tensors["b"] == (torch.bfloat16, torch.Size([]))
    assert manifest.by_name["b"] is ENTRIES[1]
    assert [(entry.is_whole, entry.stored) for entry in PATCHED] == [(False, 2 * (4 + 2)), (True, 2), (True, 0)]
    assert (patch.nbytes, patch.extent, patch.digest) == (26, 24, manifest.digest)  # wherever the bytes lie
    assert manifest.digest != Manifest(3, None, ENTRIES[:2]).digest


NAMES = ['"', "\\", "a\nb", "\n}", "\u2028", "é", "雪", "\x00\x7f", "", " ", "version", "}", ",", "x" * 3000]
ODD = tuple(TensorEntry(name, "uint8", (1,), 0, "0" * 16) for name in NAMES)
MANY = tuple(TensorEntry(f"t{i}", "int8", (i,), i, f"{i:016x}") for i in range(2000))


def as_patch(entries: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    return tuple(msgspec.structs.replace(e, changed=i % 2 * (e.nbytes > 3)) for i, e in enumerate(entries))


@pytest.mark.parametrize(
    ("version", "base", "entries"),
    [
        (3, None, ENTRIES), (3, 2, PATCHED), (3, 0, PATCHED[:1]), (0, None, ()), (1, 0, ()), (9, None, ODD),
        (9, 1, as_patch(ODD)), (9, None, MANY), (9, 7, as_patch(MANY)), ((1 << 63) - 1, (1 << 63) - 2, PATCHED),
    ],
)  # fmt: skip
def test_a_manifest_survives_its_text(version: int, base: int | None, entries: tuple[TensorEntry, ...]) -> None:
    manifest = Manifest(version, base, entries)
    text = manifest.to_json()
    found = Manifest.from_json(text)
    assert found == manifest
    assert found is not manifest
    assert (found.to_json(), found.digest, found.tensors) == (text, manifest.digest, manifest.tensors)


def test_the_text_is_the_header_of_a_file_of_safetensors() -> None:
    header = json.loads(Manifest(3, None, ENTRIES).to_json())
    metadata = header.pop("__metadata__")
    assert header == {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [64, 66]},
        "c": {"dtype": "BOOL", "shape": [0, 4], "data_offsets": [128, 128]},
    }
    assert len(metadata.pop("xxh3")) == 32
    digests = "0123456789abcdef" + "f" * 16 + "0" * 16
    assert metadata == {"format": "pt", "manifest": "4", "version": "3", "digests": digests}


def test_a_patch_is_one_array_for_any_tool() -> None:
    header = json.loads(Manifest(3, 2, PATCHED).to_json())
    metadata = header.pop("__metadata__")
    assert header == {"patch": {"dtype": "U8", "shape": [24], "data_offsets": [0, 24]}}
    assert len(metadata.pop("xxh3")) == 32
    assert metadata == {
        "format": "pt",
        "manifest": "4",
        "version": "3",
        "base": "2",
        "tensor a": '["F32",[2,3],0,2,"0123456789abcdef"]',
        "tensor b": f'["BF16",[],16,1,"{"f" * 16}"]',
        "tensor c": f'["BOOL",[0,4],24,0,"{"0" * 16}"]',
    }


@pytest.mark.parametrize("names", [["__metadata__"], ["a", "\ud800"]])
def test_names_that_no_file_of_safetensors_can_have_are_refused(names: list[str]) -> None:
    with pytest.raises(ManifestMismatch, match="no tensor may be named"):
        Manifest(1, None, tuple(TensorEntry(name, "int8", (), 0, "0" * 16) for name in names)).to_json()


def test_a_text_is_parsed_once_in_a_process_for_all_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Manifest(version, None, ENTRIES).to_json() for version in range(100, 103)]
    made = note_made(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(Manifest.from_json, texts * 40))
    assert [manifest.version for manifest in found] == [100, 101, 102] * 40
    assert len({id(manifest) for manifest in found}) == 3
    assert {version: len(threads) for version, threads in made.items()} == {100: 1, 101: 1, 102: 1}


def sealed(text: str) -> str:
    """Give a text, whatever it says, the checksum that it should have."""
    start = len('{"__metadata__":{"xxh3":"')
    return text[:start] + xxhash.xxh3_128_hexdigest(text[start + 32 :].encode()) + text[start + 32 :]


BASE = Manifest(3, None, ENTRIES).to_json()
PATCH = Manifest(3, 2, PATCHED).to_json()


def test_a_text_that_was_damaged_anywhere_is_refused() -> None:
    rng, text = random.Random(7), Manifest(3, 2, as_patch(MANY[:40])).to_json()
    assert sealed(text) == text
    for _ in range(800):
        at, kind = rng.randrange(len(text)), rng.randrange(4)
        other = rng.choice([c for c in '0123456789abcdef{}[]",: \n\\-x' if c != text[at]])
        damaged = [text[:at] + other + text[at + 1 :], text[:at], text[:at] + text[at + 1 :], text + other][kind]
        with pytest.raises(ManifestMismatch, match="the manifest is damaged"):
            Manifest.from_json(damaged)


def edited(*pairs: str, text: str = BASE) -> str:
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return sealed(text)


def patched(*pairs: str) -> str:
    return edited(*pairs, text=PATCH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ('{"__metadata__":{"xxh3":"', "is damaged"),
        (sealed('{"__metadata__":{"xxh3":"' + "0" * 32), "not one of this format: DecodeError"),
        (sealed(BASE[:-9]), "not one of this format: DecodeError"),
        (sealed(BASE + "\nx"), "there is more text after its end"),
        (edited("\n}\n,", "\n]\n,"), "a line begins with b']"),
        (edited(',"b":', '\n,"a":'), "a name comes twice"),
        (edited('"manifest":"4"', '"manifest":"3"'), "format '3', this release reads '4'"),
        (edited('"version":"3"', '"version":"-1"'), "Expected `int` >= 0"),
        (edited('"version":"3"', '"version":"true"'), "Expected `int`, got `bool`"),
        (edited('"version":"3",', ""), "KeyError: 'version'"),
        (edited('"version":"3"', f'"version":"{1 << 63}"'), "Expected `int` <= "),
        (edited('"a":{', '"c":{'), "2 tensors, and 48 digits"),
        (edited("F32", "C64"), "KeyError: 'C64'"),
        (edited("[2,3]", "[-2,-3]"), "Expected `int` >= 0"),
        (edited("[2,3]", "[2,3.5]"), "Expected `int`, got `float`"),
        (edited("[2,3]", "[2,4]"), "a of 32 bytes begins at 0 and ends at 24"),
        (edited("[0,24]", "[2,26]"), "a of 24 bytes begins at 2 and ends at 26"),
        (edited("[0,24]", '[0,24],"path":"/etc/passwd"'), "unknown field `path`"),
        (edited("0123456789abcdef", "0123456789abcde"), "3 tensors, and 47 digits of digests"),
        (edited("0123456789abcdef", "0123456789ABCDEF"), "digests have b'ABCD' in them"),
        (patched('"base":"2"', '"base":"3"'), "version 3 is a patch of version 3"),
        (patched('"base":"2"', '"base":"../../x"'), "JSON is malformed"),
        (patched("f" * 16, "../../../../../x"), "digests have b'../.' in them"),
        (patched('3],0,2,\\"', '3],0,7,\\"'), "tensor a has 7 changed elements of 6 at 0"),
        (patched('3],0,2,\\"', '3],2,2,\\"'), "tensor a has 2 changed elements of 6 at 2"),
        (patched("[0,24]", "[0,25]"), "its array is not one of 24 bytes"),
        (patched('"patch"', '"other"'), "its array is not one of 24 bytes"),
        (patched('"tensor a"', '"a"'), "a has 2 changed elements of 6 at 0"),
    ],
)
def test_a_text_that_is_no_manifest_is_refused(text: str, message: str) -> None:
    with pytest.raises(ManifestMismatch, match=re.escape(message)):
        Manifest.from_json(text)


EXPECTED = {"a": (torch.float32, torch.Size([2, 3])), "n": (torch.int64, torch.Size([4]))}
A = EXPECTED["a"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": None}, r"not the engine's tensors: 1 missing \(n\)\. Publish the whole model"),
        ({"x": A}, r"1 unknown to the engine \(x\)\. "),
        ({"a": None, "b": A}, r"1 missing \(a\); 1 unknown to the engine \(b\)\. "),
        ({f"x{i}": A for i in range(6)}, r"6 unknown to the engine \(x0, x1, x2, x3, \.\.\.\)"),
        ({"a": (torch.float32, torch.Size([3, 2]))}, r"a has shape \[3, 2\], the engine expects \[2, 3\]"),
        ({"n": (torch.int32, torch.Size([4]))}, r"n is torch\.int32, the engine expects torch\.int64"),
        ({"n": (torch.float32, torch.Size([4]))}, r"n is torch\.float32, the engine expects torch\.int64"),
        ({"a": (torch.int64, torch.Size([2, 3]))}, r"a is torch\.int64, the engine expects torch\.float32"),
    ],
)
def test_what_differs_is_named_and_floats_may_differ(changes: dict[str, Any], words: str) -> None:
    check_tensors({"n": EXPECTED["n"], "a": (torch.bfloat16, torch.Size([2, 3]))}, EXPECTED)
    with pytest.raises(ManifestMismatch, match=words):
        check_tensors({name: kind for name, kind in (EXPECTED | changes).items() if kind is not None}, EXPECTED)
