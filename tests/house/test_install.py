"""No text and no hint installs kdist by a name that anyone may register on a package index, and the
documented commands take it from the named files whatever an index has.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from kdist.job.local.launch import FOR_TRAINING
from kdist_trainer.agent.tracker_process import PACKAGES
from tests.docs.blocks import blocks
from tests.house.test_lock import LOCK, PINNED
from tests.house.test_words import TEXT
from tests.house.tree import ROOT, broken
from tests.house.wheels import build

BARE = r"[\"'`]?kdist(?:[-_.](?:trainer|controller))?(?:\[[^\]]*\])?(?:[=<>!~@ ].*)?[\"'`]?"
INSTALLS = re.compile(
    r"\b(?:pipx? (?:install|download|run)|uv tool (?:install|run)|uv add|uvx|poetry add)\b(.*)"
)
EXTRAS = re.compile(r"\bkdist(?:[-_.](?:trainer|controller))?\[[a-z]")
PAGE = ROOT / "docs" / "how-to" / "install.md"
# What the metadata of a distribution must call its sibling by, and this test's own examples.
NAMED = {ROOT / "cli" / "pyproject.toml", Path(__file__)}


def bare_names(text: str) -> Iterator[str]:
    """Lines that would install kdist from an index, or name an extra of it as an index does."""
    for number, line in enumerate(text.splitlines(), start=1):
        install = INSTALLS.search(line)
        words = install[1].partition("`")[0].split() if install else []
        if EXTRAS.search(line) or any(re.fullmatch(BARE, word.strip(".,;:()")) for word in words):
            yield f"{number}: {line.strip()}: install it by path or wheel file"


@pytest.mark.sampled
def test_no_text_installs_kdist_by_its_bare_name() -> None:
    assert broken(bare_names, [path for path in TEXT if path not in NAMED]) == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install kdist",
        "run `pip install kdist-trainer`.",
        "pip install 'kdist-trainer[hub]'",
        '_FOR_TRAINING = "kdist-trainer[torch,tensorboard]"',
        "uv tool install --find-links dist kdist",
        "uvx kdist run job.yaml",
        "pip install --upgrade kdist==0.2.0",
        "pipx install kdist[local]",
    ],
)
def test_a_bare_name_is_noticed(line: str) -> None:
    assert list(bare_names(f"fine\n{line}\n")) != []


@pytest.mark.parametrize(
    "line",
    [
        "pip install ./trainer ./cli",
        "pip install './trainer[torch]' './cli[local]'",
        "uv tool install --with dist/kdist_trainer-*.whl dist/kdist-*.whl",
        "docker build -t kdist-trainer .",
        "helm upgrade kdist charts/kdist",
    ],
)
def test_a_path_is_left_alone(line: str) -> None:
    assert list(bare_names(line)) == []


def test_hints_name_the_packages_that_the_extras_of_the_trainer_name() -> None:
    project = tomllib.loads((ROOT / "trainer" / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert list(FOR_TRAINING) == [*extras["torch"], *extras["tensorboard"]]
    (hub,), (buckets,) = extras["hub"], extras["buckets"]
    trainer = ROOT / "trainer" / "kdist_trainer"
    assert f"pip install '{hub}'" in (trainer / "fetch" / "web.py").read_text()
    assert f"pip install '{buckets}'" in (trainer / "object_store" / "store.py").read_text()
    assert {name: extras[name] for name in PACKAGES} == {
        name: [one] for name, one in PACKAGES.items()
    }
    frameworks = (ROOT / "docs" / "how-to" / "frameworks.md").read_text()
    for name in ("transformers", "lightning", "accelerate"):
        assert " ".join(f"'{each}'" for each in extras[name]) in frameworks


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel that contains nothing but its metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", wheel)
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our wheels in `dist`, and in `index` what we depend on and newer packages that
    have our names.
    """
    folder = tmp_path_factory.mktemp("hijacked")
    build(ROOT, folder / "dist")
    (folder / "index").mkdir()
    for name in ("kdist", "kdist-trainer"):
        write_wheel(folder / "index", name, "99.0")
    pinned = dict(PINNED.findall(LOCK))
    for room in ("cli", "trainer"):
        project = tomllib.loads((ROOT / room / "pyproject.toml").read_text())["project"]
        for requirement in map(Requirement, project["dependencies"]):
            if not requirement.name.startswith("kdist"):
                write_wheel(folder / "index", requirement.name, pinned[requirement.name])
    return folder


def install(command: str, home: Path, folder: Path) -> list[str]:
    """Versions of kdist and its trainer after the command, with the hijacked index alone."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    index = str(home / "index")
    variables = {
        "PATH": f"{venv / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": index,
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": index,
        "UV_PYTHON": sys.executable,
        "UV_CACHE_DIR": str(folder / "cache"),
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=home,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = folder.glob("**/site-packages/kdist*.dist-info")
    return sorted(path.name.removesuffix(".dist-info").partition("-")[2] for path in found)


def documented() -> list[str]:
    """The commands of the page that install from wheels."""
    mine = f"run by: {Path(__file__).relative_to(ROOT)}"
    return [
        line.removeprefix("$ ")
        for block in blocks(PAGE.read_text())
        if block.mark == mine
        for line in block.text.splitlines()
    ]


@pytest.mark.parametrize("command", documented())
@pytest.mark.sampled
def test_the_documented_commands_take_kdist_from_the_files(
    command: str, home: Path, tmp_path: Path
) -> None:
    version = next((home / "dist").glob("kdist-*.whl")).name.split("-")[1]
    assert install(command, home, tmp_path) == [version, version]


@pytest.mark.sampled
def test_a_command_with_the_bare_name_is_caught_by_the_same_index(
    home: Path, tmp_path: Path
) -> None:
    bare = " ".join(("pip", "install", "--find-links", "dist", "kdist"))
    assert install(bare, home, tmp_path) == ["99.0"]
