"""What keeps pods from being made, from finding a node, and from starting is named, with the way
out.
"""

from __future__ import annotations

import pytest

from kdist.diagnose import Diagnosis, diagnose
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
from tests.cli.status.objects import Document, config_map, pod, unscheduled, waiting, workload

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
    'Error creating: pods "digits-0-xk2jp" is forbidden: exceeded quota: compute, requested: requests.cpu=4, '
    "used: requests.cpu=6, limited: requests.cpu=8"
)
POD_SECURITY = (
    'Error creating: pods "digits-0-q8l2z" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != '
    'false (container "sidecar" must set securityContext.allowPrivilegeEscalation=false)'
)
WEBHOOK = 'Error creating: admission webhook "policy.example.com" denied the request: label team is missing'
AWAY = (
    'Error creating: Internal error occurred: failed calling webhook "mutate.example.com": failed to call webhook: Post '
    '"https://hook.kube-system.svc:443/mutate?timeout=10s": dial tcp 10.96.0.12:443: connect: connection refused'
)
ACCOUNT = 'Error creating: pods "digits-0-" is forbidden: error looking up service account ml/digits: serviceaccount "digits" not found'
LIMIT_RANGE = 'Error creating: pods "digits-0-x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi'
MUST_SPECIFY = 'Error creating: pods "d" is forbidden: failed quota: compute: must specify limits.cpu for: sidecar'
NO_CLAIM = (
    '0/3 nodes are available: persistentvolumeclaim "imagenet" not found. preemption: not eligible'
)
UNBOUND = (
    "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: "
    "0/3 nodes are available."
)
NOT_FOUND = (
    'Back-off pulling image "reg/typo:1": ErrImagePull: failed to pull and unpack image "reg/typo:1": failed to resolve '
    'reference "reg/typo:1": reg/typo:1: not found'
)
DENIED = (
    'failed to pull and unpack image "docker.io/me/x:1": failed to resolve reference: pull access denied, repository does not '
    "exist or may require authorization: server message: insufficient_scope: authorization failed"
)
NO_HOST = 'failed to do request: Head "https://registryy/v2/x/manifests/1": dial tcp: lookup registryy on 10.96.0.10:53: no such host'
NFS = (
    'MountVolume.SetUp failed for volume "pvc-1" : mount failed: exit status 32\nMounting command: mount\nOutput: mount.nfs: '
    "Connection refused for 10.0.0.9:/export"
)


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


def claimed(said: str, *, storage_class: str = "fast") -> Snapshot:
    waits = mounting(unscheduled(0, UNBOUND), "ckpt")
    about = event("ProvisioningFailed", said, kind="PersistentVolumeClaim", name="ckpt")
    return scene([waits], about, claims={"ckpt": claim("ckpt", storage_class=storage_class)})


