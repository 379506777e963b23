"""A code folder that no ConfigMap holds goes to the claim with the job's checkpoints, once for each
content, by a pod that is gone afterwards whatever happens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdist.cluster import streams
from kdist.errors import Code
from kdist.manifest import CODE_SENT
from kdist.render import find_pods
from kdist.render.overlay import violations
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.claim import ClaimServer
from tests.cli.deploy.conftest import CORE, PLACES

BLOB = bytes(range(256)) * 12_288  # 3 MiB
CLAIM = f"{CORE}/persistentvolumeclaims/digits-checkpoints"


@pytest.fixture(name="claim")
def serve_claim(api: Api, store: Store, file: Path) -> ClaimServer:
    """The claim, and a code folder that is too large for a ConfigMap."""
    src = file.parent / "src"
    (src / "data").mkdir()
    (src / "data" / "table ü.bin").write_bytes(BLOB)
    (src / "data" / ("long" * 50)).write_bytes(b"x")
    (src / "empty.py").write_bytes(b"")
    served = ClaimServer(store, file.parent / "claim")
    api.answer = served
    return served


def find_code(store: Store) -> str:
    """The folder on the claim that the job's pods mount."""
    (pod,) = find_pods(store.objects[PLACES["job"]])
    (mount,) = [
        dict(each)
        for each in pod["spec"]["containers"][0]["volumeMounts"]
        if each["mountPath"] == "/code"
    ]
    folder = str(mount.pop("subPath"))
    assert mount == {"name": "checkpoints", "mountPath": "/code", "readOnly": True}
    claims = [each for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each]
    assert [each["name"] for each in claims] == ["checkpoints"]
    return folder


@pytest.mark.sampled
def test_the_pods_mount_what_was_sent_and_the_same_content_is_sent_once(
    api: Api, store: Store, file: Path, kdist: Kdist, claim: ClaimServer
) -> None:
    shown = kdist("diff", str(file))
    assert shown.exit_code == 1, shown.stderr
    assert claim.pods == [], "what is only shown is not sent"
    sent = kdist("apply", str(file))
    assert sent.exit_code == Code.OK, sent.stderr
    folder = find_code(store)
    assert f"of ./src to {folder} on claim digits-checkpoints" in sent.stderr
    there = claim.root / folder
    found = {each.relative_to(there).as_posix() for each in there.rglob("*") if each.is_file()}
    assert found == {
        *("SHA256SUMS", "data/table ü.bin", f"data/{'long' * 50}", "empty.py", "mine.py")
    }
    assert (there / "data/table ü.bin").read_bytes() == BLOB
    assert [each.name for each in (claim.root / "_code").iterdir()] == [folder[len("_code/") :]]
    assert claim.actions == ["look", "receive"]
    assert store.deleted == ["pods"]
    written = [
        each.path
        for each in api.asked
        if each.method in ("PATCH", "POST") and "dryRun" not in each.query and "/ml/" in each.path
    ]
    assert written[:2] == [CLAIM, f"{CORE}/pods"]
    assert f"{CORE}/configmaps/digits" in written[2:]

    again = kdist("apply", str(file), "--error-unchanged")
    assert again.exit_code == Code.UNCHANGED, again.stdout
    assert len(claim.pods) == 1
    assert kdist("restart", "digits", "--no-wait").exit_code == Code.OK
    assert find_code(store) == folder
    assert kdist("delete", "digits", "--no-wait").exit_code == Code.OK
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert claim.actions == ["look", "receive", "look"], "who has no note of it looks"
    (file.parent / "src" / "mine.py").write_text("answer = 42\n")
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert claim.actions[3:] == ["look", "receive"]
    assert len(list((claim.root / "_code").iterdir())) == 2
    small = ("--set", "spec.code=null")
    assert kdist("apply", str(file), *small).exit_code == Code.OK
    assert CODE_SENT not in store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]


