"""The tree is the one that the docstring draws; errors survive a process boundary."""

from __future__ import annotations

import pickle
import re

import pytest

from torchrl_moe import errors as _errors
from torchrl_moe.errors import GenerationTimeout, TorchRLMoEError

LINE = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+)(?: +\((?P<mixins>\w+(?:, \w+)*)\))?(?: |$)")


def drawn() -> dict[str, list[str]]:
    """Name -> parent, and builtins that it also is, read off the drawing."""
    tree: dict[str, list[str]] = {}
    above: list[tuple[int, str]] = [(-1, "Exception")]
    drawing = _errors.__doc__.split(".. code-block:: text\n\n")[1].split("\n\n")[0]
    for line in drawing.splitlines():
        found = LINE.match(line)
        assert found, line
        indent = len(found["indent"])
        while above[-1][0] >= indent:
            above.pop()
        tree[found["name"]] = [above[-1][1], *(found["mixins"].split(", ") if found["mixins"] else [])]
        above.append((indent, found["name"]))
    return tree


def test_the_classes_are_the_drawn_tree() -> None:
    built = {name: [base.__name__ for base in getattr(_errors, name).__bases__] for name in _errors.__all__}
    assert built == drawn()
    assert built["SyncTimeout"] == ["WeightSyncError", "TimeoutError"]  # the drawing was read
    assert built["MissingEntryError"] == ["TorchRLMoEError", "KeyError", "ValueError"]


@pytest.mark.parametrize("name", _errors.__all__)
def test_every_error_pickles(name: str) -> None:
    before = getattr(_errors, name)("why")
    before.add_note("where")
    error = pickle.loads(pickle.dumps(before))
    assert (type(error).__name__, str(error), error.__notes__) == (name, "why", ["where"])


def test_a_timeout_keeps_what_had_finished() -> None:
    error = GenerationTimeout("2 of 3 finished in 5 s", partial=("a", None, "c"))
    assert isinstance(error, TorchRLMoEError)
    assert error.partial == ["a", None, "c"]
    assert pickle.loads(pickle.dumps(error)).partial == ["a", None, "c"]
    assert GenerationTimeout("nothing finished").partial == []
