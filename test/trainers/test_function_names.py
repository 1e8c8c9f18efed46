"""Functions by name: those that are found, and one clear line for those that are not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from torchrl_moe.trainers.function_names import import_function, is_function_name


@pytest.mark.parametrize("name", ["math:sqrt", "os.path:join", "my_task.rewards:Exact.judge", "_a:_b"])
def test_names(name: str) -> None:
    assert is_function_name(name)


@pytest.mark.parametrize(
    "name",
    ["openai/gsm8k", "math", "math:", ":sqrt", "math:sqrt:", "a b:c", "./a.py:f", "1a:f", "a..b:c", "C:\\data", ""],
)
def test_what_is_none(name: str) -> None:
    assert not is_function_name(name)
    with pytest.raises(ValueError, match=r"is not the name of a function: write it as 'package\.module:function'"):
        import_function(name)


def test_a_function_is_imported_by_its_name() -> None:
    assert import_function("math:sqrt") is math.sqrt
    assert import_function("pathlib:Path.exists") is Path.exists


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package:f", "cannot import 'no_such_package' of 'no_such_package:f': No module named"),
        ("math:root", "there is no 'math:root': module 'math' has no attribute 'root'"),
        ("pathlib:Path.nothing", "there is no 'pathlib:Path.nothing': type object 'Path' has no attribute"),
        ("math:pi", "'math:pi' is not a function but a float"),
    ],
)
def test_what_is_not_there_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        import_function(name)
    assert "\n" not in str(error.value)


def test_a_module_that_fails_to_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_of_a_module.py").write_text("from math import nothing_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot import 'half_of_a_module' of .* cannot import name 'nothing_there'"):
        import_function("half_of_a_module:f")
