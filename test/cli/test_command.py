"""What commands share: results as text or as JSON, and help with examples."""

from __future__ import annotations

import errno
import io
import json

import pytest
from rich.console import Console

from torchrl_moe.cli.command import NamedStream, Output


def test_a_result_is_text_or_json() -> None:
    text, data = io.StringIO(), io.StringIO()
    Output(text, is_json=False).show("two words", {"words": 2})
    Output(data, is_json=True).show("two words", {"words": 2, 3: [float("inf"), (1.5, float("nan"))], "none": None})
    assert text.getvalue() == "two words\n"
    assert json.loads(data.getvalue()) == {"words": 2, "3": [None, [1.5, None]], "none": None}


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_of_a_named_stream_names_it() -> None:
    named, lines = NamedStream(FullDisk(), "the result"), NamedStream(io.StringIO(), "lines")
    for write in (lambda: print("a", file=named, flush=True), lambda: Console(file=named).print("a")):
        with pytest.raises(OSError, match=r"No space left on device: 'the result'$") as caught:
            write()
        assert caught.value.errno == errno.ENOSPC
    print("a", file=lines, flush=True)
    assert lines.getvalue() == "a\n" and not lines.isatty()
