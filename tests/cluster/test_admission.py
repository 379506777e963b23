"""Pods that the API server refuses to make: `kdist why` names who refuses them and what helps, on
every workload kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kdist import deploy
from kdist.job_file import load_file
from kdist.render import text
from tests.cluster.conftest import Job
from tests.cluster.kinds import RESOURCE
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

POLICY = "admissionregistration.k8s.io/v1"
PODS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}


def send(namespace: Namespace, document: dict[str, Any]) -> None:
    namespace.send("apply", "--server-side", stdin=json.dumps(document))


def only_in(namespace: Namespace) -> dict[str, Any]:
    """A selector of this namespace alone, for what is otherwise asked of the whole cluster."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}}


@pytest.fixture
def deaf_webhook(namespace: Namespace) -> Iterator[str]:
    """An admission webhook for the pods of this namespace, with nobody behind its service."""
    name = f"deaf.{namespace.name}.example.com"
    service = {"namespace": namespace.name, "name": "nobody", "path": "/"}
    hook = {
        "name": name,
        "clientConfig": {"service": service},
        "rules": [PODS],
        **only_in(namespace),
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "timeoutSeconds": 1,
        "admissionReviewVersions": ["v1"],
    }
    kind = "ValidatingWebhookConfiguration"
    send(
        namespace,
        {
            "apiVersion": POLICY,
            "kind": kind,
            "metadata": {"name": namespace.name},
            "webhooks": [hook],
        },
    )
    yield name
    namespace.kubectl("delete", kind, namespace.name)


@pytest.fixture
def policy(namespace: Namespace) -> Iterator[str]:
    """An admission policy of this namespace that admits no pods without a cost centre."""
    name, kind = namespace.name, "ValidatingAdmissionPolicy"
    rule = {
        "expression": "has(object.metadata.labels.costCentre)",
        "message": "pods need the label costCentre",
    }
    constraints = {"resourceRules": [PODS], **only_in(namespace)}
    spec: dict[str, Any] = {
        "failurePolicy": "Fail",
        "matchConstraints": constraints,
        "validations": [rule],
    }
    send(namespace, {"apiVersion": POLICY, "kind": kind, "metadata": {"name": name}, "spec": spec})
    binding = {"policyName": name, "validationActions": ["Deny"]}
    send(
        namespace,
        {
            "apiVersion": POLICY,
            "kind": f"{kind}Binding",
            "metadata": {"name": name},
            "spec": binding,
        },
    )
    yield name
    namespace.kubectl("delete", f"{kind}Binding", name)
    namespace.kubectl("delete", kind, name)


def apply_every_kind(namespace: Namespace, job: Job, kinds: list[str], **spec: Any) -> None:
    """Send one job of each kind, each named as its kind."""
    write_every_kind(namespace, job, kinds, **spec)
    namespace.kdist("apply", "jobs")


def write_every_kind(namespace: Namespace, job: Job, kinds: list[str], **spec: Any) -> None:
    """A file in the folder `jobs` for each kind."""
    folder = namespace.home / "jobs"
    folder.mkdir()
    for kind in kinds:
        document = job(backend=kind, checkpoints=None, **spec) | {
            "metadata": {"name": kind, "namespace": namespace.name}
        }
        namespace.write(document, f"jobs/{kind}.yaml")


def expect(namespace: Namespace, job: str, cause: str, *words: str) -> None:
    """Ask until the cause is named first; it blocks, and sentence, evidence, way out and next
    command hold these words.
    """
    answers: list[dict[str, Any]] = []

    def is_named() -> bool:
        answers.append(json.loads(namespace.kdist("why", job, "-o", "json")))
        return bool(answers[-1]["cause"] == cause)

    assert namespace.wait_until(is_named, seconds=90), answers[-1]
    answer = answers[-1]
    assert answer["severity"] == "blocked"
    assert answer["evidence"]
    assert answer["fix"]
    assert answer["commands"]
    assert [word for word in words if word not in json.dumps(answer)] == []


@pytest.mark.sampled
def test_pod_security_that_refuses_is_named_with_what_it_complains_of(
    namespace: Namespace, job: Job
) -> None:
    """`kdist apply` refuses it before anything is made, and what other hands send is explained."""
    write_every_kind(namespace, job, list(RESOURCE), podTemplate={"spec": {"hostNetwork": True}})
    for kind in RESOURCE:
        refused = namespace.type_kdist("apply", f"jobs/{kind}.yaml")
        assert (
            "enforces Pod Security `restricted`, which rejects the job's pods: host namespaces"
            in refused.stderr
        )
        assert namespace.find("configmap", "kdist.dev/job") == []
    for kind in RESOURCE:
        file = namespace.home / "jobs" / f"{kind}.yaml"
        rendered = deploy.make_plan(None, load_file(str(file)), base=file.parent).manifests
        namespace.send("apply", "--server-side", stdin=text.to_yaml(rendered))
    for kind in RESOURCE:
        expect(
            namespace,
            kind,
            "pod-security",
            "hostNetwork=true",
            "restricted",
            "spec.podTemplate",
            "--show-labels",
        )
        assert namespace.status(kind)["phase"] == "Pending"


@pytest.mark.sampled
@pytest.mark.needs("whole-cluster")
def test_a_webhook_that_is_away_is_named_with_where_it_is_configured(
    namespace: Namespace, job: Job, deaf_webhook: str
) -> None:
    apply_every_kind(namespace, job, list(RESOURCE))
    for kind in RESOURCE:
        expect(namespace, kind, "webhook-away", deaf_webhook, "validatingwebhookconfigurations")


@pytest.mark.wide
@pytest.mark.needs("whole-cluster")
def test_an_admission_policy_that_refuses_is_named_with_its_message(
    namespace: Namespace, job: Job, policy: str
) -> None:
    apply_every_kind(namespace, job, list(RESOURCE))
    for kind in RESOURCE:
        expect(namespace, kind, "policy-refused", policy, "pods need the label costCentre")
