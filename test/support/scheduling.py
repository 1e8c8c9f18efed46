"""Which tests a worker of pytest-xdist gets together."""

from __future__ import annotations

import functools

from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):
    """Hands out whole files, and those that ask for the Ray cluster together: one worker starts it, and its engines."""

    @functools.cache  # noqa: B019  there is one scheduler, for as long as the run
    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "ray" if "pytest.mark.ray" in (self.config.rootpath / file).read_text() else file
