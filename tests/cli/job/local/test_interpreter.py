"""The ranks run in the project's own environment: what is in use is said, and what it lacks is said
with the command that adds it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kdist.errors import KdistError, UsageError
from kdist.job.local import launch
from kdist.job.local.interpreter import NEEDED, OWN, choose_interpreter
from tests.cli.running import Start
from tests.house.tree import ROOT


def make_environment(folder: Path, *, has_packages: bool) -> Path:
    """An environment, with all packages of ours but the trainer or with none; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    if has_packages:
        (site,) = folder.glob("lib/python*/site-packages")
        ours = next(each for each in sys.path if each.endswith("site-packages"))
        (site / "ours.pth").write_text(f"{ours}\n")
    return folder / "bin" / "python"


def test_the_environment_in_use_runs_the_ranks_if_it_has_all_they_need(tmp_path: Path) -> None:
    path = make_environment(tmp_path / "project", has_packages=True)
    for named in (str(path), str(tmp_path / "project")):
        found, sentence = choose_interpreter(named, {})
        assert found.path == str(path)
        assert sentence == f"the ranks run in {path} (--python)"
    found, sentence = choose_interpreter(None, {"VIRTUAL_ENV": str(tmp_path / "project")})
    assert (found.path, found.origin) == (str(path), "VIRTUAL_ENV")
    assert choose_interpreter(None, {"VIRTUAL_ENV": sys.prefix}) == (OWN, "")
    assert choose_interpreter(None, {"VIRTUAL_ENV": str(tmp_path / "gone")}) == (OWN, "")


def test_what_an_environment_lacks_is_said_and_one_that_is_only_active_is_left_alone(
    tmp_path: Path,
) -> None:
    path = make_environment(tmp_path / "bare", has_packages=False)
    with pytest.raises(KdistError, match=r"lacks msgspec, .*torch, numpy") as raised:
        choose_interpreter(str(path), {})
    assert str(raised.value.next_command).startswith(f"uv pip install --python {path} ")
    found, sentence = choose_interpreter(None, {"VIRTUAL_ENV": str(tmp_path / "bare")})
    assert found == OWN
    assert re.search(rf"kdist's own environment, {sys.prefix}: {path} .*lacks msgspec", sentence)


def test_a_version_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_environment(tmp_path / "old", has_packages=True)
    (site,) = (tmp_path / "old").glob("lib/python*/site-packages")
    for name in ("torch", "torch-2.1.2.dist-info"):
        (site / name).mkdir()
    (site / "torch" / "__init__.py").touch()
    (site / "torch-2.1.2.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.1.2\n")
    with pytest.raises(KdistError, match=r"has torch 2\.1\.2, where torch>=2\.13 is needed"):
        choose_interpreter(str(path), {})
    monkeypatch.setattr(launch, "version", {"torch": "2.1.2"}.get)
    with pytest.raises(KdistError, match=rf"needs torch>=2\.13 .*{sys.prefix} has torch 2\.1\.2"):
        choose_interpreter(None, {})


@pytest.mark.parametrize("named", ["no-such-folder", "job.yaml"])
def test_what_is_no_python_is_refused(tmp_path: Path, named: str) -> None:
    (tmp_path / "job.yaml").touch()
    with pytest.raises(UsageError, match="is no Python that can be run"):
        choose_interpreter(str(tmp_path / named), {})


def test_what_is_asked_for_is_what_the_trainer_is_declared_to_need() -> None:
    declared = tomllib.loads((ROOT / "trainer" / "pyproject.toml").read_text())["project"]
    extra = [
        each for each in declared["optional-dependencies"]["torch"] if "safetensors" not in each
    ]
    assert sorted(NEEDED.values()) == sorted([*declared["dependencies"], *extra])


@pytest.mark.processes
@pytest.mark.sampled
def test_a_run_trains_in_another_environment_that_has_no_trainer(
    start: Start, tmp_path: Path
) -> None:
    path = make_environment(tmp_path / "project", has_packages=True)
    (tmp_path / "train.py").write_text(
        "import sys, kdist_trainer, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('prefix', sys.prefix, dist.get_world_size(), flush=True)\n"
    )
    run = start("--python", "project", "--procs-per-node", "2", "train.py")
    run.wait(0)
    assert f"the ranks run in {path} (--python)" in run.errors()
    assert run.errors().count(f"prefix {tmp_path / 'project'} 2") == 2
