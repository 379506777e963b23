"""The rights that each command needs: one table, from which the chart's roles, the checks of `kdist
doctor` and the documentation are generated: `tools.reference.rights` writes its texts.

A command of several steps checks its rights before the first step, so that it changes nothing if
one of them is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from kdist import backends
from kdist.errors import Code, KdistError
from kdist.manifest import (
    CONFIG_MAP_BYTES,
    DEPENDENT_KINDS,
    QUEUE_PREFIX,
    TRAINING_JOB,
    Manifest,
)

if TYPE_CHECKING:
    from kdist.cluster import Cluster


RBAC = "rbac.authorization.k8s.io/v1"
RUNTIME = ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
KUEUE = f"{QUEUE_PREFIX}v1beta1"
_READ, _WRITE = "get list watch", "create patch delete"
_THREADS = 8


class Right(NamedTuple):
    """A verb on a kind or a subresource; with a name, on that object only."""

    verb: str
    api_version: str
    kind: str
    subresource: str = ""
    name: str = ""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """The resource as an RBAC rule names it, such as `pods/log`."""
        # imported late: the table alone needs no API client
        from kdist.cluster import resources

        return resources.plural(self.kind) + (f"/{self.subresource}" if self.subresource else "")

    def __str__(self) -> str:
        from kdist.cluster import resources

        return f"{self.verb} {resources.named(self.api_version, self.kind, self.subresource)}"


class Need(NamedTuple):
    """The rights that a group of commands needs.

    Attributes:
        commands: names of the commands.
        role: the chart's role that contains the rights.
        rights: the rights, except those on the workload.
        workload: verbs on the job's workload, whatever its kind.
        without: what changes without the rights; empty if the commands cannot run.
    """

    commands: str
    role: Literal["view", "edit"]
    rights: tuple[Right, ...]
    workload: str = ""
    without: str = ""


def _on(verbs: str, api_version: str, *kinds: str, part: str = "") -> tuple[Right, ...]:
    return tuple(Right(verb, api_version, kind, part) for verb in verbs.split() for kind in kinds)


_SUPPORTING = tuple(each for each in DEPENDENT_KINDS if each[0] not in (RBAC, RUNTIME[0]))
_READ_SUPPORTING = tuple(
    right for version, kind in _SUPPORTING for right in _on(_READ, version, kind)
)
_PODS = _on(_READ, "v1", "Pod")
FORWARD = _on("create get", "v1", "Pod", part="portforward")
EXEC = _on("create get", "v1", "Pod", part="exec")
_NO_HELPER_POD = "they fail for a job without running pods"

NEEDS: tuple[Need, ...] = (
    Need(
        "get, status, events, wait, why",
        "view",
        (*_PODS, *_on(_READ, "v1", "ConfigMap", "Event")),
        _READ,
    ),
    Need(
        "get, status, wait, why of TrainingJobs",
        "view",
        _on(_READ, *TRAINING_JOB),
        "",
        "what only the TrainingJob says is not shown, such as why it is not accepted",
    ),
    Need(
        "apply, diff, suspend, resume, scale, restart, delete of TrainingJobs",
        "edit",
        _on(f"get {_WRITE}", *TRAINING_JOB),
        "",
        "jobs are applied as by `--direct`",
    ),
    Need("logs", "view", _on("get", "v1", "Pod", part="log")),
    Need(
        "status, wait, why of jobs that fetch data",
        "view",
        _on("get", "v1", "Pod", part="log"),
        "",
        "how much is fetched is not shown",
    ),
    Need(
        "top, live status",
        "view",
        _on("get", "v1", "Pod", part="proxy"),
        "",
        "ranks are queried over a forwarded port",
    ),
    Need("port-forward", "edit", FORWARD, "", "ranks are queried through the API server's proxy"),
    Need(
        "why of claims and queues",
        "view",
        (*_on(_READ, "v1", "PersistentVolumeClaim"), *_on("get list", KUEUE, "Workload")),
        "",
        "claims and queues are not examined",
    ),
    Need("exec, profile", "edit", EXEC, "", "no command can be run in a pod"),
    Need(
        "drill",
        "edit",
        (*EXEC, *_on("delete", "v1", "Pod"), *_on("patch", "v1", "ConfigMap")),
        "",
        "faults that need them are refused",
    ),
    Need(
        "checkpoints, report, tensorboard",
        "edit",
        (*EXEC, *_on("create delete", "v1", "Pod")),
        "",
        _NO_HELPER_POD,
    ),
    Need(
        "apply, diff",
        "edit",
        (
            *_READ_SUPPORTING,
            *(right for version, kind in _SUPPORTING for right in _on(_WRITE, version, kind)),
        ),
        f"{_READ} {_WRITE}",
    ),
    Need(
        "apply with rendezvous kubernetes",
        "edit",
        (
            *_on(f"{_READ} {_WRITE}", RBAC, "Role", "RoleBinding"),
            Right("update", "v1", "ConfigMap"),
        ),
        "",
        "jobs use rendezvous c10d: losing pod 0 restarts the pods, which resume",
    ),
    Need(
        "apply with a key for the exchange",
        "edit",
        _on("create", "v1", "Secret"),
        "",
        "the agents of new jobs exchange through the ConfigMap alone",
    ),
    Need(
        f"apply of code beyond {CONFIG_MAP_BYTES >> 20} MiB to a claim",
        "edit",
        (*EXEC, *_on("get create delete", "v1", "Pod")),
        "",
        f"code of more than {CONFIG_MAP_BYTES >> 20} MiB goes to a bucket or into the image",
    ),
    Need(
        "apply, trying a pod",
        "edit",
        _on("create", "v1", "Pod"),
        "",
        "Pod Security violations only cause a warning, unless namespaces can be read",
    ),
    Need("suspend, resume", "edit", _on("patch", "v1", "ConfigMap"), "patch"),
    Need(
        "suspend, resume in a queue of Kueue",
        "edit",
        _on("get list patch", KUEUE, "Workload"),
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
        "recover --avoid",
        "edit",
        (*_on("create patch delete", "batch/v1", "Job"), *_on("delete", "v1", "Pod")),
    ),
    Need(
        "delete",
        "edit",
        tuple(
            right for version, kind in _SUPPORTING for right in _on("list delete", version, kind)
        ),
        "list delete",
    ),
)


def workload_rights(verbs: str) -> list[Right]:
    """These verbs on every workload kind, and on the TrainingRuntime of a TrainJob."""
    kinds = [(backends.get(name).api_version, backends.get(name).kind) for name in backends.NAMES]
    return [right for version, kind in [*kinds, RUNTIME] for right in _on(verbs, version, kind)]


def to_send(manifests: Iterable[Manifest]) -> Iterator[Right]:
    """The rights to apply objects that may be new."""
    for each in manifests:
        for verb in ("get", "create", "patch"):
            yield Right(
                verb, each.api_version, each.kind, name="" if verb == "create" else each.name
            )


def to_delete(manifests: Iterable[Manifest]) -> Iterator[Right]:
    """The rights to delete objects."""
    for each in manifests:
        yield Right("delete", each.api_version, each.kind, name=each.name)


def on_pods(verbs: str, *, part: str = "") -> tuple[Right, ...]:
    """These verbs on pods, or on a subresource of them."""
    return _on(verbs, "v1", "Pod", part=part)


def find_missing(cluster: Cluster, wanted: Iterable[Right]) -> list[Right]:
    """The rights that the caller lacks. If the caller may not review its rights, it is assumed to
    have them: the server enforces them in any case.
    """
    rules = cluster.rules()
    unsure = [
        right for right in dict.fromkeys(wanted) if not any(_covers(rule, right) for rule in rules)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        allowed = pool.map(lambda each: _may(cluster, each), unsure)
        return [right for right, may in zip(unsure, allowed, strict=True) if not may]


def require(cluster: Cluster, wanted: Iterable[Right]) -> None:
    """Check rights before the first change. Raises `KdistError` (FORBIDDEN) that names the missing
    ones.
    """
    if missing := _names(find_missing(cluster, wanted)):
        raise _forbid(cluster, ", ".join(missing), missing, before="nothing was changed: ")


def require_one_of(cluster: Cluster, *alternatives: Iterable[Right]) -> None:
    """Check that the caller has all rights of one alternative. Raises `KdistError` (FORBIDDEN)."""
    lacking = [_names(find_missing(cluster, each)) for each in alternatives]
    if all(lacking):
        description = " or ".join(", ".join(missing) for missing in lacking)
        raise _forbid(cluster, description, [each for missing in lacking for each in missing])


def _names(missing: Iterable[Right]) -> list[str]:
    return list(dict.fromkeys(str(each) for each in missing))


def _forbid(
    cluster: Cluster, description: str, missing: Sequence[str], *, before: str = ""
) -> KdistError:
    return KdistError(
        (
            f"{before}you are `{cluster.whoami()}`, who may not {description} in namespace "
            f"{cluster.namespace}"
        ),
        hint=advise(missing, cluster.namespace),
        next_command=f"kdist doctor -n {cluster.namespace}",
        code=Code.FORBIDDEN,
    )


def advise(missing: Sequence[str], namespace: str) -> str:
    """Suggest how to get missing rights such as `patch jobs.batch`, naming the chart's role that
    contains them, if there is one. An empty namespace means the whole cluster, which the chart's
    roles do not cover.
    """
    rights = ", ".join(missing)
    if not namespace:
        return f"ask an admin of the cluster for a ClusterRole with: {rights}"
    held = _held()
    roles = {held.get(each, "") for each in missing}
    role = "" if "" in roles else "edit" if "edit" in roles else "view"
    chart = f"the {role} role of kdist's chart, or for " if role else ""
    return (
        f"ask an admin of the cluster for {chart}a role with: {rights} (in namespace {namespace})"
    )


@cache
def _held() -> dict[str, str]:
    """Every right of the table as text, and the smallest of the chart's roles with it."""
    found: dict[str, str] = {}
    for need in NEEDS:
        for right in (*need.rights, *workload_rights(need.workload)):
            if found.get(str(right)) != "view":
                found[str(right)] = role_of(need, right)
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


def role_of(need: Need, right: Right) -> str:
    """The role of a right: reading any object of a job belongs to `view`."""
    reads = right.verb in _READ.split() and not right.subresource
    return "view" if need.role == "view" or reads else "edit"
