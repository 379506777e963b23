"""The wheels hold everything that the packages need at run time, and nothing else."""

from __future__ import annotations

from zipfile import ZipFile

import pytest

from tests.house.tree import ROOT, files
from tests.house.wheels import ROOMS, build


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all files in the wheels."""
    return {
        name
        for wheel in build(ROOT, tmp_path_factory.mktemp("dist"))
        for name in ZipFile(wheel).namelist()
    }


def test_the_wheels_hold_every_source_and_template_and_nothing_else(contents: set[str]) -> None:
    inside = [path.relative_to(ROOT).parts for path in files()]
    expected = {"/".join(parts[1:]) for parts in inside if parts[0] in ROOMS and len(parts) > 2}
    linked = {
        f"{link}/{path.relative_to(ROOT / folder)}"
        for link, folder in (
            ("kdist/manifests", "manifests"),
            ("kdist/scaffolds", "examples/init"),
            ("kdist/dashboards/json", "charts/kdist/dashboards"),
        )
        for path in files()
        if path.is_relative_to(ROOT / folder)
    }
    assert len(linked) > 2
    assert {name for name in contents if ".dist-info/" not in name} == expected | linked


def test_the_wheels_contain_no_developer_tools(contents: set[str]) -> None:
    assert (ROOT / "tools").is_dir()
    assert [name for name in contents if "tools" in name.split("/")] == []


def test_the_wheels_carry_their_licence(contents: set[str]) -> None:
    assert sum(name.endswith(".dist-info/licenses/LICENSE") for name in contents) == len(ROOMS)
