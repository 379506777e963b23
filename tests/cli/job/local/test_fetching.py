"""Where `kdist run` keeps what it has fetched, and how the program that fetches is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdist.job.local.fetching import find_cache, folder_of, list_fetches, plan_fetches, read_fetch
from kdist.job.local.run_dir import RunFolder
from kdist.spec import FetchSource, list_sources
from kdist.status import FetchProgress
from tests.manifests.jobs import make

URL = "s3://team-data/speech"


def source(**data: Any) -> FetchSource:
    job = make(data=[{"url": URL, "mountPath": "/data", **data}])
    (found,) = list_sources(job.spec)
    return found


def test_the_cache_is_the_users_or_the_one_that_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KDIST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache() == tmp_path / ".cache/kdist"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert find_cache() == tmp_path / ".cache/kdist", "which the standard says to ignore"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert find_cache() == tmp_path / "caches/kdist"
    monkeypatch.setenv("KDIST_CACHE", str(tmp_path / "own"))
    assert folder_of(source()).parent == tmp_path / "own/data"


def test_what_is_at_the_same_place_has_one_folder_whatever_the_job_does_with_it() -> None:
    first = folder_of(source())
    assert folder_of(source(mountPath="/other", size="1Gi", sha256="0" * 64)) == first
    assert folder_of(source(region="eu-1")) != first
    assert folder_of(source(endpoint="http://minio:9000")) != first
    hub = {"url": "hf://owner/model@v1"}
    train = {"workload": "digits", "epochs": 1, "init": hub}
    data, weights = list_sources(make(data=[{**hub, "mountPath": "/m"}], train=train).spec)
    assert folder_of(data) != folder_of(weights), "of a repository only weights are fetched"


def test_the_program_is_told_what_to_fetch_and_the_environment_has_the_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_HOME", str(tmp_path))
    job = make(
        data=[
            {"url": URL, "mountPath": "/a", "secret": "store", "region": "eu-1", "size": "1Mi"},
            {"url": URL, "mountPath": "/b", "path": "here"},
            {"claim": "images", "path": "here", "mountPath": "/c"},
        ]
    )
    assert [each.name for each in list_fetches(job)] == ["data-0"]
    folder = RunFolder.open("digits")
    try:
        (command,) = plan_fetches(job, folder)
    finally:
        folder.close()
    line = " ".join(command.argv)
    assert f"-m kdist_trainer.fetch --url={URL} --field=spec.data[0] --region=eu-1" in line
    assert f"--max-bytes=1048576 --folder {folder_of(source(region='eu-1'))}" in line
    assert "store" not in line
    assert command.log == tmp_path / "digits/fetch-data-0/log"


def test_an_event_of_an_earlier_invocation_is_no_fetch_in_progress(tmp_path: Path) -> None:
    log = tmp_path / "fetch-data-0" / "log"
    log.parent.mkdir()
    log.write_text('{"time":"2026-01-31T12:00:00Z","event":"data-fetch","url":"s3://a"}\n')
    written = log.stat().st_mtime
    assert read_fetch(tmp_path, since=written - 1) == ("s3://a", FetchProgress(0))
    assert read_fetch(tmp_path, since=written + 1) is None
    with log.open("a") as lines:
        lines.write('{"time":"2026-01-31T12:00:01Z","event":"data-ready","url":"s3://a"}\n')
    assert read_fetch(tmp_path, since=written - 1) is None
