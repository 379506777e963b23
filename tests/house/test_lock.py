"""requirements.txt locks every dependency by hash, asks no particular index, and holds to the
floors that are promised.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from kdist_trainer.formats.requirements import OF_IMAGE, OLDEST_PYTHON
from tests.house.tree import ROOT

LOCK = (ROOT / "requirements.txt").read_text()
IMAGE_LOCKS = {
    room: (ROOT / room / "requirements.txt").read_text() for room in ("controller", "trainer")
}
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def loose_lines(text: str) -> Iterator[str]:
    """Lines of a lock that are neither a comment, an exact version with at least one hash, nor a
    hash.
    """
    for line in text.replace("\\\n", " ").splitlines():
        is_comment = not line.strip() or line.lstrip().startswith("#")
        if not is_comment and not (PINNED.match(line) and "--hash=sha256:" in line):
            yield line.split("--hash")[0].strip()
        if "://" in line:
            yield line.strip()


def declared() -> list[Requirement]:
    """Every direct dependency of the distributions and of the development tools."""
    found = []
    for name in ("cli", "controller", "trainer"):
        project = tomllib.loads((ROOT / name / "pyproject.toml").read_text())
        found += project["project"]["dependencies"] + project["build-system"]["requires"]
        found += [
            line
            for extra in project["project"].get("optional-dependencies", {}).values()
            for line in extra
        ]
    for group in tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"].values():
        found += group
    return [
        requirement
        for requirement in map(Requirement, found)
        if not requirement.name.startswith("kdist")
    ]


def test_every_line_of_the_lock_is_one_version_with_its_hashes() -> None:
    assert list(loose_lines(LOCK)) == []
    assert [line for lock in IMAGE_LOCKS.values() for line in loose_lines(lock)] == []


@pytest.mark.parametrize(("room", "holds"), [("trainer", "torch"), ("controller", "kubernetes")])
def test_an_image_holds_the_versions_that_were_tested_here(room: str, holds: str) -> None:
    pinned = PINNED.findall(IMAGE_LOCKS[room])
    assert holds in dict(pinned)
    assert set(pinned) <= set(PINNED.findall(LOCK))


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://index.example/simple",
        "torch>=2.13 --hash=sha256:00",
        "torch==2.13.0",
        "torch @ https://host.example/torch.whl",
        "-e ./cli",
    ],
)
def test_a_loose_line_of_a_lock_is_noticed(line: str) -> None:
    assert (
        list(loose_lines(f"click==8.1 \\\n    --hash=sha256:00\n    # via kdist\n{line}\n")) != []
    )


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_the_lock_holds_what_is_declared(requirement: Requirement) -> None:
    versions = {name.lower().replace("_", "-"): version for name, version in PINNED.findall(LOCK)}
    version = versions[requirement.name.lower().replace("_", "-")]
    assert requirement.specifier.contains(Version(version), prereleases=True)


def test_the_floors_shut_out_versions_with_known_holes() -> None:
    floors = {
        requirement.name: requirement.specifier
        for requirement in declared()
        if requirement.name in {"jinja2", "hatchling"}
    }
    assert not floors["jinja2"].contains("3.1.5")
    assert not any(
        requirement.specifier.contains("2.9.1")
        for requirement in declared()
        if requirement.name == "torch"
    )


@pytest.mark.parametrize("name", OF_IMAGE)
def test_the_oldest_torch_and_numpy_are_the_ones_that_images_are_asked_for(name: str) -> None:
    floors = [str(one) for one in declared() if one.name == name and ">=" in str(one)]
    assert floors == [OF_IMAGE[name]]


def test_all_distributions_have_one_version() -> None:
    versions = {
        re.search(r'^__version__ = "(.+)"$', (ROOT / path).read_text(), re.MULTILINE)[1]  # type: ignore[index]
        for path in (
            "cli/kdist/__init__.py",
            "controller/kdist_controller/__init__.py",
            "trainer/kdist_trainer/__init__.py",
        )
    }
    assert len(versions) == 1


def test_the_oldest_python_is_one_wherever_it_is_written() -> None:
    oldest = "{}.{}".format(*OLDEST_PYTHON)
    for room in ("cli", "controller", "trainer"):
        project = tomllib.loads((ROOT / room / "pyproject.toml").read_text())["project"]
        assert project["requires-python"] == f">={oldest}", room
        named = [re.fullmatch(r".* :: (3\.\d+)", each) for each in project["classifiers"]]
        assert min(Version(each[1]) for each in named if each) == Version(oldest), room
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["ruff"]["target-version"] == "py{}{}".format(*OLDEST_PYTHON)
    assert tools["mypy"]["python_version"] == oldest
    makefile = (ROOT / "Makefile").read_text()
    written = (
        r"(?:--python-version|Python from|needs Python) (3\.\d+)|sys\.version_info < (\(.*?\))"
    )
    found = [first or second for first, second in re.findall(written, makefile)]
    assert len(found) == 6
    assert set(found) == {oldest, str(OLDEST_PYTHON)}
    first = (ROOT / "trainer/kdist_trainer/install/__init__.py").read_text()  # imports nothing
    assert re.findall(r"^if FOUND < (\(.*?\)):", first, re.MULTILINE) == [str(OLDEST_PYTHON)]
    assert re.findall(r"and (\S+) is needed", first) == [oldest]
    probe = (ROOT / "trainer/kdist_trainer/formats/requirements.py").read_text()
    assert re.findall(r"sys\.version_info >= (\(.*?\))", probe) == [str(OLDEST_PYTHON)]
