"""Files that ask for the Ray cluster go to one worker, and each other file as it is free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from support.scheduling import FileScheduling


def test_files_with_ray_are_handed_out_together_and_others_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("@pytest.mark.ray\ndef test_a(): ...")
    (tmp_path / "test_b.py").write_text("pytestmark = pytest.mark.ray")
    (tmp_path / "test_c.py").write_text("@pytest.mark.engine\ndef test_c(): ...")
    (tmp_path / "d.py").write_text("")
    scheduling = FileScheduling(SimpleNamespace(getvalue=lambda name: ["popen"], rootpath=tmp_path))
    names = ("test_a.py::test_a", "test_b.py::test_b[x]", "test_c.py::test_c[a::b]", "d.py::package.d.name")
    assert [scheduling._split_scope(name) for name in names] == ["ray", "ray", "test_c.py", "d.py"]
