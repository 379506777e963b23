"""What keeps pods from being made, from finding a node, and from starting is named, with the way
out.
"""

from __future__ import annotations

import pytest

from kdist.diagnose import Diagnosis, diagnose
from kdist.render import find_pods
from kdist.spec import list_sources
from kdist.status import Snapshot, WorkloadState
from tests.cli.diagnose.scenes import (
    asking,
    claim,
    creating,
    event,
    mounting,
    node,
    nodes,
    refused,
    scene,
)
from tests.cli.status.objects import (
    RUNS,
    URL,
    Document,
    config_map,
    fetching_pod,
    pod,
    record,
    report,
    terminated,
    unscheduled,
    waiting,
    workload,
)
from tests.manifests.jobs import make, place

GPU = "nvidia.com/gpu"
FETCHING = make(
    data=[{"claim": "images", "mountPath": "/images"}, {"url": URL, "mountPath": "/data"}],
    train={"workload": "digits", "epochs": 1, "init": {"url": "hf://owner/model@v1"}},
    code={"url": "s3://team/code"},
    install={"wheels": {"url": "s3://team/wheels"}},
)
"""A job that fetches something of each kind."""
TAINTED = "1 node(s) had untolerated taint {dedicated: infra}"
NO_CPU = (
    f"0/3 nodes are available: {TAINTED}, 2 Insufficient cpu. no new claims to deallocate, "
    "preemption: 0/3 nodes are available: 1 Preemption is not helpful for scheduling, 2 "
    "No preemption victims found."
)
NO_GPU = (
    "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are "
    "available: 2 No preemption victims found."
)
SELECTOR = (
    "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/2 nodes are available: ..."
)
CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
MIXED = (
    "0/3 nodes are available: 1 node(s) had untolerated taint{}, 2 node(s) didn't match Pod's node "
    "affinity/selector. no new claims to deallocate, preemption: 0/3 nodes are available: "
    "3 Preemption is not helpful."
)
WORKERS = nodes(node("control"), node("worker-1", cpu="8"), node("worker-2", cpu="7500m"))
QUOTA = (
    'Error creating: pods "digits-0-xk2jp" is forbidden: exceeded quota: compute, '
    "requested: requests.cpu=4, "
    "used: requests.cpu=6, limited: requests.cpu=8"
)
POD_SECURITY = (
    'Error creating: pods "digits-0-q8l2z" is forbidden: '
    'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != '
    'false (container "sidecar" must set securityContext.allowPrivilegeEscalation=false)'
)
WEBHOOK = (
    'Error creating: admission webhook "policy.example.com" denied the request: '
    "label team is missing"
)
AWAY = (
    "Error creating: Internal error occurred: "
    'failed calling webhook "mutate.example.com": failed to call webhook: Post '
    '"https://hook.kube-system.svc:443/mutate?timeout=10s": dial tcp 10.96.0.12:443: '
    "connect: connection refused"
)
ACCOUNT = (
    'Error creating: pods "digits-0-" is forbidden: '
    'error looking up service account ml/digits: serviceaccount "digits" not found'
)
LIMIT_RANGE = (
    'Error creating: pods "digits-0-x" is forbidden: '
    "maximum memory usage per Container is 1Gi, but limit is 4Gi"
)
MUST_SPECIFY = (
    'Error creating: pods "d" is forbidden: failed quota: compute: '
    "must specify limits.cpu for: sidecar"
)
NO_CLAIM = (
    '0/3 nodes are available: persistentvolumeclaim "imagenet" not found. preemption: not eligible'
)
UNBOUND = (
    "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: "
    "0/3 nodes are available."
)
NOT_FOUND = (
    'Back-off pulling image "reg/typo:1": ErrImagePull: '
    'failed to pull and unpack image "reg/typo:1": failed to resolve '
    'reference "reg/typo:1": reg/typo:1: not found'
)
DENIED = (
    'failed to pull and unpack image "docker.io/me/x:1": failed to resolve reference: '
    "pull access denied, repository does not "
    "exist or may require authorization: server message: insufficient_scope: authorization failed"
)
NO_HOST = (
    'failed to do request: Head "https://registryy/v2/x/manifests/1": dial tcp: '
    "lookup registryy on 10.96.0.10:53: no such host"
)
NFS = (
    'MountVolume.SetUp failed for volume "pvc-1" : mount failed: '
    "exit status 32\nMounting command: mount\nOutput: mount.nfs: "
    "Connection refused for 10.0.0.9:/export"
)
NO_NODES = "no nodes available to schedule pods"
CORDONED = "0/2 nodes are available: 2 node(s) were unschedulable."
NO_CLASS = 'storageclass.storage.k8s.io "fast" not found'
NO_DEFAULT = "no persistent volumes available for this claim and no storage class is set"
ONE_WRITER = "failed to provision volume: only ReadWriteOnce is supported"
PRIORITY = 'Error creating: pods "x" is forbidden: no PriorityClass with name gold was found'
FORBIDDEN = "create Pod digits-0 in StatefulSet digits failed error: pods is forbidden"
BAD_NAME = 'Failed to apply default image tag "a::b": couldn\'t parse image name'
NO_ANSWER = "dial tcp 10.0.0.1:443: i/o timeout"
UNTRUSTED = "tls: failed to verify certificate: x509: certificate signed by unknown authority"
NO_CODE = 'MountVolume.SetUp failed for volume "code" : configmap "digits-code-1" not found'
ABSENT = 'MountVolume.SetUp failed for volume "s" : secret "token" not found'
ATTACHED = 'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached'
NO_DRIVER = (
    'MountVolume.MountDevice failed for volume "v" : '
    "driver name csi.x not found in the list of registered CSI drivers"
)
NO_KEY = "couldn't find key token in Secret ml/wandb"
ROOT_USER = 'container has runAsNonRoot and image will run as root (pod: "x", container: trainer)'
NO_PROGRAM = 'exec: "python": executable file not found in $PATH'
PULLING = 'Pulling image "registry/kdist-trainer:1"'


