"""A code folder that no ConfigMap holds goes to the bucket with the job's checkpoints, once for
each content, and the pods fetch exactly what was sent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from kdist.render import find_pods
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES
from tests.trainer.fetch.program import read_files
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server

BLOB = bytes(range(256)) * 12_288  # 3 MiB


@pytest.fixture(name="s3")
def serve_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with S3Server() as server:
        yield server


@pytest.fixture(name="bucket")
def describe_bucket(s3: S3Server, file: Path) -> tuple[str, str]:
    """The option that has checkpoints there; the code folder is too large for a ConfigMap."""
    src = file.parent / "src"
    (src / "data").mkdir()
    (src / "data" / "table ü.bin").write_bytes(BLOB)
    (src / "empty.py").write_bytes(b"")
    (src / ".gitignore").write_text("ignored\n")
    (src / "ignored").write_bytes(b"x")
    url = f"s3://{BUCKET}/team/"
    place = {"url": url, "endpoint": s3.endpoint, "region": "us-east-1", "secret": "store"}
    return "--set", f"spec.checkpoints={json.dumps(place)}"


def pod_of(store: Store) -> dict[str, Any]:
    (pod,) = find_pods(store.objects[PLACES["job"]])
    spec: dict[str, Any] = pod["spec"]
    return spec


@pytest.mark.sampled
def test_the_pods_fetch_what_was_sent_and_the_same_content_is_sent_once(
    api: Api, store: Store, file: Path, kdist: Kdist, s3: S3Server, bucket: tuple[str, str]
) -> None:
    sent = kdist("apply", str(file), *bucket)
    assert sent.exit_code == Code.OK, sent.stderr
    assert f"of ./src to s3://{BUCKET}/team/_code/" in sent.stderr
    assert not [path for path in store.objects if "/configmaps/digits-code-" in path]
    pod = pod_of(store)
    (container,) = pod["initContainers"]
    assert container["name"] == "fetch-code"
    mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
    assert mounts["/code"] == {
        "name": "code",
        "mountPath": "/code",
        "subPath": "files",
        "readOnly": True,
    }
    assert "--code=/code" in pod["containers"][0]["args"]
    own = ("--folder", "--termination-message")
    arguments = [each for each in container["args"] if not each.startswith(own)]
    program = [sys.executable, "-m", "kdist_trainer.fetch", *arguments]
    subprocess.run([*program, "--folder", str(file.parent / "fetched")], check=True)
    fetched = read_files(file.parent / "fetched")
    assert set(fetched) == {"SHA256SUMS", "data/table ü.bin", "empty.py", "mine.py"}
    assert fetched["data/table ü.bin"] == BLOB
    assert fetched["mine.py"] == b"answer = 41\n"

    puts = s3.count("PUT")
    assert kdist("apply", str(file), *bucket, "--error-unchanged").exit_code == Code.UNCHANGED
    assert s3.count("PUT") == puts
    assert kdist("restart", "digits", "--no-wait").exit_code == Code.OK
    (file.parent / "src" / "mine.py").write_text("answer = 42\n")
    shown = kdist("diff", str(file), *bucket)
    assert shown.exit_code == 1
    assert "_code/" in shown.stdout
    assert s3.count("PUT") == puts, "what is only shown is not sent"
    assert kdist("apply", str(file), *bucket).exit_code == Code.OK
    assert len({name.split("/")[2] for name in s3.objects if "/_code/" in name}) == 2


def test_without_a_claim_or_bucket_it_is_refused_with_the_ways_there_are(
    api: Api, store: Store, file: Path, kdist: Kdist, bucket: tuple[str, str]
) -> None:
    refused = kdist("apply", str(file), "--set", "spec.checkpoints=null")
    assert refused.exit_code == Code.ERROR
    assert "table ü.bin (3072 KiB)" in refused.stderr
    assert "on a claim or in a bucket (spec.checkpoints)" in refused.stderr


def test_what_cannot_be_sent_leaves_the_cluster_as_it_was(
    api: Api,
    store: Store,
    file: Path,
    kdist: Kdist,
    bucket: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(store.objects)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    refused = kdist("apply", str(file), *bucket)
    assert refused.exit_code == Code.ERROR
    assert f"spec.code cannot be sent to s3://{BUCKET}/team/_code/" in refused.stderr
    assert "credential" in refused.stderr
    assert set(store.objects) == before
    (file.parent / "src" / "SHA256SUMS").write_text("")
    refused = kdist("apply", str(file), *bucket)
    assert "has the name of kdist's own list of digests" in refused.stderr


def test_a_manifest_that_others_apply_says_that_the_code_is_not_sent(
    file: Path, kdist: Kdist, s3: S3Server, bucket: tuple[str, str]
) -> None:
    shown = kdist("render", str(file), *bucket)
    assert shown.exit_code == Code.OK, shown.stderr
    assert "only `kdist apply` sends the files of spec.code to s3://" in shown.stderr
    assert "name: fetch-code" in shown.stdout
    assert s3.count("PUT") == 0


def test_a_job_names_code_by_url_itself_also_for_a_run_on_this_machine(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    named = ("--set", "spec.code={url: 'hf://team/code@v1', secret: hub}")
    assert kdist("apply", str(file), *named).exit_code == Code.OK
    assert "--url=hf://team/code@v1" in pod_of(store)["initContainers"][0]["args"]
    data = store.objects[f"{CORE}/configmaps/digits"]["data"]
    assert json.loads(data["job.json"])["spec"]["code"]["url"] == "hf://team/code@v1"
    both = kdist("apply", str(file), "--set", "spec.code={url: 'hf://team/code', path: src}")
    assert both.exit_code == Code.USAGE
    assert "needs exactly one of path, configMap, claim and url" in both.stderr
