"""Which tests a worker of pytest-xdist gets together, and which workers start engines."""

from __future__ import annotations

import functools
from typing import Any

from xdist.scheduler import LoadFileScheduling

ENGINE_WORKERS = 2
RAY = "ray"
HEAVY = ("pytest.mark.engine", "pytest.mark.ray", "no_engine")


class FileScheduling(LoadFileScheduling):
    """Hands out whole files, and those that ask for the Ray cluster together: one worker starts it, and its engines.

    Engines keep cores busy, and many other tests wait for processes. So at most two workers take files with engines,
    and further ones the other files, as long as there are any.
    """

    @functools.cache  # noqa: B019  there is one scheduler, for as long as the run
    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return RAY if "pytest.mark.ray" in self._text(file) else file

    @functools.cache  # noqa: B019
    def _is_light(self, scope: str) -> bool:
        return scope != RAY and not any(word in self._text(scope) for word in HEAVY)

    def _text(self, file: str) -> str:
        return (self.config.rootpath / file).read_text(encoding="utf-8")

    def _assign_work_unit(self, node: Any) -> None:
        if self.nodes.index(node) >= ENGINE_WORKERS:
            light = next((scope for scope in self.workqueue if self._is_light(scope)), None)
            if light is not None:
                self.workqueue.move_to_end(light, last=False)
        super()._assign_work_unit(node)
