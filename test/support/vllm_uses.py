"""Whether a release of vLLM, which is read and not run, has what our source uses of it.

mypy reads our files over the release and over the installed one: what it says of names, members, parameters and
replaced methods of the former alone is missing there. What stands in texts (kernels, environment variables, fields) is
looked up here. Neither says that all does what it did: `make install-check` runs each release.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from support.sources import ROOT, package_sources
from torchrl_moe.modules.backends.replica import KEEPS_ALL
from torchrl_moe.modules.backends.vllm.continuation import STATEFUL
from torchrl_moe.modules.backends.vllm.cpu_kernels import KERNELS
from torchrl_moe.modules.backends.vllm.engine_args import DEFAULTS

INDEX = "https://pypi.org/simple/vllm/"
KINDS = re.compile(r"\[(attr-defined|call-arg|import-not-found|misc|name-defined|override|union-attr)\]$")
FIELDS = {"vllm/engine/arg_utils.py": [*DEFAULTS], "vllm/sampling_params.py": [*STATEFUL, *KEEPS_ALL]}
SETTINGS = """
[mypy]
strict = True
ignore_missing_imports = True
follow_imports = skip
[mypy-vllm,vllm.*,torchrl_moe.*]
ignore_missing_imports = False
follow_imports = silent
"""


def complaints(ours: Path, release: Path) -> Counter[str]:
    """What mypy says of the files in a folder that import vLLM, over a release, without line numbers."""
    files = [
        str(file)
        for file in sorted(ours.rglob("*.py"))
        if re.search(r"^\s*(from|import) vllm\b", file.read_text(), re.M)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "mypy.ini")
        settings.write_text(SETTINGS, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--no-site-packages",
            "--config-file",
            settings,
            "--cache-dir",
            f"{folder}/cache",
            *files,
        ]
        environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(ours.parent), str(release)])}
        ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert re.search("^(Found|Success)", ended.stdout, re.MULTILINE), ended.stdout[-2000:] + ended.stderr
    found = [re.sub(r"^\S*?([^/\s]+\.py):\d+: error", r"\1", line) for line in ended.stdout.splitlines()]
    return Counter(line for line in found if KINDS.search(line))


def not_in(release: Path) -> Iterator[str]:
    """Yield what our texts name and a release has not: modules and their names, parameters, variables, fields."""
    constants = {
        node.value
        for source in package_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for path in sorted({*KERNELS, *(text for text in constants if re.fullmatch(r"vllm(\.\w+)+", text))}):
        home, name = path.rsplit(".", 1)
        if not (_has(release, home.replace(".", "/"), name) or _text(release, path.replace(".", "/")) is not None):
            yield path
    for path, own in KERNELS.items():
        home, name = path.rsplit(".", 1)
        nodes = ast.walk(ast.parse(_text(release, home.replace(".", "/")) or ""))
        for theirs in [node.args.args for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]:
            needed = {one.name for one in inspect.signature(own).parameters.values() if one.default is one.empty}
            yield from (f"{path}({one})" for one in needed - {arg.arg.removesuffix("_ptr") for arg in theirs})
    yield from (
        text for text in constants if re.fullmatch(r"VLLM_[A-Z0-9_]+", text) and not _has(release, "vllm/envs", text)
    )
    yield from (f"{file}: {name}" for file, names in FIELDS.items() for name in names if not _has(release, file, name))


def _text(release: Path, path: str) -> str | None:
    files = [release / path, release / f"{path}.py", release / path / "__init__.py"]
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), None)


def _has(release: Path, path: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", _text(release, path) or "") is not None


def installed() -> Path:
    """The folder that holds the installed vLLM."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def download(version: str, cache: Path) -> Path:
    """The folder that holds a release, from ``cache`` or from PyPI, whose digest it is checked against."""
    folder = cache / f"vllm-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        page = urllib.request.urlopen(INDEX, timeout=60).read().decode()
        pattern = rf'href="([^"#]*/vllm-{re.escape(version)}\.tar\.gz)#sha256=([0-9a-f]{{64}})'
        link = re.search(pattern, page)
        assert link is not None, f"{INDEX} has no source of vLLM {version}"
        archive = urllib.request.urlopen(urllib.parse.urljoin(INDEX, link[1]), timeout=600).read()
        assert hashlib.sha256(archive).hexdigest() == link[2], f"what came for vLLM {version} is not what PyPI lists"
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            packed = Path(scratch, "source.tar.gz")
            packed.write_bytes(archive)
            with tarfile.open(packed) as tar:
                wanted = [item for item in tar if re.fullmatch(r"[^/]+/vllm/(.*\.py|py\.typed)", item.name)]
                tar.extractall(scratch, wanted, filter="data")
            os.rename(Path(scratch, folder.name), folder)
    return folder


def releases() -> tuple[str, ...]:
    """Return those that ``pyproject.toml`` allows, the oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["vllm"]
    limits = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", wanted)
    assert limits is not None, f"{wanted!r} names no range of minor versions"
    return tuple(f"0.{minor}.0" for minor in range(int(limits[1]), int(limits[2])))
