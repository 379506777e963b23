"""`podTemplate`: merged as Kubernetes merges, by names; and it cannot break what the other parts of
kdist rely on.
"""

from __future__ import annotations

from typing import Any

import pytest

from kdist import backends
from kdist.errors import KdistError
from kdist.render import Placement, find_pods, warn
from tests.manifests.jobs import make, place

KINDS = pytest.mark.parametrize("backend", backends.NAMES)


def find_pod(overlay: dict[str, Any], backend: str = "job", **spec: Any) -> dict[str, Any]:
    objects = place(make(podTemplate=overlay, **spec), backend)
    return next(pod for each in objects for pod in find_pods(each.document))


def find_trainer(overlay: dict[str, Any], backend: str = "job") -> dict[str, Any]:
    name = backends.get(backend).container
    return next(
        each for each in find_pod(overlay, backend)["spec"]["containers"] if each["name"] == name
    )


@KINDS
def test_the_trainer_is_called_so_whatever_the_kind_calls_it(backend: str) -> None:
    overlay = {
        "spec": {
            "containers": [
                {"name": "trainer", "env": [{"name": "A", "value": "1"}], "command": ["/init"]}
            ]
        }
    }
    plain, changed = find_trainer({}, backend), find_trainer(overlay, backend)
    assert changed.pop("command") == ["/init"]
    assert changed["env"].pop() == {"name": "A", "value": "1"}
    assert changed["args"].pop(2) != plain["args"].pop(2), (
        "the agents of another template meet by themselves"
    )
    assert changed == plain
    assert len(find_pod(overlay, backend)["spec"]["containers"]) == 1


def test_named_things_are_merged_by_their_names_and_others_replaced() -> None:
    overlay: dict[str, Any] = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "volumes": [
                {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
                {"name": "more", "emptyDir": {}},
            ],
            "containers": [
                {"name": "trainer", "volumeMounts": [{"name": "more", "mountPath": "/more"}]}
            ],
            "tolerations": [{"operator": "Exists"}],
        },
    }
    plain, changed = find_pod({}), find_pod(overlay)
    assert changed["metadata"]["annotations"] == {**plain["metadata"]["annotations"], "a": "b"}
    volumes = {each["name"]: each for each in changed["spec"]["volumes"]}
    assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "1Gi"}
    assert list(volumes) == [*(each["name"] for each in plain["spec"]["volumes"]), "more"]
    assert changed["spec"]["containers"][0]["volumeMounts"][-1]["mountPath"] == "/more"
    assert changed["spec"]["tolerations"] == [{"operator": "Exists"}]


@pytest.mark.parametrize("own", [[], [{"topologyKey": "zone"}]])
def test_required_terms_of_affinity_are_added_to_the_one_that_kdist_needs(own: list[Any]) -> None:
    rules = {"requiredDuringSchedulingIgnoredDuringExecution": own}
    overlay = {"spec": {"affinity": {"podAntiAffinity": rules, "nodeAffinity": {"a": "b"}}}}
    affinity = find_pod(overlay)["spec"]["affinity"]
    first, *others = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert first["labelSelector"]["matchLabels"] == {"kdist.dev/avoid": "digits"}
    assert others == own
    assert affinity["nodeAffinity"] == {"a": "b"}
    assert "affinity" not in find_pod({"spec": {"affinity": None}})["spec"]


def test_null_takes_a_field_away() -> None:
    context = find_pod({"spec": {"securityContext": {"fsGroup": None}}})["spec"]["securityContext"]
    assert "fsGroup" not in context
    assert context["runAsNonRoot"] is True


