"""The Helm chart as Helm 3 and 4 render it: closed values, least rights, restricted pods, rules and
dashboards untouched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist.render import find_pods
from kdist_trainer.config import TrainConfig
from tests.charts.rules import CHART, alerts, read_rules
from tests.manifests.jobs import make, place

VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
OPERATOR = ("--api-versions", "monitoring.coreos.com/v1")
OFF = ("--set", "controller.enabled=false")
BUILT = Path(os.environ.get("KDIST_CLUSTER_CACHE", Path.home() / ".cache/kdist-cluster")) / "bin"

pytestmark = pytest.mark.e2e  # where Helm is built
Helm = Callable[..., list[dict[str, Any]]]


def find_program(name: str) -> str:
    """Where the cluster's tools put a program; a test that needs it is skipped where it is not,
    except in CI.
    """
    found = shutil.which(name, path=f"{BUILT}:{os.environ['PATH']}")
    if found is None:
        absent = pytest.fail if os.environ.get("CI") else pytest.skip
        absent(f"{name} is not here: `tests/cluster/cluster build` builds it")
    return found


@pytest.fixture(params=["helm", "helm3"])
def helm(request: pytest.FixtureRequest) -> str:
    """Helm 4 and Helm 3, as they were built with the cluster's tools."""
    return find_program(str(request.param))


@pytest.fixture
def template(helm: str) -> Helm:
    def render_chart(*args: str) -> list[dict[str, Any]]:
        done = call(helm, "template", "kdist", str(CHART), "--namespace", "ml", *args)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return render_chart


