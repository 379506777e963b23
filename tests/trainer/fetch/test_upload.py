"""What is sent to a bucket is what its SHA256SUMS says, or the upload fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from kdist_trainer.fetch.fetcher import SUMS
from tests.trainer.fetch.conftest import Bucket
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, in_turn

pytestmark = pytest.mark.processes


def send(bucket: Bucket, path: Path, digest: str) -> subprocess.CompletedProcess[str]:
    request = {"files": {"a b.py": str(path)}, "sums": f"{digest}  a b.py\n"}
    return subprocess.run(
        [
            *(sys.executable, "-m", "kdist_trainer.fetch.upload"),
            *("--url", f"s3://{BUCKET}/team/_code/c0ffee", "--endpoint", bucket.endpoint),
            *("--region", "us-east-1"),
        ],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET},
    )


@pytest.mark.sampled
def test_an_upload_is_fetched_as_it_was_sent_through_faults(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x = 1")
    assert bucket.server is not None
    bucket.server.faults = in_turn("503", "close", method="PUT")
    for sent in (1, 0):
        done = send(bucket, tmp_path / "a", sha256(b"x = 1").hexdigest())
        assert json.loads(done.stdout) == {"sent": sent}, done.stderr
    ended = bucket.fetch("team/_code/c0ffee", tmp_path / "to")
    assert ended.files["a b.py"] == b"x = 1"


def test_a_file_that_changes_meanwhile_is_no_upload(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x = 2")
    done = send(bucket, tmp_path / "a", sha256(b"x = 1").hexdigest())
    assert done.returncode == 1
    assert "has changed while it was sent" in done.stderr
    assert bucket.server is not None
    assert not any(SUMS in name for name in bucket.server.objects)