def in_trainer(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


BREAKING: list[tuple[dict[str, Any], str]] = [
    (
        {"metadata": {"labels": {"app.kubernetes.io/instance": "other"}}},
        "metadata.labels.app.kubernetes.io/instance",
    ),
    (
        {"metadata": {"annotations": {"kubectl.kubernetes.io/default-container": None}}},
        "metadata.annotations.kubectl.kubernetes.io/default-container",
    ),
    (
        {"spec": {"restartPolicy": "OnFailure"}},
        "spec.restartPolicy, which belongs to the workload kind",
    ),
    ({"spec": {"serviceAccountName": "admin"}}, "spec.serviceAccountName"),
    (
        {"spec": {"terminationGracePeriodSeconds": 1}},
        "spec.terminationGracePeriodSeconds, which is the field of the same name of spec",
    ),
    ({"spec": {"containers": None}}, "the container's args"),
    (
        {"spec": {"volumes": [{"name": "config", "configMap": {"name": "other"}}]}},
        "the volume config",
    ),
    (in_trainer(args=["--help"]), "the container's args: change the job's own fields instead"),
    (
        in_trainer(env=[{"name": "KDIST_POD", "value": "a", "valueFrom": None}]),
        "the variable KDIST_POD",
    ),
    (
        in_trainer(volumeMounts=[{"mountPath": "/run/kdist", "readOnly": True}]),
        "the mount at /run/kdist",
    ),
    (in_trainer(ports=[{"containerPort": 9401, "name": "web"}]), "the port metrics"),
    (in_trainer(terminationMessagePath="/tmp/x"), "terminationMessagePath"),  # noqa: S108
]


@KINDS
@pytest.mark.parametrize(("overlay", "what"), BREAKING, ids=[what for _, what in BREAKING])
def test_what_kdist_needs_is_not_changed_in_silence(
    backend: str, overlay: dict[str, Any], what: str
) -> None:
    with pytest.raises(KdistError) as error:
        find_pod(overlay, backend)
    assert f"spec.podTemplate must not change {what}" in error.value.message


def test_every_breach_is_reported_at_once() -> None:
    with pytest.raises(KdistError) as error:
        find_pod({"spec": {"restartPolicy": "OnFailure", "serviceAccountName": "admin"}})
    assert error.value.message.count("must not change") == 2


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"containers": []}, "takes metadata and spec, found 'containers'"),
        ({"spec": []}, r"spec\.podTemplate\.spec: must be a mapping, found a list"),
        (
            {"spec": {"volumes": {"a": 1}}},
            r"spec\.podTemplate\.spec\.volumes: must be a list, found a mapping",
        ),
        (
            {"spec": {"containers": [{"image": "a"}]}},
            r"spec\.podTemplate\.spec\.containers\[0\]: needs its name, by which it is merged",
        ),
        (
            {"spec": {"containers": ["a"]}},
            r"spec\.podTemplate\.spec\.containers\[0\]: must be a mapping, found a value",
        ),
        (
            {"spec": {"volumes": [{"$patch": "replace"}]}},
            r"does not support directives .*: spec\.podTemplate\.spec\.volumes\[0\]\.\$patch",
        ),
        (
            {"spec": {"$retainKeys": ["a"], "affinity": {"$patch": "delete"}}},
            r"spec\.\$retainKeys, .*affinity\.\$patch",
        ),
    ],
)
def test_an_overlay_that_cannot_be_laid_is_refused(overlay: dict[str, Any], message: str) -> None:
    with pytest.raises(KdistError, match=message):
        find_pod(overlay)


def test_an_overlay_that_a_restricted_namespace_refuses_is_warned_of() -> None:
    placement = Placement("job", "kubernetes", "c0ffee00")
    found = warn(make(podTemplate={"spec": {"hostNetwork": True}}), placement)
    assert (
        "Pod Security `restricted` rejects the pods because of podTemplate: "
        "hostNetwork is not allowed"
    ) in found
    assert not [
        each
        for each in warn(make(podTemplate={"spec": {"hostname": "a"}}), placement)
        if "restricted" in each
    ]


def test_a_sidecar_that_never_ends_is_warned_of() -> None:
    overlay = {"spec": {"containers": [{"name": "proxy", "image": "a"}, {"name": "trainer"}]}}
    (found,) = [
        each for each in backends.get("job").warnings(make(podTemplate=overlay)) if "proxy" in each
    ]
    assert "initContainers with restartPolicy Always" in found