def call(helm: str, *args: str) -> subprocess.CompletedProcess[str]:
    # a Helm that was built without its release's settings takes an old one for granted
    version = ["--kube-version", "1.36.0"]
    return subprocess.run(
        [helm, *args, *version], capture_output=True, text=True, check=False, timeout=120
    )


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_helm_finds_nothing_to_complain_of(helm: str, values: Path) -> None:
    done = call(helm, "lint", "--strict", str(CHART), "--values", str(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_every_object_is_labelled_and_stays_in_its_namespace(template: Helm, values: Path) -> None:
    objects = template("--values", str(values), *OPERATOR)
    names = [
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in objects
    ]
    assert len(set(names)) == len(names)
    has_controller = bool(of_kind(objects, "Deployment"))
    for each in objects:
        if each["metadata"]["name"] == "kdist-note":
            continue  # the user's own
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "kdist"
        assert labels["app.kubernetes.io/instance"] == "kdist"
        allowed = {None, "ml", "research", "kube-node-lease"} if has_controller else {"ml"}
        assert each["kind"] == "ClusterRole" or each["metadata"].get("namespace") in allowed
        closed = {"ClusterRoleBinding", "CustomResourceDefinition"}
        assert each["kind"] not in {"Secret", *(() if has_controller else closed)}


def test_values_that_are_not_known_or_not_possible_are_refused(helm: str) -> None:
    for wrong in (
        "monitoring.podmonitor.enabled=always",
        "monitoring.podMonitor.enabled=yes",
        "monitoring.podMonitor.interval=fast",
        "rbac.scope=everything",
        "rbac.view[0].kind=Group,rbac.view[0].name=system:authenticated",
        "image.digest=sha256:12",
        "unknown=1",
    ):
        done = call(helm, "template", "kdist", str(CHART), "--set", wrong)
        assert done.returncode != 0, wrong


def test_rules_reach_the_cluster_as_promtool_tried_them(template: Helm) -> None:
    every = template(*OPERATOR, *OFF, "--set", "monitoring.prometheusRule.disabled=null")
    (rule,) = of_kind(every, "PrometheusRule")
    assert [one for group in rule["spec"]["groups"] for one in group["rules"]] == read_rules()
    (rule,) = of_kind(template(*OPERATOR, *OFF), "PrometheusRule")
    found = [one for group in rule["spec"]["groups"] for one in group["rules"]]
    kept = {one["alert"] for one in found if "alert" in one}
    assert kept == set(alerts()) - {"KdistLossSpike"}


def test_links_of_alerts_lead_to_the_addresses_that_were_given(template: Helm) -> None:
    objects = template("--values", str(CHART / "ci/everything-values.yaml"), *OFF)
    (rule,) = of_kind(objects, "PrometheusRule")
    runbook = "https://example.org/runbooks#"
    dashboard = "https://grafana.example.org/d/kdist-training-job?"
    for group in rule["spec"]["groups"]:
        for one in group["rules"]:
            if "alert" in one:
                assert one["annotations"]["runbook_url"] == f"{runbook}{one['alert'].lower()}"
                assert one["annotations"]["dashboard"].startswith(dashboard)


def test_dashboards_come_as_they_are_and_nothing_is_fetched(template: Helm) -> None:
    maps = of_kind(template(), "ConfigMap")
    found = [each for each in maps if "dashboard" in each["metadata"]["name"]]
    assert len(found) == 2
    for each in found:
        ((key, text),) = each["data"].items()
        assert text == (CHART / "dashboards" / key).read_text()
        assert not key.endswith(".url")
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_without_the_operators_nothing_is_made_that_the_cluster_does_not_know(
    template: Helm,
) -> None:
    queue = ("--set", "kueue.queues[0].name=a", "--set", "kueue.queues[0].clusterQueue=b")
    kinds = {each["kind"] for each in template(*queue)}
    assert not kinds & {"PodMonitor", "PrometheusRule", "LocalQueue"}
    known = (*OPERATOR, "--api-versions", "kueue.x-k8s.io/v1beta1")
    kinds = {each["kind"] for each in template(*queue, *known)}
    assert kinds >= {"PodMonitor", "PrometheusRule", "LocalQueue"}


def test_roles_hold_what_kdist_does_and_not_more(template: Helm) -> None:
    objects = template("--values", str(CHART / "ci/everything-values.yaml"), *OFF)
    roles = {
        each["metadata"]["name"].rsplit("-", 1)[1]: each["rules"]
        for each in of_kind(objects, "Role")
    }
    assert set(roles) == {"view", "edit", "scraper"}
    look = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    assert roles["scraper"] == [look]
    assert not [rule for rule in roles["view"] if set(rule["verbs"]) - {"get", "list", "watch"}]
    key = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}
    closed = {"secrets", "nodes", "namespaces", "serviceaccounts/token"}
    for rule in [*roles["view"], *roles["edit"]]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert rule == key or not closed & set(rule["resources"])
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])
    bound = {
        each["metadata"]["name"]: each["subjects"][0]["name"]
        for each in of_kind(objects, "RoleBinding")
    }
    assert bound == {"kdist-view": "readers", "kdist-edit": "ada", "kdist-scraper": "kdist-scraper"}


def test_roles_of_the_cluster_add_workloads_to_view_and_edit_and_bind_nobody(
    template: Helm,
) -> None:
    objects = template("--values", str(CHART / "ci/cluster-values.yaml"))
    assert {each["kind"] for each in objects} >= {"ClusterRole"}
    workloads = {"jobs", "jobsets", "pytorchjobs", "statefulsets", "trainingruntimes", "trainjobs"}
    own = "ml-kdist-controller"
    for each in of_kind(objects, "ClusterRole"):
        if each["metadata"]["name"] == own:
            continue
        who = each["metadata"]["name"].rsplit("-", 1)[1]
        assert each["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{who}"] == "true"
        named = {resource for rule in each["rules"] for resource in rule["resources"]}
        scale = {"trainingjobs/scale"} if who == "edit" else set()
        assert named == {*workloads, "trainingjobs", *scale}
    bound = of_kind(objects, "RoleBinding") + of_kind(objects, "ClusterRoleBinding")
    assert {each["metadata"]["name"] for each in bound} == {own, f"{own}-leases"}


def test_the_controller_alone_is_held_to_giving_up_pods(template: Helm) -> None:
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    without = template(*OFF)
    assert not [each for each in without if each["kind"] in kinds]
    objects = template()
    ((policy,), (binding,)) = (of_kind(objects, kind) for kind in kinds)
    assert policy["spec"]["failurePolicy"] == "Fail"
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["operations"], rule["resources"]) == (["UPDATE"], ["pods/status"])
    (condition,) = policy["spec"]["matchConditions"]
    account = '"system:serviceaccount:ml:kdist-controller"'
    assert condition["expression"] == f"request.userInfo.username == {account}"
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Deny"]


