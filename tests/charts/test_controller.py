"""The controller as the chart installs it: the CRD, restricted pods, rights, and a network in which
it reaches the agents and nobody else reaches it.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kdist.crd import definition
from kdist_controller.__main__ import PORT
from tests.charts.rights_files import CONTROLLER
from tests.charts.rules import CHART, controller_alerts
from tests.charts.test_templates import OFF, OPERATOR, Helm, helm, of_kind, template
from tests.manifests.jobs import make, place
from tools.reference import rights

__all__ = ["helm", "template"]

ON = ("--set", "controller.enabled=true")
DEFINITION = CHART / "crd" / "trainingjobs.yaml"


def test_the_charts_crd_and_rights_are_fresh() -> None:
    how = "run: make generate"
    assert definition.text() == DEFINITION.read_text(), how
    assert CONTROLLER.read_text() == rights.controller_template(), how


@pytest.mark.e2e
def test_without_it_the_chart_needs_nothing_of_the_whole_cluster(template: Helm) -> None:
    of_the_cluster = {"CustomResourceDefinition", "ClusterRole", "Deployment"}
    assert not of_the_cluster & {each["kind"] for each in template(*OFF)}
    assert of_the_cluster <= {each["kind"] for each in template()}, "it is there by default"


@pytest.mark.e2e
def test_the_crd_is_the_models_and_stays_when_the_chart_goes(template: Helm) -> None:
    (found,) = of_kind(template(*ON), "CustomResourceDefinition")
    assert found["spec"] == yaml.safe_load(DEFINITION.read_text())["spec"]
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    without = template(*ON, "--set", "controller.installCRD=false")
    assert not of_kind(without, "CustomResourceDefinition")


@pytest.mark.e2e
def test_its_pods_meet_the_restricted_standard_and_spread_over_nodes(template: Helm) -> None:
    (deployment,) = of_kind(template(*ON), "Deployment")
    assert deployment["spec"]["replicas"] == 2
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["allowPrivilegeEscalation"] is False
    assert container["resources"]["limits"]["memory"]
    (port,) = container["ports"]
    assert port["containerPort"] == PORT
    assert f"--metrics-port={PORT}" in container["args"]
    selector = deployment["spec"]["selector"]["matchLabels"].items()
    assert selector <= deployment["spec"]["template"]["metadata"]["labels"].items()
    terms = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0]["podAffinityTerm"]["labelSelector"]["matchLabels"].items() == selector
    (budget,) = of_kind(template(*ON), "PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"].items() == selector


@pytest.mark.e2e
@pytest.mark.parametrize("namespaces", [[], ["ml", "research"]], ids=["all", "some"])
def test_its_rights_are_those_of_the_table_where_it_looks_after_jobs(
    template: Helm, namespaces: list[str]
) -> None:
    watched = [f"controller.watchNamespaces={{{','.join(namespaces)}}}"] if namespaces else []
    objects = template(*ON, *(part for each in watched for part in ("--set", each)))
    named = [
        each
        for each in [*of_kind(objects, "Role"), *of_kind(objects, "ClusterRole")]
        if "controller" in each["metadata"]["name"]
    ]
    roles = {(each["kind"], each["metadata"].get("namespace")): each["rules"] for each in named}
    leases = {("Role", "kube-node-lease"), ("ClusterRole", None)}
    assert set(roles) - {("Role", "ml")} == {
        *leases,
        *(("Role", each) for each in namespaces if each != "ml"),
    }
    jobs = [rule for rule in roles["ClusterRole", None] if "jobs" in rule["resources"]]
    assert bool(jobs) is not bool(namespaces)
    for rules in roles.values():
        for rule in rules:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])


@pytest.mark.e2e
def test_it_reaches_the_agents_of_every_job_and_they_let_it_in(template: Helm) -> None:
    objects = template(*ON)
    (deployment,) = of_kind(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (own,) = [
        each
        for each in of_kind(objects, "NetworkPolicy")
        if each["metadata"]["name"] == "kdist-controller"
    ]
    assert own["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    manifests = [each.document for each in place(make(), "job")]
    (policy,) = of_kind(manifests, "NetworkPolicy")
    assert admits(policy, labels, 9401)
    assert not admits(policy, {"app.kubernetes.io/name": "other"}, 9401)
    (service,) = of_kind(manifests, "Service")
    pods = service["spec"]["selector"]
    trainings = {"app.kubernetes.io/name": "kdist", "app.kubernetes.io/component": "training"}
    out = [rule for rule in own["spec"]["egress"] if "to" in rule]
    assert [rule["to"][0]["podSelector"]["matchLabels"] for rule in out] == [trainings]
    assert pods


def admits(policy: dict[str, Any], labels: dict[str, str], port: int) -> bool:
    """Whether a policy lets a pod of another namespace, which has no labels of its own, in."""
    return any(
        peer["podSelector"]["matchLabels"].items() <= labels.items()
        for rule in policy["spec"]["ingress"]
        if any(each["port"] == port for each in rule.get("ports", ()))
        for peer in rule["from"]
        if peer.get("namespaceSelector") == {} and "podSelector" in peer
    )


@pytest.mark.e2e
def test_its_alerts_come_with_it_and_link_to_their_runbooks(template: Helm) -> None:
    (rule,) = of_kind(template(*ON, *OPERATOR), "PrometheusRule")
    found = {one.get("alert"): one for group in rule["spec"]["groups"] for one in group["rules"]}
    assert set(controller_alerts()) <= set(found)
    for name, each in controller_alerts().items():
        assert found[name] == each
    (rule,) = of_kind(template(*OFF, *OPERATOR), "PrometheusRule")
    names = {one.get("alert") for group in rule["spec"]["groups"] for one in group["rules"]}
    assert not names & set(controller_alerts())