def unplaced(message: str, **asked: str) -> Snapshot:
    """A pod that asks for so much and finds no node among the workers."""
    return scene([asking(unscheduled(0, message), **asked)], nodes=WORKERS)


def pulling(message: str, reason: str = "ImagePullBackOff") -> Snapshot:
    return scene(
        [
            pod(0, phase="Pending", **waiting(reason, message)),
            pod(1, phase="Pending", **waiting(reason, message)),
        ]
    )


def config_error(message: str) -> Snapshot:
    return scene([pod(0, phase="Pending", **waiting("CreateContainerConfigError", message))])


def mounted(message: str, reason: str = "FailedMount") -> Snapshot:
    return scene([creating()], event(reason, message))


def claimed(printed: str, *, storage_class: str = "fast") -> Snapshot:
    waits = mounting(unscheduled(0, UNBOUND), "ckpt")
    about = event("ProvisioningFailed", printed, kind="PersistentVolumeClaim", name="ckpt")
    return scene([waits], about, claims={"ckpt": claim("ckpt", storage_class=storage_class)})


NOBODYS = scene([], over=workload(kind="TrainJob"), state=WorkloadState())
CASES = [
    # placement
    (unplaced(NO_CPU, cpu="64"), "unschedulable", ["64 cpu", "the largest node has 8 cpu"]),
    (unplaced(NO_CPU, cpu="6"), "unschedulable", ["6 cpu", "are full"]),
    (scene([asking(unscheduled(0, NO_CPU), cpu="64")]), "unschedulable", ["64 cpu"]),
    (unplaced(NO_GPU, **{GPU: "8"}), "unschedulable", [f"8 {GPU}", f"no node has any {GPU}"]),
    (
        scene([unscheduled(0, SELECTOR), unscheduled(1, SELECTOR)], nodes=WORKERS),
        "unschedulable",
        ["digits-1-abcde find", "nodeSelector"],
    ),
    (
        scene([unscheduled(0, f"0/1 nodes are available: {TAINTED}.")], nodes=WORKERS),
        "unschedulable",
        ["taints", "tolerations"],
    ),
    (scene([unscheduled(0, NO_NODES)]), "unschedulable", ["no nodes available"]),
    (scene([unscheduled(0, CORDONED)]), "unschedulable", ["cordoned"]),
    # claims
    (scene([unscheduled(0, NO_CLAIM)]), "claim-missing", ["imagenet", "does not exist"]),
    (scene([mounting(creating(), "ckpt")], claims={"ckpt": {}}), "claim-missing", ["ckpt"]),
    (claimed(NO_CLASS), "claim-pending", ["storage class fast, which does not exist"]),
    (claimed(NO_DEFAULT), "claim-pending", ["no default one"]),
    (claimed(ONE_WRITER), "claim-pending", ["may not support ReadWriteMany"]),
    (
        scene([mounting(unscheduled(0, UNBOUND), "ckpt")], claims={"ckpt": claim("ckpt")}),
        "claim-pending",
        ["ckpt"],
    ),
    (
        scene([mounting(creating(), "ckpt")], claims={"ckpt": claim("ckpt", phase="Lost")}),
        "claim-lost",
        ["ckpt is gone"],
    ),
    # what the API server refuses
    (refused(QUOTA), "quota", ["compute", "requests.cpu=4", "requests.cpu=8"]),
    (refused(MUST_SPECIFY), "quota", ["specify its resources"]),
    (refused(POD_SECURITY), "pod-security", ["restricted:latest", "allowPrivilegeEscalation"]),
    (refused(WEBHOOK), "webhook-refused", ["policy.example.com", "label team is missing"]),
    (
        refused(AWAY),
        "webhook-away",
        ["mutate.example.com", "service hook in namespace kube-system does not answer"],
    ),
    (refused(ACCOUNT), "no-service-account", ["ml/digits"]),
    (refused(LIMIT_RANGE), "limit-range", ["maximum memory usage per Container is 1Gi"]),
    (refused(PRIORITY), "no-priority-class", ["gold"]),
    (refused(FORBIDDEN, kind="StatefulSet"), "pods-refused", []),
    # images
    (pulling(NOT_FOUND), "image-missing", ["registry/kdist-trainer:1", "typo"]),
    (pulling(DENIED, "ErrImagePull"), "image-auth", ["imagePullSecrets"]),
    (pulling("401 Unauthorized", "ErrImagePull"), "image-auth", ["imagePullSecrets"]),
    (pulling(NO_HOST, "ErrImagePull"), "image-registry", ["cannot be resolved"]),
    (pulling(BAD_NAME, "InvalidImageName"), "image-name", ["not a valid image name"]),
    (pulling(NO_ANSWER, "ErrImagePull"), "image-registry", ["does not answer"]),
    (pulling(UNTRUSTED), "image-tls", ["certificate"]),
    (
        pulling("no match for platform in manifest: not found"),
        "image-platform",
        ["CPU architecture"],
    ),
    (pulling("toomanyrequests: You have reached your pull rate limit"), "image-limit", ["limit"]),
    (pulling("something nobody has seen"), "image", ["cannot be pulled"]),
    # volumes, Secrets, ConfigMaps
    (mounted(NO_CODE), "mount", ["ConfigMap digits-code-1"]),
    (mounted(ABSENT), "mount", ["Secret token"]),
    (mounted(NFS), "mount", ["pvc-1", "Connection refused"]),
    (mounted(ATTACHED, "FailedAttachVolume"), "mount", ["one only"]),
    (mounted(NO_DRIVER), "mount", ["lacks the storage driver csi.x"]),
    (
        config_error('secret "wandb" not found'),
        "secret-missing",
        ["Secret wandb", "kubectl create secret generic wandb"],
    ),
    (config_error('configmap "digits" not found'), "configmap-missing", ["ConfigMap digits"]),
    (config_error(NO_KEY), "secret-missing", ["wandb has no key token"]),
    (config_error(ROOT_USER), "image-user", ["root"]),
    # the program
    (
        scene([pod(0, **waiting("RunContainerError", NO_PROGRAM))]),
        "container-start",
        ["executable file not found"],
    ),
    # on its way
    (scene([creating()], event("Pulling", PULLING, ago=300)), "slow-pull", ["5:00"]),
    (scene([creating()], event("Pulling", PULLING, ago=5)), "starting", []),
    (scene([], reported=config_map(age=5), over=workload(age=5)), "starting", []),
    (NOBODYS, "operator-absent", ["TrainJob"]),
]


