"""A job whose checkpoints are in a bucket, on a cluster where it has no volume at all: it goes on
from there when pods are lost, and what the bucket keeps is read when they are gone.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.controller import send, wait_for
from tests.cluster.namespace import CLUSTER, Namespace
from tests.cluster.test_dead_node import STEPS, describe_spread_job, doomed
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET
from tests.trainer.object_store.versitygw import versitygw
from tests.trainer.tensorboard.served import shown_steps

__all__ = ["doomed"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.needs("whole-cluster")]


@pytest.fixture(name="endpoint")
def serve(cluster: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """A real S3 server on this machine's side of the nodes' network, which pods can reach."""
    printed = subprocess.run(
        ["kubectl", "get", "nodes", "-o", "json"],
        env=dict(cluster),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    addresses = json.loads(printed)["items"][0]["status"]["addresses"]
    node = next(each["address"] for each in addresses if each["type"] == "InternalIP")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((node, 9))  # sends nothing
        host = probe.getsockname()[0]
    with versitygw(
        tmp_path, access_key=ACCESS_KEY, secret=SECRET, bucket=BUCKET, host=host
    ) as endpoint:
        yield endpoint


@pytest.fixture(name="checkpoints")
def name_bucket(namespace: Namespace, endpoint: str) -> dict[str, str]:
    """The bucket as a job names it, whose credentials are in a Secret of the namespace."""
    literals = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    arguments = [f"--from-literal={name}={value}" for name, value in literals.items()]
    namespace.kubectl("create", "secret", "generic", "bucket", *arguments)
    url = f"s3://{BUCKET}/team"
    return {"url": url, "endpoint": endpoint, "region": "us-east-1", "secret": "bucket"}


def committed(folder: Path) -> int:
    """The newest step whose manifest is in the bucket."""
    found = (folder / "data" / BUCKET).glob("team/digits/step-*/manifest.json")
    return max((int(path.parent.name.split("-")[1]) for path in found), default=0)


def count_event_bytes(folder: Path) -> int:
    """Bytes of TensorBoard's event files in the bucket."""
    found = (folder / "data" / BUCKET).glob("team/digits/tensorboard/*")
    return sum(path.stat().st_size for path in found)


@pytest.mark.sampled
def test_a_job_without_a_volume_goes_on_from_its_bucket_when_all_its_pods_are_lost(
    namespace: Namespace,
    calm: Callable[..., dict[str, Any]],
    checkpoints: dict[str, str],
    tmp_path: Path,
) -> None:
    namespace.apply(calm(backend="job", checkpoints=checkpoints))
    namespace.until("a checkpoint is in the bucket", lambda: committed(tmp_path) >= 40)
    namespace.kdist("profile", "digits", "--steps", "3", "--out", str(tmp_path / "traces"))
    assert len(list((tmp_path / "traces").iterdir())) == 2
    namespace.until("points are in the bucket", lambda: count_event_bytes(tmp_path) > 1000)
    before = committed(tmp_path)
    namespace.kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
    namespace.kdist("wait", "digits", timeout=300)
    assert committed(tmp_path) == 300
    check_nothing_tells_the_secret(namespace)
    namespace.kubectl("delete", "pods", "--all")
    listed = namespace.kdist("checkpoints", "verify", "digits")
    assert "step-00000300-e" in listed
    assert "damaged" not in listed
    lines = namespace.kdist("logs", "digits", "--raw").splitlines()
    events = [json.loads(line.partition("] ")[2]) for line in lines if '"resumed"' in line]
    assert [event["step"] >= before for event in events] == [True]
    assert SECRET not in "".join(lines)
    assert "300 steps" in namespace.kdist("report", "digits")
    assert namespace.find("persistentvolumeclaims") == []
    check_tensorboard(namespace, tmp_path / "tensorboard", before)


def check_tensorboard(namespace: Namespace, output: Path, before: int) -> None:
    """A helper pod shows the curve of the job, whose pods are gone, from before and after the loss
    of its pods.
    """
    forwarding = namespace.start_kdist("port-forward", "digits", ":tensorboard", output=output)
    try:
        printed: Any = namespace.until(
            "it forwards", lambda: re.search(r"http://127\.0\.0\.1:(\d+)/", output.read_text())
        )
        steps = namespace.until("the loss is drawn", lambda: shown_steps(printed[1]))
    finally:
        forwarding.terminate()
        forwarding.wait(60)
    assert steps == sorted(set(steps))
    assert steps[0] < before < steps[-1]


def check_nothing_tells_the_secret(namespace: Namespace) -> None:
    kinds = "jobs,pods,configmaps,events,services,networkpolicies"
    shown = namespace.kubectl("get", kinds, "-o", "yaml")
    logs = namespace.kubectl("logs", "-l", "kdist.dev/job=digits", "--tail=-1", "--all-containers")
    pod = namespace.pods("digits")[0]["metadata"]["name"]
    assert SECRET not in shown + logs
    assert SECRET not in namespace.type_kubectl("describe", "pod", pod).stdout


@pytest.mark.wide
@pytest.mark.disruptive
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("controller")
def test_a_job_without_a_volume_is_made_whole_when_a_node_loses_power(
    namespace: Namespace,
    calm: Callable[..., dict[str, Any]],
    doomed: str,
    checkpoints: dict[str, str],
    tmp_path: Path,
) -> None:
    document = describe_spread_job(calm, "job")
    document["spec"]["checkpoints"] = checkpoints
    send(namespace, document)
    namespace.until("a checkpoint is in the bucket", lambda: committed(tmp_path) >= 40)
    assert doomed in {pod["spec"]["nodeName"] for pod in namespace.pods("digits")}
    subprocess.run([CLUSTER, "lose", doomed], check=True, capture_output=True)
    whole = partial(is_whole, namespace, doomed)
    namespace.until("two nodes train again", whole, seconds=400)
    subprocess.run([CLUSTER, "return", doomed], check=True, capture_output=True)
    wait_for(namespace, "Complete", 400)
    assert committed(tmp_path) == STEPS
    verified = namespace.kdist("checkpoints", "verify", "digits")
    assert "damaged" not in verified


def is_whole(namespace: Namespace, lost: str) -> bool:
    """Whether all pods run on other nodes."""
    pods = [pod for pod in namespace.pods("digits") if pod["status"]["phase"] == "Running"]
    return len(pods) == 2 and lost not in {pod["spec"]["nodeName"] for pod in pods}