def test_the_pod_is_like_those_of_the_job_and_asks_for_little(
    api: Api, store: Store, file: Path, kdist: Kdist, claim: ClaimServer
) -> None:
    where = json.dumps({"claim": "shared"})
    other = {"spec": {"nodeName": "node-7"}, "status": {"phase": "Running"}}
    volume = {"name": "x", "persistentVolumeClaim": {"claimName": "shared"}}
    other["spec"]["volumes"] = [volume]  # type: ignore[assignment]  # as YAML has it
    store.put(f"{CORE}/pods/other", {"metadata": {"name": "other"}, **other})
    for mode, node in (("ReadWriteOnce", "node-7"), ("ReadWriteMany", "")):
        body = {"metadata": {"name": "shared", "uid": mode}, "status": {"phase": "Bound"}}
        path = f"{CORE}/persistentvolumeclaims/shared"
        store.put(path, {**body, "spec": {"accessModes": [mode]}})
        sent = kdist(
            *("apply", str(file), "--set", f"spec.checkpoints={where}"),
            *("--set", "spec.imagePullSecrets=[mine]", "--set", "spec.nodeSelector={disk: ssd}"),
            *("--set", "spec.resources.gpu=1"),
        )
        assert sent.exit_code == Code.OK, sent.stderr
        pod = claim.pods.pop()
        assert violations(pod) == []
        spec = pod["spec"]
        assert spec["imagePullSecrets"] == [{"name": "mine"}]
        assert spec["nodeSelector"] == {"disk": "ssd"}
        assert spec["containers"][0]["image"] == "registry.example.com/trainer:1"
        assert "nvidia.com/gpu" not in spec["containers"][0]["resources"]["limits"]
        assert [each["mountPath"] for each in spec["containers"][0]["volumeMounts"]] == [
            "/checkpoints"
        ]
        assert ("node-7" in json.dumps(spec.get("affinity"))) == bool(node)


def test_a_volume_that_is_yet_to_be_made_for_one_node_is_made_where_the_job_can_run(
    api: Api, store: Store, file: Path, kdist: Kdist, claim: ClaimServer
) -> None:
    body = {"metadata": {"name": "mine", "uid": "1"}, "status": {"phase": "Pending"}}
    path = f"{CORE}/persistentvolumeclaims/mine"
    store.put(path, {**body, "spec": {"accessModes": ["ReadWriteOnce"]}})
    gpus = ("--set", "spec.resources.gpu=1", "--set", "spec.checkpoints={claim: mine}")
    assert kdist("apply", str(file), *gpus).exit_code == Code.OK
    (pod,) = claim.pods
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "cannot start: ErrImagePull",
        ),
        ({"phase": "Failed"}, "ended too early"),
    ],
)
def test_what_cannot_be_sent_is_said_with_the_other_ways_and_leaves_nothing(
    api: Api,
    store: Store,
    file: Path,
    kdist: Kdist,
    claim: ClaimServer,
    status: dict[str, Any],
    said: str,
) -> None:
    claim.status = status
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.ERROR
    assert "spec.code cannot be sent to _code/" in refused.stderr
    assert said in refused.stderr
    assert "without a pod: code in the image, in a bucket" in refused.stderr
    assert store.objects == {}


def test_a_pod_without_a_node_is_waited_for_no_longer_than_its_reason_is_worth(
    api: Api,
    store: Store,
    file: Path,
    kdist: Kdist,
    claim: ClaimServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kdist.deploy.helper_pod._SCHEDULING_TIMEOUT", 0.0)
    why = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    claim.status = {"phase": "Pending", "conditions": [why]}
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.TIMEOUT
    assert "0/3 nodes are available" in refused.stderr
    assert "kubectl get events -n ml --field-selector involvedObject.name=digits-viewer-" in (
        refused.stderr
    )
    assert store.objects == {}


def test_what_the_program_cannot_write_is_said(
    api: Api, store: Store, file: Path, kdist: Kdist, claim: ClaimServer
) -> None:
    (claim.root / "_code").write_text("a file in its place")
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.ERROR
    assert "cannot be sent to _code/" in refused.stderr
    assert "Not a directory" in refused.stderr or "File exists" in refused.stderr
    assert store.objects == {}


def test_an_interrupt_deletes_the_pod(
    api: Api,
    store: Store,
    file: Path,
    kdist: Kdist,
    claim: ClaimServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(streams.PodStreams, "exec", interrupt)
    kdist("apply", str(file))
    assert len(claim.pods) == 1
    assert not [path for path in store.objects if "/pods/" in path]


def test_rights_are_asked_for_before_anything_is_sent(
    api: Api, store: Store, file: Path, kdist: Kdist, claim: ClaimServer
) -> None:
    store.may_not = {"create pods"}
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.FORBIDDEN
    assert "may not create pods" in refused.stderr
    assert "without a pod: code in the image, in a bucket" in refused.stderr
    assert store.objects == {}


def test_a_claim_that_is_not_there_is_named(
    api: Api, store: Store, file: Path, kdist: Kdist, claim: ClaimServer
) -> None:
    refused = kdist("apply", str(file), "--set", "spec.checkpoints={claim: gone}")
    assert refused.exit_code == Code.NOT_FOUND
    assert "on claim gone: " in refused.stderr
    assert store.objects == {}
