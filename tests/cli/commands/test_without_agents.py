"""What a user is shown who may look and forward no port, where a network policy keeps the API
server's proxy from the agents: what else tells the numbers, what is missing, and who sees it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from kdist.manifest import OWNER as OWNER_MARK
from kdist.manifest import mark
from tests.cli.cluster.api import Asked, Reply, write_kubeconfig
from tests.cli.cluster.conftest import Serve, _hurry, serve
from tests.cli.commands.test_status_commands import PROGRESS
from tests.cli.conftest import Kdist
from tests.cli.job.cluster.world import FIRST, World, lines
from tests.cli.status.objects import MAKER, Document, config_map
from tests.cli.status.test_resource_state import NUMBERS, forge, training_job
from tools.reference import rights

__all__ = ["_hurry", "serve"]

MISSING = "live numbers of 2 pods are missing"
ROLE = "the edit role of kdist's chart"
OWNER: Document = {
    "apiVersion": "kdist.dev/v1alpha1",
    "kind": "TrainingJob",
    "name": "digits",
    "uid": "u",
    "controller": True,
}


class Behind(World):
    """A job behind a network policy, for a user with the chart's role `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = {}
        self.resource: Document | None = None

    def __call__(self, asked: Asked) -> Reply:
        if asked.path.endswith("/selfsubjectrulesreviews"):
            rules = [rule for part in rights.PARTS[:2] for rule in rights.rules("view", part)]
            return Reply(document={"status": {"resourceRules": rules, "incomplete": False}})
        if asked.path.endswith("/selfsubjectaccessreviews"):
            return Reply(document={"status": {"allowed": False}})
        if "/trainingjobs" in asked.path and self.resource is not None:
            one = asked.path.endswith("/digits")
            return Reply(document=self.resource if one else {"items": [self.resource]})
        return super().__call__(asked)


@pytest.fixture
def world(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Behind:
    world = Behind()
    write_kubeconfig(tmp_path / "kubeconfig", serve(world).url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return world


def control(world: Behind, **owned: Any) -> None:
    """Give the job a TrainingJob, which owns these objects."""
    train = {"workload": "digits", "epochs": 1}
    world.resource = training_job(spec={"image": "registry/trainer:1", "train": train}, **NUMBERS)
    world.resource["metadata"]["uid"] = OWNER["uid"]
    for each in owned.values():
        each["metadata"]["ownerReferences"] = [OWNER]


def read(kdist: Kdist) -> Document:
    shown = kdist("status", "digits", "-o", "json")
    assert shown.exit_code == Code.OK, shown.output
    found: Document = json.loads(shown.stdout)
    return found


def test_status_and_why_show_what_the_training_job_says(kdist: Kdist, world: Behind) -> None:
    control(world, config_map=world.config_map)
    shown = kdist("status", "digits")
    assert shown.exit_code == Code.OK
    assert "90/500" in shown.stdout
    assert "0.4312" in shown.stdout
    told = " ".join(shown.stderr.split())
    assert MISSING in told
    assert ROLE in told
    assert "step and loss are those in the status of the TrainingJob" in told
    why = kdist("why", "digits")
    assert "its TrainingJob says Running: it trains" in " ".join(why.stdout.split())
    assert ROLE in " ".join(why.stderr.split())


def test_status_shows_what_the_log_says_where_there_is_no_training_job(
    kdist: Kdist, world: Behind
) -> None:
    world.logs = {FIRST: lines("importing torch", json.dumps(PROGRESS), "an odd line")}
    assert read(kdist)["step"] == PROGRESS["step"]
    told = " ".join(kdist("status", "digits").stderr.split())
    assert "step and loss are those in the log" in told
    assert ROLE in told
    world.forbidden = {"/log"}
    assert read(kdist)["step"] is None
    told = kdist("status", "digits").stderr
    assert "step and loss" not in told


def test_top_and_logs_of_a_rank_say_what_is_missing_and_which_role_shows_it(
    kdist: Kdist, world: Behind
) -> None:
    world.logs = {FIRST: lines(json.dumps(PROGRESS))}
    control(world, config_map=world.config_map)
    assert world.config_map is not None
    world.config_map["metadata"]["annotations"][OWNER_MARK] = mark("digits", "ConfigMap", "digits")
    job = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "controller": True}
    job["uid"] = MAKER
    for each in world.pods:
        each["metadata"]["ownerReferences"] = [job]
    top = kdist("top", "digits", "--once")
    assert top.exit_code == Code.ERROR
    told = " ".join(top.stderr.split())
    assert MISSING in told
    assert ROLE in told
    assert "Next: kdist status digits -n ml" in told
    world.pods = world.pods[:1]
    logs = kdist("logs", "digits", "--rank", "0")
    assert "progress" in logs.stdout
    told = " ".join(logs.stderr.split())
    assert ROLE in told
    assert "ranks of pods whose agents do not answer are not known" in told
    assert ROLE not in kdist("logs", "digits").stderr, "all lines are shown without them"


@pytest.mark.parametrize("owned", ["config_map", "workload"])
def test_a_forged_configmap_misleads_neither_status_nor_get(
    kdist: Kdist, world: Behind, owned: str
) -> None:
    world.config_map = {**forge(), "metadata": config_map()["metadata"]}
    control(world, **{owned: getattr(world, owned)})
    found = read(kdist)
    assert (found["nodes"]["max"], found["queue"], found["name"]) == (4, "team", "digits")
    listed = kdist("get", "-o", "json")
    assert listed.exit_code == Code.OK, listed.output
    assert '"max": 4\n' in listed.stdout or '"max": 4,' in listed.stdout
    assert "4096" not in listed.stdout
