"""A code folder that no ConfigMap holds goes to the claim with the job's checkpoints, once for each
content, by a pod that is gone afterwards whatever happens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kdist.cluster import streams
from kdist.errors import Code
from kdist.manifest import CODE_SENT, COMMIT
from kdist.render import find_pods
from kdist.render.overlay import violations
from tests.cli.cluster.api import Api, Asked, Reply, refusal
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.claim import HELPER, ClaimServer
from tests.cli.deploy.conftest import CORE, PLACES

BLOB = bytes(range(256)) * 12_288  # 3 MiB
CLAIM = f"{CORE}/persistentvolumeclaims/digits-checkpoints"
TRAINING_JOB = "/apis/kdist.dev/v1alpha1/namespaces/ml/trainingjobs/digits"


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


def check_refused(result: Result, store: Store, code: Code, *words: str) -> None:
    """Check that an apply ended so, said these words, and left nothing."""
    assert result.exit_code == code, result.stderr
    for each in words:
        assert each in result.stderr
    assert store.objects == {}


def is_sent(asked: Asked, path: str) -> bool:
    """Whether an object is applied, and not only tried."""
    return (asked.method, asked.path) == ("PATCH", path) and "dryRun" not in asked.query


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
    assert f"to send 3.0 MiB to {folder} on claim digits-checkpoints" in sent.stderr
    assert sent.stdout.count("persistentvolumeclaim/digits-checkpoints") == 1
    assert "persistentvolumeclaim/digits-checkpoints created" in sent.stdout
    there = claim.root / folder
    found = {each.relative_to(there).as_posix() for each in there.rglob("*") if each.is_file()}
    assert found == {
        *("SHA256SUMS", "data/table ü.bin", f"data/{'long' * 50}", "empty.py", "mine.py")
    }
    assert (there / "data/table ü.bin").read_bytes() == BLOB
    assert all((there / each).stat().st_mode & 0o020 for each in (*found, "data", ".")), "shared"
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
    (there / "empty.py").write_bytes(b"damaged")
    assert kdist("delete", "digits", "--no-wait").exit_code == Code.OK
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert claim.actions[3:] == ["look", "receive"], "a damaged copy is replaced"
    assert (there / "empty.py").read_bytes() == b""
    (file.parent / "src" / "mine.py").write_text("answer = 42\n")
    assert kdist("apply", str(file)).exit_code == Code.OK
    assert claim.actions[5:] == ["look", "receive"]
    assert len(list((claim.root / "_code").glob("[!.]*"))) == 2
    small = ("--set", "spec.code=null")
    assert kdist("apply", str(file), *small).exit_code == Code.OK
    assert CODE_SENT not in store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]


def test_the_pod_is_like_those_of_the_job_and_asks_for_little(
    store: Store, file: Path, kdist: Kdist, claim: ClaimServer
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
    store: Store, file: Path, kdist: Kdist, claim: ClaimServer
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
    store: Store,
    file: Path,
    kdist: Kdist,
    claim: ClaimServer,
    status: dict[str, Any],
    said: str,
) -> None:
    claim.status = status
    other_ways = "without a pod: code in the image, in a bucket"
    undone = "deleted again: persistentvolumeclaim/digits-checkpoints"
    words = ("spec.code cannot be sent to _code/", said, other_ways, undone)
    check_refused(kdist("apply", str(file)), store, Code.ERROR, *words)


@pytest.mark.parametrize("first", [True, False])
def test_a_claim_that_another_apply_has_made_meanwhile_stays(
    api: Api, store: Store, file: Path, kdist: Kdist, claim: ClaimServer, first: bool
) -> None:
    def race(asked: Asked) -> Reply:
        if not is_sent(asked, CLAIM) or CLAIM in store.objects:
            return claim(asked)
        mine = None if first else claim(asked)
        theirs = {**asked.body["metadata"], "uid": "theirs"}
        store.put(CLAIM, {**asked.body, "metadata": theirs})
        return mine or claim(asked)

    api.answer, claim.status = race, {"phase": "Failed"}
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.ERROR
    assert "ended too early" in refused.stderr
    assert "deleted again" not in refused.stderr
    assert list(store.objects) == [CLAIM]


@pytest.mark.parametrize("path", [PLACES["job"], TRAINING_JOB])
def test_the_claim_goes_if_a_later_object_is_refused(
    api: Api,
    store: Store,
    file: Path,
    kdist: Kdist,
    claim: ClaimServer,
    path: str,
) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.path == "/apis/kdist.dev/v1alpha1" and path == TRAINING_JOB:
            return Reply(document={"resources": [{"kind": "TrainingJob"}]})
        if is_sent(asked, path):
            return refusal(422, "not today", "Invalid")
        return claim(asked)

    api.answer = answer
    refused = kdist("apply", str(file))
    assert "deleted again: " in refused.stderr
    check_refused(
        refused, store, Code.ERROR, "not today", "persistentvolumeclaim/digits-checkpoints"
    )
    assert claim.actions == ["look", "receive"]


def test_the_commit_is_recorded_also_if_where_the_code_is_cannot_be(
    api: Api,
    store: Store,
    file: Path,
    kdist: Kdist,
    claim: ClaimServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kdist.deploy.job.find_commit", lambda _: "1f2e")
    hidden = refusal(403, "not yours", "Forbidden")
    api.answer = lambda asked: (
        hidden
        if (asked.method, asked.path) == ("GET", CLAIM) and PLACES["job"] in store.objects
        else claim(asked)
    )
    sent = kdist("apply", str(file))
    assert sent.exit_code == Code.OK, sent.stderr
    assert "the job is applied, but where its code is could not be recorded: " in sent.stderr
    notes = store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]
    assert notes[COMMIT] == "1f2e"
    assert CODE_SENT not in notes


def test_a_pod_that_takes_long_to_start_is_named(
    api: Api, file: Path, kdist: Kdist, claim: ClaimServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(asked: Asked) -> Reply:
        reply = claim(asked)
        if asked.method == "GET" and HELPER in asked.path:
            claim.status = {"phase": "Running"}
        return reply

    monkeypatch.setattr("kdist.cluster.polling._NOTIFY_AFTER", 0.0)
    api.answer, claim.status = start, {"phase": "Pending"}
    sent = kdist("apply", str(file))
    assert sent.exit_code == Code.OK, sent.stderr
    starting = sent.stderr.index("starting pod digits-viewer-")
    assert sent.stderr.index("waiting: helper pod digits-viewer-") > starting


def test_a_pod_without_a_node_is_waited_for_no_longer_than_its_reason_is_worth(
    store: Store,
    file: Path,
    kdist: Kdist,
    claim: ClaimServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kdist.deploy.helper_pod._SCHEDULING_TIMEOUT", 0.0)
    why = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    claim.status = {"phase": "Pending", "conditions": [why]}
    events = "kubectl get events -n ml --field-selector involvedObject.name=digits-viewer-"
    refused = kdist("apply", str(file))
    check_refused(refused, store, Code.TIMEOUT, "0/3 nodes are available", events)


@pytest.mark.usefixtures("claim")
def test_an_upload_that_takes_too_long_is_given_up(
    store: Store, file: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object, timeout: float, **__: object) -> tuple[int, bytes]:
        assert timeout == 0.0, "a large copy takes longer to compare than most commands"
        return 1, b""

    monkeypatch.setattr("kdist.deploy.code_upload._SECONDS", 0.0)
    monkeypatch.setattr(streams.PodStreams, "run", look)
    check_refused(
        kdist("apply", str(file)), store, Code.TIMEOUT, "`python` has not ended after 0 s"
    )


def test_what_the_program_cannot_write_is_said(
    store: Store, file: Path, kdist: Kdist, claim: ClaimServer
) -> None:
    (claim.root / "_code").write_text("a file in its place")
    check_refused(
        kdist("apply", str(file)), store, Code.ERROR, "cannot be sent to _code/", "File exists"
    )


def test_an_interrupt_deletes_the_pod_and_the_claim(
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
    assert store.deleted == ["pods", "persistentvolumeclaims"]
    assert store.objects == {}


@pytest.mark.usefixtures("claim")
def test_rights_are_asked_for_before_anything_is_sent(
    store: Store, file: Path, kdist: Kdist
) -> None:
    store.may_not = {"create pods"}
    words = ("may not create pods", "without a pod: code in the image, in a bucket")
    check_refused(kdist("apply", str(file)), store, Code.FORBIDDEN, *words)
    assert store.deleted == []


@pytest.mark.usefixtures("claim")
def test_a_claim_that_is_not_there_is_named(store: Store, file: Path, kdist: Kdist) -> None:
    refused = kdist("apply", str(file), "--set", "spec.checkpoints={claim: gone}")
    check_refused(refused, store, Code.NOT_FOUND, "on claim gone: ")