@pytest.mark.parametrize(
    ("seen", "cause", "words"),
    CASES,
    ids=[f"{index}-{case[1]}" for index, case in enumerate(CASES)],
)
def test_the_cause_is_named_with_what_it_was_seen_by_and_the_way_out(
    seen: Snapshot, cause: str, words: list[str]
) -> None:
    found = diagnose(seen)
    assert found.cause == cause
    reported = " ".join([found.sentence, found.fix, *found.evidence, *found.commands])
    assert [word for word in words if word not in reported] == []
    assert found.fix
    assert found.commands
    assert found.evidence or cause == "starting"
    assert found.also == (), "each of these is one trouble"
    twice = [one for one in found.commands if one.split().count("-n") + one.split().count("ml") > 2]
    assert twice == []


def choosing(message: str, *known: Document) -> Diagnosis:
    """Of a pod that wants disk=golden, which the scheduler says this of."""
    found = unscheduled(0, message)
    found["spec"]["nodeSelector"] = {"disk": "golden"}
    return diagnose(scene([found], nodes=nodes(*known)))


def tainted(name: str, key: str, **labels: str) -> Document:
    found = node(name)
    found["metadata"]["labels"] = labels
    found["spec"] = {"taints": [{"key": key, "effect": "NoSchedule"}]}
    return found