def test_test_pods_meet_the_restricted_standard(template: Helm) -> None:
    pods = of_kind(template(), "Pod")
    assert len(pods) == 2
    for pod in pods:
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]["limits"]["memory"]
        expected = "before-hook-creation,hook-succeeded"
        assert pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == expected


def test_the_policy_of_helm_test_lets_nothing_in_and_is_for_the_test_pods_alone(
    template: Helm,
) -> None:
    objects = template("--set", "networkPolicy.defaultDeny=true,nameOverride=other")
    policies = of_kind(objects, "NetworkPolicy")
    (policy,) = [each for each in policies if each["metadata"]["name"].endswith("-test")]
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in of_kind(objects, "Pod"))
    assert selected >= {("app.kubernetes.io/component", "platform")}  # a training's is another
    assert "ingress" not in policy["spec"]
    assert policy["spec"]["egress"] == [{}]


def test_the_training_of_helm_test_is_one_that_the_trainer_reads(template: Helm) -> None:
    (config,) = [each for each in of_kind(template(), "ConfigMap") if "train.json" in each["data"]]
    read = TrainConfig.model_validate_json(config["data"]["train.json"])
    assert read.procs_per_node == 2


def test_labels_for_all_objects_repeat_no_key_and_change_none_that_policies_select_by(
    template: Helm,
) -> None:
    labels = (
        r"commonLabels.app\.kubernetes\.io/component=mine,commonLabels.team=ml,"
        "monitoring.podMonitor.labels.team=vision"
    )
    objects = template("--set", f"{labels},monitoring.podMonitor.enabled=always")
    components = {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in objects}
    assert components == {"platform"}
    teams = {each["kind"]: each["metadata"]["labels"]["team"] for each in objects}
    assert teams.pop("PodMonitor") == "vision"
    assert set(teams.values()) == {"ml"}


def test_the_chart_can_be_part_of_another(helm: str, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    shutil.copytree(CHART, parent / "charts" / "kdist")
    dependency = {"name": "kdist", "version": "0.2.0-dev.0", "condition": "kdist.enabled"}
    chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency]}
    (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
    shared: dict[str, Any] = {"imageRegistry": "r:5000/", "storageClass": "fast"}
    shared["imagePullSecrets"] = ["pull", {"name": "other"}]
    values = {"global": shared, "kdist": {"enabled": True}}
    (parent / "values.yaml").write_text(yaml.safe_dump(values))
    done = call(helm, "template", "release", str(parent))
    assert done.returncode == 0, done.stderr
    pods = of_kind([each for each in yaml.safe_load_all(done.stdout) if each], "Pod")
    images = {pod["spec"]["containers"][0]["image"] for pod in pods}
    assert images == {"r:5000/kdist-trainer:0.2.0.dev0"}
    secrets = [{"name": "pull"}, {"name": "other"}]
    assert [pod["spec"]["imagePullSecrets"] for pod in pods] == [secrets] * 2
    done = call(helm, "template", "release", str(parent), "--set", "kdist.enabled=false")
    assert (done.returncode, done.stdout.strip()) == (0, "")


def test_further_objects_are_sent_as_documents_or_as_text(template: Helm, tmp_path: Path) -> None:
    metadata = {"name": "{{ .Release.Name }}-note"}
    note = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    text = "apiVersion: v1\nkind: Secret\nmetadata:\n  name: {{ .Release.Namespace }}-text\n"
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"extraObjects": [note, text]}))
    objects = template("--values", str(tmp_path / "values.yaml"))
    names = {each["metadata"]["name"] for each in objects}
    assert {"kdist-note", "ml-text"} <= names


