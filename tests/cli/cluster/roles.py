"""Every command that meets a cluster, what kubectl is asked for the same, and which roles may do
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tools.reference import rights

ROLES = ("chart-view", "chart-edit", "builtin-view", "builtin-edit")
EVERYBODY, EDIT = frozenset(ROLES), frozenset({"chart-edit", "builtin-edit"})
LIVE = EVERYBODY - {"builtin-view"}  # it lacks pods/proxy
# Commands that ask no cluster for anything.
ELSEWHERE = {
    "init",
    "validate",
    "explain",
    "run",
    "render",
    "dashboards",
    "completion",
    "convert",
    "version",
}

DRY = "--dry-run=server"
GET = "get pods,configmaps,jobs.batch"
MARK = f"annotate configmap digits a=b --overwrite {DRY}"
SUSPEND = f'patch job digits --type=merge -p {{"spec":{{"suspend":true}}}} {DRY}'
SEND = f"apply --server-side --force-conflicts -f objects.json {DRY}"
ROLE = f"create role meeting --verb=get --resource=configmaps {DRY}"
DELETE = f"delete -f objects.json --wait=false {DRY}"
EXEC = "exec p -c trainer -- true"
LOOK = (
    f"run viewer --image=registry.example.com/trainer:1 {DRY}",
    f"delete pod p --wait=false {DRY}",
    "logs p -c trainer",
)
RECOVER = (
    f'patch pod p --subresource=status -p {{"status":{{"reason":"a"}}}} {DRY}',
    f"delete pod p --wait=false {DRY}",
)
ASK = ("get --raw /api/v1/namespaces/ml/pods/p:9401/proxy/status", "port-forward p :9401")


class Verb(NamedTuple):
    """A command line of kdist; kubectl's for the same, of which all (`either`: one) must be
    allowed; who may.

    `waits` for pods to start, which nobody does where there are no nodes. `pods` says whether one
    runs.
    """

    words: str
    kubectl: tuple[str, ...]
    roles: frozenset[str]
    either: bool = False
    waits: bool = False
    pods: bool = True

    @property
    def suspended(self) -> bool:
        """Whether another job exists, which is suspended."""
        return " suspended " in self.words


VERBS = (
    Verb("get", ("get configmaps",), EVERYBODY),
    Verb("status digits", (GET,), EVERYBODY),
    Verb("why digits", (GET, "get events"), EVERYBODY),
    Verb("events digits", ("get events",), EVERYBODY),
    Verb("wait digits --for running", (GET,), EVERYBODY),
    Verb("logs digits", ("logs p -c trainer",), EVERYBODY),
    Verb("doctor", ("auth whoami",), EVERYBODY),
    Verb("top digits --once", ASK, LIVE, either=True),
    Verb("top digits -o prom", ASK, LIVE, either=True),
    Verb("port-forward digits :9401", ASK[1:], EDIT),
    Verb("port-forward digits :tensorboard", (EXEC,), EDIT),
    Verb("exec digits -- true", (EXEC,), EDIT),
    Verb("profile digits --steps 1 --out traces", (EXEC,), EDIT),
    Verb("checkpoints digits", (EXEC,), EDIT),
    Verb("checkpoints verify digits", (EXEC,), EDIT),
    Verb("checkpoints export digits --out weights.safetensors", (EXEC,), EDIT),
    Verb("report digits", (EXEC,), EDIT),
    Verb("checkpoints verify digits", LOOK, EDIT, waits=True, pods=False),
    Verb("report digits", LOOK, EDIT, waits=True, pods=False),
    Verb("diff job.yaml --set spec.nodes.max=3", (SEND,), EDIT),
    Verb("apply job.yaml --set spec.nodes.max=3", (SEND,), EDIT),
    Verb("apply other.yaml", (SEND,), EDIT),
    Verb(
        "apply other.yaml --set spec.rendezvous=kubernetes", (SEND, ROLE), frozenset({"chart-edit"})
    ),
    Verb("bench all_reduce -f other.yaml --cluster", (SEND, DELETE), EDIT, waits=True),
    Verb("scale digits --nodes 3 --no-wait", (SEND, f"annotate pod p a=b {DRY}"), EDIT, pods=False),
    Verb("scale digits --nodes 3 --no-wait", (SEND, f"annotate pod p a=b {DRY}"), EDIT, waits=True),
    Verb("suspend digits --no-wait", (MARK, SUSPEND), EDIT),
    Verb("resume suspended --no-wait", (MARK, SUSPEND), EDIT),
    Verb("restart digits --no-wait", (MARK, SUSPEND), EDIT, pods=False),
    Verb(
        "restart digits --fresh --yes --no-wait",
        (MARK, SUSPEND, SEND, DELETE, *LOOK),
        EDIT,
        waits=True,
    ),
    Verb("drill digits --fault pod --yes", (EXEC, LOOK[1], MARK), EDIT),
    Verb("recover digits --no-wait", RECOVER, frozenset()),
    Verb("delete digits --purge --no-wait", (DELETE,), EDIT, pods=False),
    Verb("delete digits --grace-period 1 --no-wait", (DELETE, *LOOK[1:2]), EDIT),
)


def rules(role: str, aggregated: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rules of a role. Kubernetes' own are put together of `aggregated` ones."""
    origin, _, who = role.partition("-")
    parts = ["view", "edit"] if who == "edit" else ["view"]
    if origin == "chart":
        return [
            rule
            for part in parts
            for name in ("objects", "workloads")
            # they are view and edit
            for rule in rights.rules(part, name)  # type: ignore[arg-type]
        ]
    return [rule for part in parts for rule in aggregated[part]]
