"""What each command needs to be allowed: one table, from which come the chart's roles, `kdist
doctor` and the page on rights.

A command of several steps asks for what it needs before the first of them, so that who may not do
all of it does none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from kdist import backends
from kdist.errors import Code, KdistError
from kdist.manifest import Manifest

if TYPE_CHECKING:
    from kdist.cluster import Cluster

RBAC = "rbac.authorization.k8s.io/v1"
RUNTIME = ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
_KUEUE = "kueue.x-k8s.io/v1beta1"
_LOOK, _CHANGE = "get list watch", "create patch delete"
_CORE = '""'  # the API group of pods, as a rule of RBAC writes it
_THREADS = 8
_ORDER = ("get", "list", "watch", "create", "patch", "update", "delete")


class Right(NamedTuple):
    """A verb on a kind, or on a part of it; with a name, on that one object."""

    verb: str
    api_version: str
    kind: str
    subresource: str = ""
    name: str = ""

    @property
    def group(self) -> str:
        """The API group; the core's is ""."""
        return self.api_version.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """As a rule of RBAC calls it: `pods/log`."""
        # a client is more than a table needs where nobody is asked
        from kdist.cluster import resources

        return resources.plural(self.kind) + (f"/{self.subresource}" if self.subresource else "")

    def __str__(self) -> str:
        from kdist.cluster import resources

        return f"{self.verb} {resources.named(self.api_version, self.kind, self.subresource)}"


class Need(NamedTuple):
    """What a group of commands needs, and what is lost without it (empty: they cannot run).

    `workload` are the verbs on the job's workload, of whichever kind it is; `role` is the chart's
    role that holds it all.
    """

    commands: str
    role: Literal["view", "edit"]
    rights: tuple[Right, ...]
    workload: str = ""
    without: str = ""


def _on(verbs: str, api_version: str, *kinds: str, part: str = "") -> tuple[Right, ...]:
    return tuple(Right(verb, api_version, kind, part) for verb in verbs.split() for kind in kinds)