CASES = [
    # placement
    (
        scene([asking(unscheduled(0, NO_CPU), cpu="64")], nodes=WORKERS),
        "unschedulable",
        ["64 cpu", "the largest node has 8 cpu"],
    ),
    (
        scene([asking(unscheduled(0, NO_CPU), cpu="6")], nodes=WORKERS),
        "unschedulable",
        ["6 cpu", "are full"],
    ),
    (scene([asking(unscheduled(0, NO_CPU), cpu="64")]), "unschedulable", ["64 cpu"]),
    (
        scene([asking(unscheduled(0, NO_GPU), **{"nvidia.com/gpu": "8"})], nodes=WORKERS),
        "unschedulable",
        ["8 nvidia.com/gpu", "no node has any nvidia.com/gpu"],
    ),
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
    (
        scene([unscheduled(0, "no nodes available to schedule pods")]),
        "unschedulable",
        ["no nodes available"],
    ),
    (
        scene([unscheduled(0, "0/2 nodes are available: 2 node(s) were unschedulable.")]),
        "unschedulable",
        ["cordoned"],
    ),
    # claims
    (scene([unscheduled(0, NO_CLAIM)]), "claim-missing", ["imagenet", "does not exist"]),
    (scene([mounting(creating(), "ckpt")], claims={"ckpt": {}}), "claim-missing", ["ckpt"]),
    (
        claimed('storageclass.storage.k8s.io "fast" not found'),
        "claim-pending",
        ["storage class fast, which does not exist"],
    ),
    (
        claimed("no persistent volumes available for this claim and no storage class is set"),
        "claim-pending",
        ["no default one"],
    ),
    (
        claimed("failed to provision volume: only ReadWriteOnce is supported"),
        "claim-pending",
        ["may not know ReadWriteMany"],
    ),
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
    (refused(MUST_SPECIFY), "quota", ["how much it takes"]),
    (refused(POD_SECURITY), "pod-security", ["restricted:latest", "allowPrivilegeEscalation"]),
    (refused(WEBHOOK), "webhook-refused", ["policy.example.com", "label team is missing"]),
    (
        refused(AWAY),
        "webhook-away",
        ["mutate.example.com", "service hook in namespace kube-system does not answer"],
    ),
    (refused(ACCOUNT), "no-service-account", ["ml/digits"]),
    (refused(LIMIT_RANGE), "limit-range", ["maximum memory usage per Container is 1Gi"]),
    (
        refused('Error creating: pods "x" is forbidden: no PriorityClass with name gold was found'),
        "no-priority-class",
        ["gold"],
    ),
    (
        refused(
            "create Pod digits-0 in StatefulSet digits failed error: pods is forbidden",
            kind="StatefulSet",
        ),
        "pods-refused",
        [],
    ),
    # images
    (pulling(NOT_FOUND), "image-missing", ["registry/kdist-trainer:1", "typo"]),
    (pulling(DENIED, "ErrImagePull"), "image-auth", ["imagePullSecrets"]),
    (pulling("401 Unauthorized", "ErrImagePull"), "image-auth", ["imagePullSecrets"]),
    (pulling(NO_HOST, "ErrImagePull"), "image-registry", ["not known"]),
    (
        pulling(
            'Failed to apply default image tag "a::b": couldn\'t parse image name',
            "InvalidImageName",
        ),
        "image-name",
        ["no valid name"],
    ),
    (
        pulling("dial tcp 10.0.0.1:443: i/o timeout", "ErrImagePull"),
        "image-registry",
        ["does not answer"],
    ),
    (
        pulling("tls: failed to verify certificate: x509: certificate signed by unknown authority"),
        "image-tls",
        ["certificate"],
    ),
    (pulling("no match for platform in manifest: not found"), "image-platform", ["processors"]),
    (pulling("toomanyrequests: You have reached your pull rate limit"), "image-limit", ["limit"]),
    (pulling("something nobody has seen"), "image", ["cannot be pulled"]),
    # volumes, Secrets, ConfigMaps
    (
        mounted('MountVolume.SetUp failed for volume "code" : configmap "digits-code-1" not found'),
        "mount",
        ["ConfigMap digits-code-1"],
    ),
    (
        mounted('MountVolume.SetUp failed for volume "s" : secret "token" not found'),
        "mount",
        ["Secret token"],
    ),
    (mounted(NFS), "mount", ["pvc-1", "Connection refused"]),
    (
        mounted(
            'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached',
            "FailedAttachVolume",
        ),
        "mount",
        ["one only"],
    ),
    (
        mounted(
            'MountVolume.MountDevice failed for volume "v" : driver name csi.x not found in the list of registered CSI drivers'
        ),
        "mount",
        ["lacks the storage driver csi.x"],
    ),
    (
        config_error('secret "wandb" not found'),
        "secret-missing",
        ["Secret wandb", "kubectl create secret generic wandb"],
    ),
    (config_error('configmap "digits" not found'), "configmap-missing", ["ConfigMap digits"]),
    (
        config_error("couldn't find key token in Secret ml/wandb"),
        "secret-missing",
        ["wandb has no key token"],
    ),
    (
        config_error(
            'container has runAsNonRoot and image will run as root (pod: "x", container: trainer)'
        ),
        "image-user",
        ["root"],
    ),
    # the program
    (
        scene(
            [
                pod(
                    0,
                    **waiting(
                        "RunContainerError", 'exec: "python": executable file not found in $PATH'
                    ),
                )
            ]
        ),
        "container-start",
        ["executable file not found"],
    ),
    # on its way
    (
        scene([creating()], event("Pulling", 'Pulling image "registry/kdist-trainer:1"', ago=300)),
        "slow-pull",
        ["5:00"],
    ),
    (
        scene([creating()], event("Pulling", 'Pulling image "registry/kdist-trainer:1"', ago=5)),
        "starting",
        [],
    ),
    (scene([], told=config_map(age=5), over=workload(age=5)), "starting", []),
    (
        scene([], over=workload(kind="TrainJob"), state=WorkloadState()),
        "operator-absent",
        ["TrainJob"],
    ),
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
    told = " ".join([found.sentence, found.fix, *found.evidence, *found.commands])
    assert [word for word in words if word not in told] == []
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
    said = MIXED.format(" {dedicated: }")
    seen = choosing(said, tainted("fast", "dedicated", disk="golden"), node("worker-1"))
    told = (
        "nodes have taints that the job does not tolerate; the others lack the labels of "
        "spec.nodeSelector"
    )
    assert seen.sentence.endswith(told)
    assert seen.fix.startswith("add the taint to spec.tolerations")


QUEUED = {
    **workload(),
    "metadata": {**workload()["metadata"], "labels": {"kueue.x-k8s.io/queue-name": "team-a"}},
}


def queued(reason: str, message: str, **more: str) -> Diagnosis:
    conditions = [
        {"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}
    ]
    conditions += [{"type": kind, "status": "True", "reason": why} for kind, why in more.items()]
    admission = {"metadata": {"name": "job-digits-1"}, "status": {"conditions": conditions}}
    return diagnose(
        scene([], state=WorkloadState(suspended=True), over=QUEUED, admission=admission)
    )


def test_a_queue_without_room_is_told_in_its_own_words() -> None:
    found = queued(
        "Pending",
        (
            "couldn't assign flavors to pod set main: insufficient unused quota for cpu in "
            "flavor default, 2 more needed"
        ),
    )
    assert (found.cause, found.severity) == ("queued", "waiting")
    assert "2 more needed" in found.sentence


def test_a_job_that_is_larger_than_its_queue_waits_in_vain() -> None:
    said = (
        "insufficient quota for cpu in flavor default, previously considered podsets requests "
        "(0) + current podset request (4) > "
    )
    found = queued(
        "Pending", f"couldn't assign flavors to pod set main: {said}maximum capacity (2)"
    )
    assert (found.cause, found.severity) == ("queue-too-small", "blocked")


def test_a_queue_that_does_not_exist_is_told_from_one_that_is_full() -> None:
    found = queued("Inadmissible", "LocalQueue team-a doesn't exist")
    assert (found.cause, found.commands) == ("queue-unusable", ("kubectl get localqueues -n ml",))


def test_a_job_that_was_preempted_by_its_queue_says_so() -> None:
    assert (
        "Preempted"
        in queued(
            "Pending", "Preempted to accommodate a higher priority Workload", Evicted="Preempted"
        ).sentence
    )


def test_a_queue_that_takes_no_notice_is_named() -> None:
    found = diagnose(scene([], state=WorkloadState(suspended=True), over=QUEUED))
    assert "Kueue may not run here" in found.sentence


def deployment(name: str, place: str, *, ready: int = 0, wanted: int = 0) -> Document:
    about = {"name": name, "namespace": place}
    return {
        "metadata": about,
        "spec": {"replicas": wanted},
        "status": {"readyReplicas": ready} if ready else {},
    }


JOBSET = deployment("jobset-controller-manager", "jobset-system")
TRAINER = deployment("kubeflow-trainer-controller-manager", "kubeflow-system", ready=1, wanted=1)


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_a_controller_that_is_seen_to_be_away_is_named_within_seconds(kind: str) -> None:
    made = workload(kind=kind, age=8)
    seen = scene(
        [], over=made, told=config_map(age=8), state=WorkloadState(), deployments=[TRAINER, JOBSET]
    )
    found = diagnose(seen)
    assert found.cause == "operator-absent"
    assert found.sentence == (
        f"nobody has made pods of the {kind} for 8.0 s: the controller of JobSet does not run: "
        "0 of 0 replicas of jobset-system/jobset-controller-manager are ready"
    )
    assert (
        found.commands[0]
        == "kubectl describe deployment jobset-controller-manager -n jobset-system"
    )
    unseen = scene([], over=made, told=config_map(age=8), state=WorkloadState())
    assert diagnose(unseen).cause == "starting", "it may need a moment"


def test_a_controller_that_may_not_be_seen_is_called_by_what_it_is_called_mostly() -> None:
    seen = scene([], over=workload(kind="PyTorchJob", age=40), state=WorkloadState())
    found = diagnose(seen)
    assert found.sentence.endswith(
        "its controller (a deployment called *training-operator*) may not run"
    )


def test_a_kueue_that_does_not_run_is_named_and_not_its_queue() -> None:
    kueue = deployment("kueue-controller-manager", "kueue-system", wanted=1)
    found = diagnose(
        scene([], state=WorkloadState(suspended=True), over=QUEUED, deployments=[kueue])
    )
    assert (found.cause, found.severity) == ("operator-absent", "blocked")
    assert "the controller of Kueue does not run: 0 of 1 replicas" in found.sentence


def test_a_volume_that_cannot_be_mounted_comes_before_an_image_that_is_slow() -> None:
    slow = event(
        "Pulling", 'Pulling image "registry/kdist-trainer:1"', name="digits-1-abcde", ago=400
    )
    found = diagnose(scene([creating(0), creating(1)], slow, event("FailedMount", NFS)))
    assert (found.cause, [each.cause for each in found.also]) == ("mount", ["slow-pull"])


def test_a_refusal_that_was_overcome_is_not_told() -> None:
    early = event("FailedCreate", QUOTA, kind="Job", ago=300)
    late = event("SuccessfulCreate", "Created pod: digits-0-abcde", kind="Job", ago=100)
    assert diagnose(scene([creating(0), creating(1)], early, late)).cause == "starting"


def test_a_trouble_of_a_pod_that_runs_by_now_is_not_told() -> None:
    assert (
        "mount" not in diagnose(scene([pod(0), pod(1)], event("FailedMount", NFS, ago=400))).cause
    )
