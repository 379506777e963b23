"""Two starts run the same code if and only if their digests are equal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kdist_trainer.agent.settings import describe_environment, identify_code
from kdist_trainer.config import TrainConfig

CONFIG = {"name": "x", "nodes": {"min": 1, "max": 1}, "train": {"workload": "own:Own", "steps": 5}}


def identify(code: Path | None, **train: object) -> str:
    document = {**CONFIG, "train": {**CONFIG["train"], **train}}  # type: ignore[dict-item]
    return identify_code(TrainConfig.model_validate(document), code)


def test_it_follows_the_code_and_the_job_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1")
    before = identify(tmp_path)
    (tmp_path / "data.csv").write_text("1")
    (tmp_path / ".kdist").mkdir()
    (tmp_path / ".kdist" / "hidden.py").write_text("1")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "own.py").write_text("1")
    os.utime(tmp_path / "own.py", (1, 1))
    assert identify(tmp_path) == before
    assert identify(tmp_path, steps=6) != before
    (tmp_path / "own.py").write_text("x = 2")
    edited = identify(tmp_path)
    assert edited != before
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "part.py").write_text("x = 2")
    assert identify(tmp_path) not in (before, edited)


def test_a_package_of_the_image_counts_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit")
    (package / "model.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    before = identify(None, workload="own_package.model:Own")
    (package / "model.py").write_text("x = 2")
    assert identify(None, workload="own_package.model:Own") != before
    assert identify(None, workload="no_such_package:Own") == identify(
        None, workload="no_such_package:Own"
    )


def test_the_environment_has_versions_and_a_digest_of_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_COMMIT", "0123abc-dirty")
    found = describe_environment()
    assert set(found) == {"python", "torch", "kdist", "packages", "commit"}
    assert found["commit"] == "0123abc-dirty"
    (tmp_path / "own-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KDIST_COMMIT", "a password")
    changed = describe_environment()
    assert changed["packages"] != found["packages"]
    assert "commit" not in changed
