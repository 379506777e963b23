"""What kube-linter looks for in Kubernetes objects, under its names, where it is not built; each
check yields what is wrong.

Left out is what neither the chart nor kdist makes (Ingresses, autoscalers), and what
kube-linter.yaml exempts. kube-linter itself runs in test_linter.py; these take milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kdist.backends import RUNTIME, workload_kinds

Document = dict[str, Any]
Check = Callable[[list[Document]], Iterator[str]]

_MAY_CREATE_PODS = "ignore-check.kube-linter.io/access-to-create-pods"
_WORKLOAD_KINDS = {"Deployment", "Pod", RUNTIME, *(kind for _, kind in workload_kinds())}
_SENSITIVE = ("PASSWORD", "SECRET", "TOKEN", "API_KEY")
_LARGEST_SAFE_PORT = 1024


def name(document: Document) -> str:
    """Kind and name, for messages."""
    return f"{document['kind']}/{document['metadata']['name']}"


def templates(objects: list[Document]) -> Iterator[tuple[str, Document]]:
    """Every pod, or template of pods, with its metadata and spec, and whose it is."""

    def walk(value: Any, whose: str) -> Iterator[tuple[str, Document]]:
        if isinstance(value, dict):
            spec = value.get("spec")
            if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
                yield whose, value
            else:
                for inner in value.values():
                    yield from walk(inner, whose)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner, whose)

    for document in objects:
        if document["kind"] in _WORKLOAD_KINDS:
            yield from walk(document, name(document))


def containers(objects: list[Document]) -> Iterator[tuple[str, Document, Document]]:
    """Every container with its pod's spec, and whose it is; a container without an image is a patch
    of one.
    """
    for whose, template in templates(objects):
        for container in [
            *template["spec"].get("initContainers", []),
            *template["spec"]["containers"],
        ]:
            if "image" in container:
                yield f"{whose} {container['name']}", template["spec"], container


def latest_tag(objects: list[Document]) -> Iterator[str]:
    """An image without a tag or digest, or with `latest`."""
    for whose, _, container in containers(objects):
        tag = container["image"].rpartition("/")[2].partition(":")[2]
        if "@sha256:" not in container["image"] and tag in ("", "latest"):
            yield f"{whose}: {container['image']}"


def run_as_non_root(objects: list[Document]) -> Iterator[str]:
    """A container that may be root."""
    for whose, pod, container in containers(objects):
        if not {**pod.get("securityContext", {}), **container.get("securityContext", {})}.get(
            "runAsNonRoot"
        ):
            yield whose


def no_read_only_root_fs(objects: list[Document]) -> Iterator[str]:
    """A container that may write to its image's files."""
    for whose, _, container in containers(objects):
        if not container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            yield whose


def privilege_escalation_container(objects: list[Document]) -> Iterator[str]:
    """A container that may gain rights, is privileged, or keeps capabilities."""
    for whose, _, container in containers(objects):
        context = container.get("securityContext", {})
        dropped = context.get("capabilities", {}).get("drop")
        if (
            context.get("allowPrivilegeEscalation") is not False
            or context.get("privileged")
            or dropped != ["ALL"]
        ):
            yield whose


def unset_requirements(objects: list[Document]) -> Iterator[str]:
    """A container without requests of CPU and memory, or without a limit of memory."""
    for whose, _, container in containers(objects):
        resources = container.get("resources", {})
        if not {"cpu", "memory"} <= set(
            resources.get("requests", {})
        ) or "memory" not in resources.get("limits", {}):
            yield whose


def host_namespaces(objects: list[Document]) -> Iterator[str]:
    """A pod in its node's namespaces, or with its node's files."""
    for whose, template in templates(objects):
        spec = template["spec"]
        if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")) or any(
            "hostPath" in v for v in spec.get("volumes", [])
        ):
            yield whose