_BESIDE = (
    ("v1", "ConfigMap"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("v1", "PersistentVolumeClaim"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
)
_READ_BESIDE = tuple(right for version, kind in _BESIDE for right in _on(_LOOK, version, kind))
_PODS = _on(_LOOK, "v1", "Pod")
_FORWARD = _on("create get", "v1", "Pod", part="portforward")
_EXEC = _on("create get", "v1", "Pod", part="exec")
_ASIDE = "a job none of whose pods runs cannot be looked into"

NEEDS: tuple[Need, ...] = (
    Need(
        "get, status, events, wait, why",
        "view",
        (*_PODS, *_on(_LOOK, "v1", "ConfigMap", "Event")),
        _LOOK,
    ),
    Need("logs", "view", _on("get", "v1", "Pod", part="log")),
    Need(
        "top, metrics, live status",
        "view",
        _on("get", "v1", "Pod", part="proxy"),
        "",
        "ranks are asked over a forwarded port",
    ),
    Need("port-forward", "view", _FORWARD, "", "ranks are asked through the API server's proxy"),
    Need(
        "why of claims and queues",
        "view",
        (*_on(_LOOK, "v1", "PersistentVolumeClaim"), *_on("get list", _KUEUE, "Workload")),
        "",
        "they are left out",
    ),
    Need("exec, profile", "edit", _EXEC, "", "no command can be run in a pod"),
    Need(
        "checkpoints, report, tensorboard",
        "edit",
        (*_EXEC, *_on("create delete", "v1", "Pod")),
        "",
        _ASIDE,
    ),
    Need(
        "apply, diff",
        "edit",
        (
            *_READ_BESIDE,
            *(right for version, kind in _BESIDE for right in _on(_CHANGE, version, kind)),
        ),
        f"{_LOOK} {_CHANGE}",
    ),
    Need(
        "apply with rendezvous kubernetes",
        "edit",
        (
            *_on(f"{_LOOK} {_CHANGE}", RBAC, "Role", "RoleBinding"),
            Right("update", "v1", "ConfigMap"),
        ),
        "",
        "jobs use rendezvous c10d: losing pod 0 restarts the pods, which resume",
    ),
    Need(
        "apply, trying a pod",
        "edit",
        _on("create", "v1", "Pod"),
        "",
        "what Pod Security will refuse is only warned of, unless namespaces can be read",
    ),
    Need("suspend, stop, resume", "edit", _on("patch", "v1", "ConfigMap"), "patch"),
    Need(
        "suspend, stop, resume in a queue of Kueue",
        "edit",
        _on("get list patch", _KUEUE, "Workload"),
        "",
        "a job in a queue cannot be suspended",
    ),
    Need("scale", "edit", (*_on("patch", "v1", "ConfigMap"), *_on("patch", "v1", "Pod")), "patch"),
    Need(
        "restart",
        "edit",
        (*_on("patch", "v1", "ConfigMap"), *_on("create delete", "v1", "Pod")),
        "create patch delete",
    ),
    Need(
        "delete",
        "edit",
        tuple(right for version, kind in _BESIDE for right in _on("list delete", version, kind)),
        "list delete",
    ),
)


def workload_rights(verbs: str) -> list[Right]:
    """These verbs on every workload kind, and on what a TrainJob is made from."""
    kinds = [(backends.get(name).api_version, backends.get(name).kind) for name in backends.NAMES]
    return [right for version, kind in [*kinds, RUNTIME] for right in _on(verbs, version, kind)]


def to_send(manifests: Iterable[Manifest]) -> Iterator[Right]:
    """What it takes to send objects that may be new."""
    for each in manifests:
        for verb in ("get", "create", "patch"):
            yield Right(
                verb, each.api_version, each.kind, name="" if verb == "create" else each.name
            )


def to_delete(manifests: Iterable[Manifest]) -> Iterator[Right]:
    """What it takes to take objects away."""
    for each in manifests:
        yield Right("delete", each.api_version, each.kind, name=each.name)


def on_pods(verbs: str, *, part: str = "") -> tuple[Right, ...]:
    """These verbs on pods, or on a part of them."""
    return _on(verbs, "v1", "Pod", part=part)


def find_missing(cluster: Cluster, wanted: Iterable[Right]) -> list[Right]:
    """Those that we do not have. Who may not even ask is taken to have them: the server has the
    last word in any case.
    """
    rules = cluster.rules()
    unsure = [
        right for right in dict.fromkeys(wanted) if not any(_covers(rule, right) for rule in rules)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [
            right
            for right, may in zip(
                unsure, pool.map(lambda each: _may(cluster, each), unsure), strict=True
            )
            if not may
        ]


def require(cluster: Cluster, wanted: Iterable[Right]) -> None:
    """Raises `KdistError` with code FORBIDDEN and every right that is missing; nothing must have
    been changed so far.
    """
    if missing := _names(find_missing(cluster, wanted)):
        raise _forbid(cluster, ", ".join(missing), missing, before="nothing was changed: ")


def require_one_of(cluster: Cluster, *ways: Iterable[Right]) -> None:
    """Raises `KdistError` with code FORBIDDEN, and what each set lacks, unless one is held
    whole.
    """
    lacking = [_names(find_missing(cluster, way)) for way in ways]
    if all(lacking):
        told = " or ".join(", ".join(missing) for missing in lacking)
        raise _forbid(cluster, told, [each for missing in lacking for each in missing])


def _names(missing: Iterable[Right]) -> list[str]:
    return list(dict.fromkeys(str(each) for each in missing))


def _forbid(cluster: Cluster, told: str, missing: Sequence[str], *, before: str = "") -> KdistError:
    return KdistError(
        (
            f"{before}you are `{cluster.whoami()}`, who may not {told} in namespace "
            f"{cluster.namespace}"
        ),
        hint=advise(missing, cluster.namespace),
        next_command=f"kdist doctor -n {cluster.namespace}",
        code=Code.FORBIDDEN,
    )


def advise(missing: Sequence[str], namespace: str) -> str:
    """Whom to ask for what, where rights such as `patch jobs.batch` are missing.

    The chart's role that holds them is named, if one does. Without a namespace they are missing in
    the whole cluster, where the chart's roles do not reach.
    """
    told = ", ".join(missing)
    if not namespace:
        return f"ask an admin of the cluster for a ClusterRole with: {told}"
    held = _held()
    roles = {held.get(each, "") for each in missing}
    role = "" if "" in roles else "edit" if "edit" in roles else "view"
    chart = f"the {role} role of kdist's chart, or for " if role else ""
    return f"ask an admin of the cluster for {chart}a role with: {told} (in namespace {namespace})"


@cache
def _held() -> dict[str, str]:
    """Every right of the table in words, and the least of the chart's roles that holds it."""
    found: dict[str, str] = {}
    for need in NEEDS:
        for right in (*need.rights, *workload_rights(need.workload)):
            if found.get(str(right)) != "view":
                found[str(right)] = _role(need, right)
    return found


def _may(cluster: Cluster, right: Right) -> bool:
    from kdist.cluster import ApiError

    try:
        return cluster.can_i(
            right.verb,
            right.api_version,
            right.kind,
            name=right.name,
            subresource=right.subresource,
        )
    except ApiError:
        return True


def _covers(rule: dict[str, list[str]], right: Right) -> bool:
    names = rule.get("resourceNames")
    found = (("verbs", right.verb), ("apiGroups", right.group), ("resources", right.resource))
    return all({value, "*"} & set(rule.get(key) or ()) for key, value in found) and (
        not names or right.name in names
    )


def rules(role: Literal["view", "edit"], *, workloads: bool) -> list[dict[str, list[str]]]:
    """Rules of the chart's role, of which `edit` has what `view` lacks: on workloads, or on all
    else.
    """
    held = {
        each
        for need in NEEDS
        for each in _rights(need, workloads=workloads)
        if _role(need, each) == "view"
    }
    if role == "edit":
        held = {each for need in NEEDS for each in _rights(need, workloads=workloads)} - held
    verbs: dict[tuple[str, str], set[str]] = {}
    for each in held:
        verbs.setdefault((each.group, each.resource), set()).add(each.verb)
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (group, resource), found in sorted(verbs.items()):
        together.setdefault((group, tuple(sorted(found, key=_ORDER.index))), []).append(resource)
    return [
        {"apiGroups": [group], "resources": names, "verbs": list(found)}
        for (group, found), names in together.items()
    ]


def _rights(need: Need, *, workloads: bool) -> list[Right]:
    return workload_rights(need.workload) if workloads else list(need.rights)


def _role(need: Need, right: Right) -> str:
    """Who looks may look at every object of a job, whichever command it is that asks."""
    return (
        "view"
        if need.role == "view" or (right.verb in _LOOK.split() and not right.subresource)
        else "edit"
    )


def chart_templates() -> str:
    """Text of the chart's `_rules.tpl`: named lists of rules, without and with the workloads."""
    parts = [
        (
            "{{/* Made from the table of rights in cli/kdist/rbac.py: python -m "
            "tests.charts.rights_files */}}\n"
        )
    ]
    for role in ("view", "edit"):
        for name, found in (
            ("objects", rules(role, workloads=False)),
            ("workloads", rules(role, workloads=True)),
        ):
            parts.append(f'{{{{- define "kdist.rules.{role}.{name}" -}}}}\n')
            for rule in found:
                lines = [
                    f"  {key}: [{', '.join(values) or _CORE}]\n" for key, values in rule.items()
                ]
                parts.append("-" + "".join(lines)[1:])
            parts.append("{{- end }}\n")
    return "".join(parts)


def table() -> str:
    """The table of rights as Markdown."""
    rows = [
        "| commands | verbs and resources | on the workload | without it | role |",
        "|---|---|---|---|---|",
    ]
    for need in NEEDS:
        verbs: dict[str, list[str]] = {}
        for right in need.rights:
            verbs.setdefault(str(right).partition(" ")[2], []).append(right.verb)
        together: dict[str, list[str]] = {}
        for resource, found in verbs.items():
            together.setdefault(" ".join(found), []).append(resource)
        told = "; ".join(f"{found} {', '.join(names)}" for found, names in together.items())
        rows.append(
            f"| {need.commands} | {told} | {need.workload or '-'} | "
            f"{need.without or 'they cannot run'} | {need.role} |"
        )
    return "\n".join(rows)
