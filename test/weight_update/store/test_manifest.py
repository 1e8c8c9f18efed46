"""Manifests: what they say of tensors, how often they are read, and what is refused in one that is read."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import xxhash

from support.manifests import note_made
from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.weight_update.store.manifest import Manifest, TensorEntry, check_tensors

ENTRIES = (
    TensorEntry("a", "float32", (2, 3), 0, "0123456789abcdef"),
    TensorEntry("b", "bfloat16", (), 64, "f" * 16),
    TensorEntry("c", "bool", (0, 4), 128, "0" * 16),
)


def elsewhere(*bases: int | None) -> tuple[TensorEntry, ...]:
    return tuple(msgspec.structs.replace(e, base=base) for e, base in zip(ENTRIES, bases, strict=False))


def test_sizes_and_ends_follow_from_shapes() -> None:
    assert [entry.nbytes for entry in ENTRIES] == [24, 2, 0]
    assert [entry.end for entry in ENTRIES] == [24, 66, 128]
    manifest = Manifest(3, 1, ENTRIES)
    assert (manifest.nbytes, manifest.extent, Manifest(3, None, elsewhere(2)).extent) == (26, 128, 0)
    assert Manifest(3, None, elsewhere(None, 2, 2)).last == {None: ENTRIES[0], 2: elsewhere(None, 2, 2)[2]}
    over = (TensorEntry("d", "int8", (900,), 0, "0" * 16), *ENTRIES)  # one that others lie in
    assert Manifest(3, 1, over).last == {None: over[0]}
    assert manifest.tensors["b"] == (torch.bfloat16, torch.Size([]))


NAMES = ['"', "\\", "a\nb", "\n}", "\u2028", "é", "雪", "\x00\x7f", "", " ", "version", "}", ",", "x" * 3000]
ODD = tuple(TensorEntry(name, "uint8", (1,), 0, "0" * 16, 1 if i % 3 else None) for i, name in enumerate(NAMES))
MANY = tuple(TensorEntry(f"t{i}", "int8", (i,), i, f"{i:016x}", None if i % 5 else i % 7) for i in range(2000))


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(3, 1, ENTRIES),
        *(Manifest(3, None, elsewhere(*bases)) for bases in [(2, None, None), (None, 0, 1), (2, 2, 2), (2,)]),
        *(Manifest(0, slot, ()) for slot in (0, None)),
        Manifest(9, None, ODD),
        Manifest(9, None, MANY),
        Manifest((1 << 63) - 1, (1 << 63) - 1, ENTRIES),
    ],
    ids=lambda manifest: f"{len(manifest.entries)}",
)
def test_a_manifest_survives_its_text(manifest: Manifest) -> None:
    text = manifest.to_json()
    found = Manifest.from_json(text)
    assert found == manifest
    assert found is not manifest
    assert (found.to_json(), found.digest, found.tensors) == (text, manifest.digest, manifest.tensors)


def test_the_text_is_the_header_of_a_file_of_safetensors() -> None:
    header = json.loads(Manifest(3, None, elsewhere(None, 2, None)).to_json())
    metadata = header.pop("__metadata__")
    assert header == {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "c": {"dtype": "BOOL", "shape": [0, 4], "data_offsets": [128, 128]},
    }
    assert len(metadata.pop("xxh3")) == 32
    assert metadata == {
        "format": "pt",
        "manifest": "3",
        "version": "3",
        "digests": "0123456789abcdef" + "0" * 16,
        "b": f'[1,2,"BF16",[],64,"{"f" * 16}"]',
    }


@pytest.mark.parametrize("names", [["__metadata__"], ["a", "\ud800"]])
def test_names_that_no_file_of_safetensors_can_have_are_refused(names: list[str]) -> None:
    with pytest.raises(ManifestMismatch, match="no tensor may be named"):
        Manifest(1, None, tuple(TensorEntry(name, "int8", (), 0, "0" * 16) for name in names)).to_json()


def test_the_digest_does_not_depend_on_where_the_bytes_lie() -> None:
    entries = tuple(msgspec.structs.replace(e, base=2, offset=640) for e in ENTRIES)
    here, there = Manifest(3, 1, ENTRIES), Manifest(4, None, entries)
    assert here.digest == there.digest
    assert here.digest != Manifest(3, 1, ENTRIES[:2]).digest


def test_a_text_is_parsed_once_in_a_process_for_all_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Manifest(version, 0, ENTRIES).to_json() for version in range(100, 103)]
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


BASE = Manifest(3, None, elsewhere(None, 2, None)).to_json()


def test_a_text_that_was_damaged_anywhere_is_refused() -> None:
    rng, text = random.Random(7), Manifest(3, None, MANY[:40]).to_json()
    assert sealed(text) == text
    for _ in range(800):
        at, kind = rng.randrange(len(text)), rng.randrange(4)
        other = rng.choice([c for c in '0123456789abcdef{}[]",: \n\\-x' if c != text[at]])
        damaged = [text[:at] + other + text[at + 1 :], text[:at], text[:at] + text[at + 1 :], text + other][kind]
        with pytest.raises(ManifestMismatch, match="the manifest is damaged"):
            Manifest.from_json(damaged)


def test_a_text_that_someone_wrote_so_is_refused_or_has_its_tensors_within_counts() -> None:
    """The checksum is right; what it covers was changed at random."""
    rng, accepted = random.Random(8), 0
    for _ in range(2000):
        at = rng.randrange(len(BASE))
        piece = rng.choice(["", "9", "-1", '"', "[", "]", "{", "}", ",", "\n", "null", "1e9", "F8_E4M3", " "])
        try:
            found = Manifest.from_json(sealed(BASE[:at] + piece + BASE[at + rng.randrange(3) :]))
        except ManifestMismatch:
            continue
        accepted += 1
        for entry in found.entries:
            assert entry.offset >= 0
            assert entry.offset % entry.torch_dtype.itemsize == 0
            assert entry.base is None or 0 <= entry.base < found.version
    assert accepted > 0


def edited(*pairs: str) -> str:
    text = BASE
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return sealed(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is damaged"),
        ('{"__metadata__":{"xxh3":"', "is damaged"),
        ("[]", "is damaged"),
        (sealed('{"__metadata__":{"xxh3":"' + "0" * 32), "not one of this format: DecodeError"),
        (sealed(BASE[:-9]), "not one of this format: DecodeError"),
        (edited('"manifest":"3"', '"manifest":"2"'), "format '2', this release reads '3'"),
        (edited('"version":"3"', '"version":"-1"'), "Expected `int` >= 0"),
        (edited('"version":"3"', '"version":"true"'), "Expected `int`, got `bool`"),
        (edited('"version":"3"', '"version":3'), "Expected `str`, got `int`"),
        (edited('"version":"3"', '"slot":"3"'), "KeyError: 'version'"),
        (edited('"version":"3"', '"version":"3","slot":"../../x"'), "JSON is malformed"),
        (edited('"version":"3"', f'"version":"{1 << 63}"'), "Expected `int` <= "),
        (edited('"version":"3"', '"version":"3","slot":"1"'), "b lies in version 2 at 64, as number 1, of 0"),
        (edited('"a":{', '"c":{'), "1 tensors, and 32 digits"),
        (edited("F32", "__class__"), "KeyError: '__class__'"),
        (edited("F32", "C64"), "KeyError: 'C64'"),
        (edited("[2,3]", "[-2,-3]"), "Expected `int` >= 0"),
        (edited("[2,3]", "4"), "Expected `array`, got `int`"),
        (edited("[2,3]", "[2,3.5]"), "Expected `int`, got `float`"),
        (edited("[2,3]", "[2,4]"), "a of 32 bytes begins at 0 and ends at 24"),
        (edited("[0,24]", "[2,26]"), "a of 24 bytes begins at 2 and ends at 26"),
        (edited("[0,24]", "[24,0]"), "a of 24 bytes begins at 24 and ends at 0"),
        (edited("[0,24]", "[-24,0]"), "Expected `int` >= 0"),
        (edited("[0,24]", '[0,24],"path":"/etc/passwd"'), "unknown field `path`"),
        (edited("0123456789abcdef", "0123456789abcde"), "2 tensors, and 31 digits of digests"),
        (edited("0123456789abcdef", "0123456789ABCDEF"), "digests have b'ABCD' in them"),
        (edited("f" * 16, "../../../../../x"), "digests have b'../.' in them"),
        (edited("f" * 16, "f" * 15), "Expected `str` of length >= 16"),
        (edited("[1,2,", "[1,3,"), "b lies in version 3 at 64, as number 1, of 3"),
        (edited("[1,2,", "[1,null,"), "Expected `int`, got `null`"),
        (edited("[1,2,", "[3,2,"), "a position is 3, of 3 tensors"),
        (edited(',"b":', ',"a":'), "a name comes twice"),
    ],
)
def test_a_text_that_is_no_manifest_is_refused(text: str, words: str) -> None:
    with pytest.raises(ManifestMismatch, match=re.escape(words)):
        Manifest.from_json(text)


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
