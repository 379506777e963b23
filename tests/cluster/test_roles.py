"""What needs a pod that runs, by each of the usual roles: it works, or is refused and changes
nothing.
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kdist.app import cli
from kdist.errors import Code
from tests.cli.cluster import roles
from tests.cli.cluster.roles import EDIT, EVERYBODY, LIVE, ROLES
from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LONG = {"steps": 1_000_000, "evaluate": "never", "checkpoint": {"every": {"seconds": 4}}}
# who may is seen with `exec`; each way once will do
ONE, OTHER = frozenset({"chart-edit"}), frozenset({"builtin-edit"})
# Command lines, who may run them, and who of these does.
LOOKS = (
    ("status digits", EVERYBODY, EVERYBODY),
    ("logs digits --tail 5", EVERYBODY, EVERYBODY),
    ("top digits --once", LIVE, LIVE),
    ("top digits -o prom", LIVE, LIVE),
    ("exec digits -- true", EDIT, EDIT),
    ("profile digits --steps 1 --out traces", EDIT, OTHER),
    ("checkpoints digits", EDIT, ONE),
    ("checkpoints verify digits", EDIT, OTHER),
    ("checkpoints export digits --out weights.safetensors", EDIT, ONE),
    ("report digits", EDIT, OTHER),
)


def bind(namespace: Namespace) -> None:
    """A user for each role, by its name; Kubernetes' own are as this cluster has them."""
    for role in ROLES:
        kind, name = (
            ("role", role)
            if role.startswith("chart")
            else ("clusterrole", role.removeprefix("builtin-"))
        )
        if kind == "role":
            document = {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "Role",
                "metadata": {"name": role},
            }
            namespace.kubectl(
                "create", "-f", "-", stdin=json.dumps({**document, "rules": roles.rules(role, {})})
            )
        namespace.kubectl("create", "rolebinding", role, f"--{kind}={name}", f"--user={role}")


def type_as(role: str, line: str, namespace: Namespace) -> Result:
    """The ended `kdist LINE` of a user, in this process."""
    command, *words = line.split()
    return CliRunner().invoke(
        cli, [command, "-n", namespace.name, "--as", role, *words], prog_name="kdist"
    )


def objects(namespace: Namespace) -> set[tuple[str, ...]]:
    """Every object of the job and its pods, and how often what is asked of it was changed."""
    kinds = (
        "pods,jobs,configmaps,services,serviceaccounts,persistentvolumeclaims,"
        "networkpolicies,poddisruptionbudgets"
    )
    found = json.loads(namespace.kubectl("get", kinds, "-o", "json"))["items"]
    metadata = [(each["kind"], each["metadata"]) for each in found]
    return {
        (
            kind,
            each["name"],
            each["uid"],
            str(each.get("generation")),
            json.dumps(each.get("annotations")),
        )
        for kind, each in metadata
        if not each["name"].endswith("-rendezvous")
    }


def refuse(role: str, line: str, namespace: Namespace) -> None:
    """The command is refused in a sentence, and changes nothing."""
    before = objects(namespace)
    done = type_as(role, line, namespace)
    assert done.exit_code == Code.FORBIDDEN, f"{role}: {line}: {done.output}"
    sentence = rf"you are `{role}`, who may not [\w/. ,]+ in namespace {namespace.name}\n"
    assert re.search(sentence, done.stderr), f"{role}: {line}: {done.output}"
    assert objects(namespace) == before, f"{role}: {line}"


def succeed(role: str, line: str, namespace: Namespace) -> str:
    """The command does what it is for; what it printed."""
    done = type_as(role, line, namespace)
    assert done.exit_code == Code.OK, f"{role}: {line}: {done.output}"
    return done.output


def forward(role: str, namespace: Namespace, output: Path) -> None:
    """A forwarded port leads to the agent."""
    process = namespace.start_kdist("port-forward", "digits", ":9401", "--as", role, output=output)
    try:
        printed: Any = namespace.until(
            "it forwards", lambda: re.search(r"127\.0\.0\.1:(\d+) ->", output.read_text())
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{printed[1]}/status", timeout=20) as answer:
            assert json.load(answer)["job"] == "digits"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.sampled
def test_each_role_looks_into_a_job_as_far_as_its_rights_reach_and_edit_steers_it(
    namespace: Namespace, calm: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", namespace.environment["KUBECONFIG"])
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    namespace.apply(calm(nodes=1, rendezvous="c10d", train=LONG))
    bind(namespace)
    namespace.kdist("wait", "digits", "--for", "checkpoint", "--timeout", "4m")
    for line, who, tried in LOOKS:
        for role in ROLES:
            if role not in who:
                refuse(role, line, namespace)
            elif role in tried:
                succeed(role, line, namespace)
    for role in ("builtin-view", "chart-view"):
        refuse(role, "port-forward digits :9401", namespace)
    for role in sorted(EDIT):
        forward(role, namespace, tmp_path / role)

    assert "is saved" in succeed("chart-edit", "suspend digits", namespace)
    namespace.until("its pod is gone", lambda: namespace.find("pods") == [])
    for line, one in (
        ("checkpoints verify digits", "builtin-edit"),
        ("report digits", "chart-edit"),
    ):
        for role in ROLES[::2]:
            refuse(role, line, namespace)
        succeed(one, line, namespace)
        assert namespace.find("pods") == [], "the pod that looked is gone"
    for role in ROLES[::2]:
        refuse(role, "restart digits --fresh --yes", namespace)
    assert "old checkpoints are in" in succeed(
        "builtin-edit", "restart digits --fresh --yes --no-wait", namespace
    )
    succeed("chart-edit", "delete digits --purge --no-wait", namespace)
