"""Files that ask for the Ray cluster go to one worker; two workers take those with engines, the third takes others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.scheduling import FileScheduling


class Node:
    """A worker that notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="worker")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_two_workers_start_engines_and_the_third_takes_other_files_first(tmp_path: Path) -> None:
    texts = ["pytest.mark.ray", "pytest.mark.engine", "def test(no_engine): ...", "", "", ""]
    names = [f"test_{index}.py::test[{count}]" for index in range(len(texts)) for count in range(3)]
    for index, text in enumerate(texts):
        (tmp_path / f"test_{index}.py").write_text(text)
    nodes: Any = [Node(), Node(), Node()]
    config = SimpleNamespace(
        getvalue=lambda name: ["3*popen"], rootpath=tmp_path, option=SimpleNamespace(loadscopereorder=False)
    )
    scheduling = FileScheduling(config)
    scopes = ["ray", "test_1.py", "test_3.py"]
    assert [scheduling._split_scope(f"test_{index}.py::test[a::b]") for index in (0, 1, 3)] == scopes
    for node in nodes:
        scheduling.add_node(node)
    for node in nodes:
        scheduling.add_node_collection(node, names)
    scheduling.schedule()
    assert [node.sent for node in nodes] == [[0, 1, 2], [3, 4, 5], [9, 10, 11]]
    for done in (9, 10, 11):
        scheduling.mark_test_complete(nodes[2], done)
    assert nodes[2].sent[3:] == [12, 13, 14]
    for done in (12, 13, 14, 15, 16, 17):
        scheduling.mark_test_complete(nodes[2], done)
    assert nodes[2].sent[6:] == [15, 16, 17, 6, 7, 8]  # nothing light is left