def test_pods_that_exclude_each_other_come_before_a_control_planes_taint() -> None:
    printed = (
        "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match pod "
        "anti-affinity rules. preemption: 0/3 nodes are available: 1 Preemption is not helpful."
    )
    known = nodes(tainted("master", CONTROL_PLANE), node("worker-1"), node("worker-2"))
    found = diagnose(scene([unscheduled(0, printed)], nodes=known))
    assert "no node: nodes hold a pod that this one must not share" in found.sentence
    assert found.fix.startswith("add a node, use fewer (spec.nodes)")


@pytest.mark.parametrize("taint", ["(s)", f" {{{CONTROL_PLANE}: }}"])
def test_a_selector_is_named_before_a_control_planes_taint(taint: str) -> None:
    seen = choosing(MIXED.format(taint), tainted("master", CONTROL_PLANE), node("worker-1"))
    assert seen.sentence.endswith(
        "no node: no node has the labels of spec.nodeSelector (disk=golden)"
    )
    assert "tolerations" not in seen.fix
    unseen = choosing(MIXED.format(f" {{{CONTROL_PLANE}: }}"))
    assert "find no node: no node has the labels" in unseen.sentence.replace("finds", "find")


def test_a_selector_that_only_a_tainted_node_satisfies_comes_after_the_taint() -> None:
    printed = MIXED.format(" {dedicated: }")
    seen = choosing(printed, tainted("fast", "dedicated", disk="golden"), node("worker-1"))
    reported = (
        "nodes have taints that the job does not tolerate; the others lack the labels of "
        "spec.nodeSelector"
    )
    assert seen.sentence.endswith(reported)
    assert seen.fix.startswith("add the taint to spec.tolerations")


def test_a_volume_that_cannot_be_mounted_comes_before_an_image_that_is_slow() -> None:
    slow = event("Pulling", PULLING, name="digits-1-abcde", ago=400)
    found = diagnose(scene([creating(0), creating(1)], slow, event("FailedMount", NFS)))
    assert (found.cause, [each.cause for each in found.also]) == ("mount", ["slow-pull"])


def test_a_refusal_that_was_overcome_is_not_reported() -> None:
    early = event("FailedCreate", QUOTA, kind="Job", ago=300)
    late = event("SuccessfulCreate", "Created pod: digits-0-abcde", kind="Job", ago=100)
    assert diagnose(scene([creating(0), creating(1)], early, late)).cause == "starting"


def test_a_mount_that_has_succeeded_since_does_not_hide_what_keeps_the_container() -> None:
    slow = 'MountVolume.SetUp failed for volume "train": failed to sync configmap cache: timed out'
    waits = waiting("CreateContainerConfigError", 'configmap "nowhere" not found')
    found = diagnose(scene([pod(0, phase="Pending", **waits)], event("FailedMount", slow, ago=60)))
    assert (found.cause, found.also) == ("configmap-missing", ())


def test_a_trouble_of_a_pod_that_runs_by_now_is_not_reported() -> None:
    found = diagnose(scene([pod(0), pod(1)], event("FailedMount", NFS, ago=400)))
    assert "mount" not in found.cause


FAILED = WorkloadState(failed=1, finished="failed", reason="PodFailurePolicy")
MESSAGE = "spec.data[0]: the SHA-256 of a.bin is 1, not 2"


def failing(code: int, cause: str | None, reason: str = "Error", message: str = "") -> Document:
    told = record(code, cause, message=message or MESSAGE, rank=None, node="") if cause else None
    return {"state": terminated(code, reason, told)}


def test_a_wrong_checksum_is_told_with_the_field_the_log_and_what_to_do() -> None:
    seen = scene([fetching_pod(0, failing(65, "data"), phase="Failed"), pod(1)], state=FAILED)
    found = diagnose(seen)
    assert (found.cause, found.severity) == ("fetch", "failed")
    assert found.sentence == f"data from {URL} cannot be fetched: {MESSAGE}"
    assert found.fix == "correct spec.data[0], or what is at its URL, then apply and restart"
    assert found.evidence[0] == "pod/digits-0-abcde: fetch-data-0 ended with exit code 65"
    assert found.commands[0] == "kdist logs digits -n ml -c fetch-data-0 --pod digits-0-abcde"
    assert found.change == "do what the fix says"
    assert found.commands[1:] == ("kdist apply JOB.yaml -n ml && kdist restart digits -n ml",)
    assert found.also == (), "the exit record is the same failure"


