"""The folder of `spec.code` travels as it is, but for what has no business in a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist import deploy, load
from kdist.deploy import plan
from kdist.errors import KdistError, UsageError
from kdist.spec import TrainingJob


@pytest.fixture
def with_code(job: str) -> TrainingJob:
    """A job whose code is in the folder `src` next to it."""
    return load.load_text(job, source="job.yaml", overrides=["spec.code=./src"])


def test_files_are_named_by_their_path_and_hidden_ones_stay(
    with_code: TrainingJob, tmp_path: Path
) -> None:
    for name in (
        "src/train.py",
        "src/model/net.py",
        "src/.git/config",
        "src/__pycache__/train.pyc",
        "src/.env",
        "secret",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "src" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "src" / "in.py").symlink_to("train.py")
    assert deploy.read_code(with_code, tmp_path) == {
        "train.py": b"src/train.py",
        "in.py": b"src/train.py",
        "model/net.py": b"src/model/net.py",
    }


def test_a_job_without_a_code_folder_has_none(job: str, tmp_path: Path) -> None:
    assert deploy.read_code(load.load_text(job, source="job.yaml"), tmp_path) is None


def test_a_folder_that_is_missing_or_far_too_big_is_said(
    with_code: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        deploy.read_code(with_code, tmp_path)
    monkeypatch.setattr(plan, "MAX_BYTES", 10)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "weights.bin").write_bytes(b"x" * 11)
    with pytest.raises(KdistError, match="has more than") as raised:
        deploy.read_code(with_code, tmp_path)
    assert "claim" in raised.value.hint
