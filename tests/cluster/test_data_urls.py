"""A job whose data is in a bucket and whose weights are at a URL: its pods fetch both before they
train, no object of it tells a credential, and a file that is not what it should be ends it at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.cli.weights import make_weights
from tests.cluster.kinds import each_kind, every_kind
from tests.cluster.namespace import Namespace
from tests.cluster.test_bucket import check_nothing_tells_the_secret, serve
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET

__all__ = ["serve"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.needs("whole-cluster")]

CORPUS = {"speech/a.bin": b"a" * 300_000, "speech/more/b.bin": b"b" * 500_000}


@pytest.fixture(name="source")
def fill_bucket(namespace: Namespace, endpoint: str, tmp_path: Path) -> dict[str, str]:
    """How a job names the bucket, which has a data set and weights, and whose credentials are in a
    Secret of the namespace.
    """
    literals = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    arguments = [f"--from-literal={name}={value}" for name, value in literals.items()]
    namespace.kubectl("create", "secret", "generic", "store", *arguments)
    for name, content in {**CORPUS, "model.safetensors": make_weights()}.items():
        path = tmp_path / "data" / BUCKET / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return {"endpoint": endpoint, "region": "us-east-1", "secret": "store", "size": "10Mi"}


def describe_job(
    calm: Callable[..., dict[str, Any]], source: dict[str, str], kind: str, **more: str
) -> dict[str, Any]:
    """A job that prints what is in its data set, and starts from the weights."""
    data = {"url": f"s3://{BUCKET}/speech", "mountPath": "/corpus", **source, **more}
    init = {"url": f"s3://{BUCKET}/model.safetensors", **source}
    train = {"workload": "calm:Corpus", "steps": 40, "init": init}
    return calm(backend=kind, data=[data], train=train)


@pytest.mark.sampled
@every_kind
def test_a_job_trains_with_the_data_and_the_weights_that_its_pods_have_fetched(
    kind: str, namespace: Namespace, calm: Callable[..., dict[str, Any]], source: dict[str, str]
) -> None:
    namespace.apply(describe_job(calm, source, kind))
    namespace.kdist("wait", "digits", "--for=first-step", timeout=300)
    lines = namespace.kdist("logs", "digits", "--raw").splitlines()
    for name, content in CORPUS.items():
        told = f"corpus {name.removeprefix('speech/')} {len(content)}"
        assert any(told in line for line in lines), told
    assert any('"pretrained-loaded"' in line for line in lines)
    fetched = namespace.kdist("logs", "digits", "-c", "fetch-data-0", "--raw")
    ready = [line for line in fetched.splitlines() if '"data-ready"' in line]
    pods = namespace.pods("digits")
    assert len(ready) == len(pods), "each pod has fetched once"
    assert SECRET not in "".join(lines) + fetched
    check_nothing_tells_the_secret(namespace)
    for pod in pods:
        own = json.dumps(pod["spec"]["containers"])
        assert "secretKeyRef" not in own, "the training needs no credential"


@pytest.mark.sampled
@each_kind
def test_a_wrong_checksum_ends_the_job_at_once_and_why_says_so(
    kind: str, namespace: Namespace, calm: Callable[..., dict[str, Any]], source: dict[str, str]
) -> None:
    expected = sha256(b"another file").hexdigest()
    url = f"s3://{BUCKET}/speech/a.bin"
    namespace.apply(describe_job(calm, source, kind, url=url, sha256=expected))
    if kind == "pytorchjob":  # its operator makes the pod again without end
        reason = namespace.until("why names it", lambda: find_reason(namespace, expected))
    else:
        namespace.kdist("wait", "digits", code=10, timeout=240)
        reason = find_reason(namespace, expected)
    assert reason, namespace.kdist("why", "digits")
    assert not namespace.status("digits")["step"]
    shown = namespace.kubectl("get", "jobs,pods,configmaps,events", "-o", "yaml")
    assert SECRET not in shown


def find_reason(namespace: Namespace, expected: str) -> bool:
    """Whether `kdist why` says that the data cannot be fetched, with the digest that it should
    have; also of a StatefulSet, whose pods are gone by then.
    """
    found = json.loads(namespace.type_kdist("why", "digits", "-o", "json").stdout or "{}")
    return found.get("cause") in ("fetch", "data") and expected in str(found.get("sentence"))