@pytest.mark.parametrize(
    ("init", "words", "fix"),
    [
        (failing(64, "config", message="no credential"), "no credential", "correct spec.data[0]"),
        (failing(137, None, "OOMKilled"), "more memory than the limit", "spec.resources.memory"),
        (failing(1, None), "exit code 1 and left no exit record", "rebuild the image"),
    ],
)
def test_what_else_may_be_wrong_has_its_fix(init: Document, words: str, fix: str) -> None:
    found = diagnose(scene([fetching_pod(0, init, phase="Failed")], state=FAILED))
    assert found.cause == "fetch"
    assert words in found.sentence
    assert fix in found.fix


def test_a_server_that_is_away_is_waited_for() -> None:
    told = record(203, "storage", message="spec.data[0]: nothing has come for 300 s", rank=None)
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    again = {"state": waits, "lastState": terminated(203, record=told), "restartCount": 2}
    found = diagnose(scene([fetching_pod(0, again)]))
    assert (found.cause, found.severity) == ("fetch", "waiting")
    assert "could not be fetched, it is tried again: spec.data[0]: nothing" in found.sentence
    assert "restarted 2 times" in found.evidence[0]


def test_a_fetch_in_progress_says_how_far_it_is() -> None:
    event: Document = {"event": "data-progress", "bytes_per_second": 80 * 10**6}
    event |= {"done_bytes": 12 * 10**9, "total_bytes": 200 * 10**9}
    found = diagnose(scene([fetching_pod(0, RUNS)], fetches={"digits-0-abcde": event}))
    assert (found.cause, found.severity) == ("fetching", "waiting")
    assert found.sentence == f"digits starts: fetching data from {URL}: 12 of 200 GB, 80 MB/s"
    assert found.commands[0] == "kdist logs digits -n ml -f -c fetch-data-0"
    unknown = diagnose(scene([fetching_pod(0, RUNS)]))
    assert unknown.sentence == f"digits starts: fetching data from {URL}"


def test_a_node_that_still_fetches_is_why_the_others_wait() -> None:
    joined = {"digits-0-abcde": report("rendezvous", ranks=(), step=0, last_checkpoint_step=None)}
    found = diagnose(scene([pod(0), fetching_pod(1, RUNS)], reports=joined))
    assert found.cause == "fetching"
    assert "rendezvous" not in [each.cause for each in found.also]


def test_a_fetch_that_was_killed_with_its_pod_is_not_the_cause() -> None:
    evicted = fetching_pod(0, failing(137, None), phase="Failed", reason="Evicted")
    found = diagnose(scene([evicted], state=WorkloadState(failed=1)))
    assert found.cause == "evicted"


def test_a_pod_that_fetched_more_than_its_volume_takes_names_the_field() -> None:
    sections = {source.name: source.field for source in list_sources(FETCHING.spec)}
    assert sections.keys() == {"data-1", "init", "code", "wheels"}
    # wheels are fetched where they are installed
    sections["packages"] = sections.pop("wheels").removesuffix(".wheels")
    (template,) = [pod for each in place(FETCHING) for pod in find_pods(each.document)]
    volumes = {each["name"] for each in template["spec"]["volumes"] if "emptyDir" in each}
    assert volumes - {"scratch", "tmp", "shm"} == sections.keys()
    for volume, section in sections.items():
        message = f'Usage of EmptyDir volume "{volume}" exceeds the limit "1Gi". '
        evicted = pod(0, phase="Failed", reason="Evicted", message=message)
        found = diagnose(scene([evicted], state=WorkloadState(failed=1)))
        assert found.cause == "evicted"
        assert found.fix.startswith(f"raise {section}.size: ")


def test_each_thing_that_is_fetched_has_its_word() -> None:
    (template,) = [pod for each in place(FETCHING) for pod in find_pods(each.document)]
    said = {}
    for each in template["spec"]["initContainers"]:
        pods = [fetching_pod(0, RUNS, names=(each["name"],))]
        said[each["name"]] = diagnose(scene(pods)).sentence.partition("fetching ")[2]
    assert said == {
        "fetch-packages": "packages",
        "fetch-data-1": f"data from {URL}",
        "fetch-init": f"weights from {URL}",
        "fetch-code": f"code from {URL}",
    }