def test_the_test_pods_are_judged_as_the_pods_of_trainings(template: Helm) -> None:
    (training,) = [pod for each in place(make(), "job") for pod in find_pods(each.document)]
    for pod in of_kind(template(), "Pod"):
        assert pod["spec"]["securityContext"] == training["spec"]["securityContext"]
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"] == training["spec"]["containers"][0]["securityContext"]


def test_default_deny_closes_all_but_names(template: Helm) -> None:
    objects = template("--set", "networkPolicy.defaultDeny=true")
    policies = of_kind(objects, "NetworkPolicy")
    (policy,) = [each for each in policies if each["metadata"]["name"].endswith("default-deny")]
    assert policy["spec"]["podSelector"] == {}
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy["spec"]
    assert [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]] == [53, 53]


def test_a_digest_and_a_registry_make_the_image(template: Helm) -> None:
    pods = of_kind(template("--set", "global.imageRegistry=r:5000/"), "Pod")
    images = {pod["spec"]["containers"][0]["image"] for pod in pods}
    assert images == {"r:5000/kdist-trainer:0.2.0.dev0"}


@pytest.mark.parametrize("asked", ["true", "false"])
def test_series_bear_the_name_of_their_node_only_where_it_is_asked_for(
    template: Helm, asked: str
) -> None:
    chosen = f"monitoring.podMonitor.enabled=always,monitoring.podMonitor.nodeLabel={asked}"
    (monitor,) = [each for each in template("--set", chosen, *OFF) if each["kind"] == "PodMonitor"]
    (endpoint, *_) = monitor["spec"]["podMetricsEndpoints"]
    written = {each["targetLabel"] for each in endpoint["relabelings"]}
    assert written == {"job", "kdist_job", *(["node"] if asked == "true" else [])}
    assert "attachMetadata" not in monitor["spec"]  # it would need the right to read nodes


@pytest.mark.parametrize("scope", ["namespace", "cluster"])
def test_the_roles_of_a_release_without_a_controller_have_rights_on_training_jobs(
    template: Helm, scope: str
) -> None:
    objects = template("--set", f"controller.enabled=false,rbac.scope={scope}")
    kind = "Role" if scope == "namespace" else "ClusterRole"
    verbs = {
        each["metadata"]["name"].rpartition("-")[2]: {
            verb
            for rule in each["rules"]
            if "trainingjobs" in rule["resources"]
            for verb in rule["verbs"]
        }
        for each in of_kind(objects, kind)
    }
    assert verbs["view"] == {"get", "list", "watch"}
    assert {"create", "patch", "delete"} <= verbs["edit"]


@pytest.mark.parametrize(
    ("values", "selected"),
    [
        ("controller.enabled=true", {"any": True}),
        ("controller.enabled=false", {"matchNames": ["ml"]}),
        ("controller.watchNamespaces={a,b}", {"matchNames": ["ml", "a", "b"]}),
        (
            "controller.enabled=false,controller.watchNamespaces={a}",
            {"matchNames": ["ml"]},
        ),
        ("monitoring.podMonitor.namespaces={c}", {"matchNames": ["c"]}),
    ],
)
def test_the_pod_monitor_finds_the_trainings_that_the_controller_looks_after(
    template: Helm, values: str, selected: dict[str, Any]
) -> None:
    objects = template("--set", f"monitoring.podMonitor.enabled=always,{values}")
    found = {
        each["metadata"]["name"]: each["spec"].get("namespaceSelector")
        for each in of_kind(objects, "PodMonitor")
    }
    assert found["kdist"] == selected, "the other one is the controller's own"


def test_no_role_of_the_chart_reads_secrets_and_view_runs_nothing(template: Helm) -> None:
    for scope in ("namespace", "cluster"):
        for role in (
            each
            for each in template("--set", f"rbac.scope={scope}")
            if each["kind"] in ("Role", "ClusterRole")
        ):
            for rule in role["rules"]:
                if "secrets" in rule["resources"]:
                    assert rule["verbs"] == ["create"], role["metadata"]["name"]
                if role["metadata"]["name"].endswith("-view"):
                    assert set(rule["verbs"]) <= {"get", "list", "watch"}
                    assert not {"pods/exec", "pods/portforward", "pods/attach"} & {
                        *rule["resources"]
                    }
