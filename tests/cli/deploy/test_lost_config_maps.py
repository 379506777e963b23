"""A job whose ConfigMaps were deleted is still the same run: `apply` makes them again as they were,
and what needs them says so.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kdist.cluster import connect
from kdist.errors import Code
from kdist.job.cluster.snapshot import fetch_snapshot
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import CORE, PLACES

CONFIG_MAPS = f"{CORE}/configmaps"
RUN = "kdist.dev/run-id"


def lose_config_maps(store: Store) -> dict[str, dict[str, Any]]:
    """Delete every ConfigMap of the job, as `kubectl delete` would; returns what they were."""
    lost = {path: each for path, each in store.objects.items() if path.startswith(CONFIG_MAPS)}
    for path in lost:
        del store.objects[path]
    return lost


def read_data(maps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What pods read of these ConfigMaps, and what kdist has chosen."""
    return {
        path: (each.get("data"), each["metadata"]["annotations"]) for path, each in maps.items()
    }


@pytest.mark.parametrize("rendezvous", ["kubernetes", "c10d"])
@pytest.mark.parametrize("backend", PLACES)
def test_apply_makes_them_again_with_the_run_that_the_pods_have(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str, rendezvous: str
) -> None:
    settings = (f"spec.backend={backend}", f"spec.rendezvous={rendezvous}")
    sent = ("apply", str(file), "--set", settings[0], "--set", settings[1])
    kdist(*sent)
    lost = lose_config_maps(store)
    before = copy.deepcopy(store.objects[PLACES[backend]])
    again = kdist(*sent)
    assert again.exit_code == Code.OK, again.stderr
    made = {path: each for path, each in store.objects.items() if path in lost}
    assert read_data(made) == read_data(lost)
    assert store.objects[PLACES[backend]]["spec"] == before["spec"], "no pod is made again"


def test_what_kdist_has_chosen_stays_though_it_would_choose_otherwise_now(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    store.may_not = {"create roles"}
    sent = ("apply", str(file), "--set", "spec.backend=auto", "--set", "spec.nodes=2")
    kdist(*sent)
    lost = lose_config_maps(store)
    store.may_not = set()
    again = kdist(*sent)
    assert again.exit_code == Code.OK, again.stderr
    made = {path: each for path, each in store.objects.items() if path in lost}
    assert read_data(made) == read_data(lost)
    chosen = store.objects[f"{CONFIG_MAPS}/digits"]["metadata"]["annotations"]
    assert (chosen["kdist.dev/backend"], chosen["kdist.dev/rendezvous"]) == ("jobset", "c10d")


@pytest.mark.parametrize("backend", PLACES)
@pytest.mark.parametrize(
    "command", [("scale", "digits", "--nodes", "2"), ("suspend", "digits"), ("restart", "digits")]
)
def test_what_needs_them_names_what_is_gone_and_the_command_that_brings_it_back(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str, command: tuple[str, ...]
) -> None:
    kdist("apply", str(file), "--set", f"spec.backend={backend}")
    lose_config_maps(store)
    before = copy.deepcopy(store.objects)
    refused = kdist(*command, "-n", "ml")
    assert refused.exit_code == Code.ERROR
    assert "ConfigMap digits in namespace ml was deleted" in refused.stderr
    assert "kdist apply JOB.yaml -n ml" in refused.stderr
    assert store.objects == before


@pytest.mark.parametrize("backend", PLACES)
def test_status_still_knows_what_the_job_is(
    api: Api, store: Store, file: Path, kdist: Kdist, backend: str
) -> None:
    kdist("apply", str(file), "--set", f"spec.backend={backend}")
    run = store.objects[f"{CONFIG_MAPS}/digits"]["metadata"]["annotations"][RUN]
    lose_config_maps(store)
    seen = fetch_snapshot(connect(None, "ml"), "digits")
    assert (seen.status.backend, seen.status.run_id) == (backend, run)


def test_a_workload_of_somebody_else_says_nothing_about_a_job(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    lose_config_maps(store)
    theirs = store.objects[PLACES["job"]]
    theirs["metadata"]["annotations"]["kdist.dev/owner"] = "other/job/digits"
    absent = kdist("suspend", "digits", "-n", "ml")
    assert absent.exit_code == Code.NOT_FOUND
    refused = kdist("apply", str(file))
    assert refused.exit_code == Code.ERROR
    assert "job.batch/digits in namespace ml belongs to job other" in refused.stderr.replace(
        "does not belong to job digits: it ", ""
    )


def test_a_job_that_was_suspended_stays_so_and_can_be_resumed(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    store.objects[PLACES["job"]]["spec"]["suspend"] = True
    lose_config_maps(store)
    kdist("apply", str(file))
    assert store.objects[PLACES["job"]]["spec"]["suspend"] is True
    asked = store.objects[f"{CONFIG_MAPS}/digits"]["metadata"]["annotations"]["kdist.dev/asked"]
    assert asked == "suspended"