def env_var_secret(objects: list[Document]) -> Iterator[str]:
    """A variable that sounds like a secret and has a plain value, or one that is set twice."""
    for whose, _, container in containers(objects):
        variables = container.get("env", [])
        yield from (
            f"{whose}: {key} twice"
            for key, count in Counter(each["name"] for each in variables).items()
            if count > 1
        )
        for each in variables:
            if any(word in each["name"] for word in _SENSITIVE) and each.get("value"):
                yield f"{whose}: {each['name']}"


def non_existent_ports(objects: list[Document]) -> Iterator[str]:
    """A probe of a port that the container has not, or a port that only root may open."""
    for whose, _, container in containers(objects):
        known = {
            value
            for port in container.get("ports", [])
            for value in (port.get("name"), port["containerPort"])
        }
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if port is not None and port not in known:
                yield f"{whose}: {probe} of {port}"
        if any(isinstance(port, int) and port < _LARGEST_SAFE_PORT for port in known):
            yield f"{whose}: a privileged port"


def dangling_selectors(objects: list[Document]) -> Iterator[str]:
    """A Service or PodDisruptionBudget that selects no pod of ours."""
    labels = [template.get("metadata", {}).get("labels", {}) for _, template in templates(objects)]
    for document in objects:
        spec = document.get("spec", {})
        wanted = (
            spec.get("selector")
            if document["kind"] == "Service"
            else spec.get("selector", {}).get("matchLabels")
        )
        if document["kind"] in ("Service", "PodDisruptionBudget") and wanted:
            ours = {key: value for key, value in wanted.items() if key.startswith("kdist.dev/")}
            if not any(ours.items() <= each.items() for each in labels):
                yield name(document)


def wildcard_in_rules(objects: list[Document]) -> Iterator[str]:
    """A role with a `*`, or one that reads secrets; a binding to cluster-admin, or to one that
    makes pods and no reason why.
    """
    makers = set()
    for document in objects:
        for rule in (
            document.get("rules", []) if document["kind"] in ("Role", "ClusterRole") else []
        ):
            verbs, resources = set(rule["verbs"]), set(rule["resources"])
            reads = "secrets" in resources and verbs != {"create"}
            if "*" in verbs | resources | set(rule["apiGroups"]) or reads:
                yield name(document)
            if "pods" in resources and "create" in verbs:
                makers.add((document["kind"], document["metadata"]["name"]))
    for document in objects:
        role = document.get("roleRef", {})
        why = document["metadata"].get("annotations", {}).get(_MAY_CREATE_PODS)
        if role.get("name") == "cluster-admin" or (
            (role.get("kind"), role.get("name")) in makers and not why
        ):
            yield name(document)


def job_ttl_seconds_after_finished(objects: list[Document]) -> Iterator[str]:
    """A Job that stays for ever."""
    for document in objects:
        if document["kind"] == "Job" and "ttlSecondsAfterFinished" not in document["spec"]:
            yield name(document)


def deprecated_service_account_field(objects: list[Document]) -> Iterator[str]:
    """A pod that names its account by the old field, or takes a token that it does not need."""
    for whose, template in templates(objects):
        spec = template["spec"]
        if "serviceAccount" in spec or spec.get("automountServiceAccountToken") is not False:
            yield whose


def no_extensions_v1beta(objects: list[Document]) -> Iterator[str]:
    """An API that Kubernetes has left behind."""
    for document in objects:
        group, _, version = document["apiVersion"].rpartition("/")
        if "beta" in version and (
            not group or (group.endswith("k8s.io") and "x-k8s" not in group) or "." not in group
        ):
            yield f"{name(document)}: {document['apiVersion']}"


CHECKS: tuple[Check, ...] = (
    latest_tag,
    run_as_non_root,
    no_read_only_root_fs,
    privilege_escalation_container,
    unset_requirements,
    host_namespaces,
    env_var_secret,
    non_existent_ports,
    dangling_selectors,
    wildcard_in_rules,
    job_ttl_seconds_after_finished,
    deprecated_service_account_field,
    no_extensions_v1beta,
)
