"""Functions by name: those that are found, and one clear line for those that are not."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from torchrl_moe.trainers.function_names import import_function, is_function_name


def test_a_function_is_imported_by_its_name() -> None:
    assert all(map(is_function_name, ["math:sqrt", "os.path:join", "my_task.rewards:Exact.judge", "_a:_b"]))
    assert import_function("math:sqrt") is math.sqrt and import_function("pathlib:Path.exists") is Path.exists
    no_names = ["a/b", "math", "math:", ":f", "math:f:", "a b:c", "./a.py:f", "1a:f", "a..b:c", "C:\\data", ""]
    for name in no_names:
        assert not is_function_name(name)
        with pytest.raises(ValueError, match=r"is not the name of a function: write it as 'package\.module:function'"):
            import_function(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package:f", "cannot import 'no_such_package': there is no no_such_package.py, and no package "),
        ("math.no_such_part:f", "cannot import 'math.no_such_part': No module named 'math.no_such_part'"),
        ("math:root", "there is no 'math:root': module 'math' has no attribute 'root'"),
        ("pathlib:Path.nothing", "there is no 'pathlib:Path.nothing': type object 'Path' has no attribute"),
        ("math:pi", "'math:pi' is not a function, but of type float"),
    ],
)
def test_what_is_not_there_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        import_function(name)
    assert "\n" not in str(error.value)


def test_a_module_that_fails_to_import_says_why(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, line, said in (
        ("half_of_a_module", "from math import nothing_there", "ImportError: cannot import name 'nothing_there'"),
        ("lacks_a_module", "import no_such_package", "No module named 'no_such_package'"),
        ("not_a_module", "def", "SyntaxError: "),
        ("ends_it_all", "raise SystemExit(3)", "SystemExit: 3"),
        ("fails_midway", "1 / 0", "ZeroDivisionError: division by zero"),
    ):
        (tmp_path / f"{name}.py").write_text(line)
        with pytest.raises(ValueError, match=f"^cannot import '{name}': {said}"):
            import_function(f"{name}:f")


def test_the_current_folder_comes_before_what_is_installed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yaml_of_mine.py").write_text("def f(): return 'mine'")
    assert import_function("yaml_of_mine:f")() == "mine" and sys.path[0] == str(tmp_path)
    before = list(sys.path)
    import_function("math:sqrt")
    assert sys.path == before
