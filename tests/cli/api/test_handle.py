"""A handle of a job stays with the cluster that it was made with, whatever the kubeconfig says
later and whichever cluster other threads use.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

import kdist
from kdist.cluster.transport import MAX_CONNECTIONS
from kdist.errors import Code, JobNotFoundError
from kdist.job.cluster import snapshot
from tests.cli.cluster.api import Api
from tests.cli.cluster.conftest import Serve, serve
from tests.cli.cluster.objects import Store
from tests.cli.deploy.conftest import PLACES, file
from tests.cli.running import PATIENCE

__all__ = ["file", "serve"]
pytestmark = pytest.mark.filterwarnings("ignore::kdist.errors.KdistWarning")
NAMES = ("first", "second")


@pytest.fixture
def stores() -> dict[str, Store]:
    """What each of two clusters holds."""
    return {name: Store() for name in NAMES}


@pytest.fixture
def clusters(
    stores: dict[str, Store], serve: Serve, home: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Api]:
    """Two clusters, each a context of the one kubeconfig."""
    found = {name: serve(store) for name, store in stores.items()}
    monkeypatch.setenv("KUBECONFIG", str(home / "config"))
    write_contexts(home / "config", found, current="first")
    return found


def write_contexts(path: Path, clusters: dict[str, Api], *, current: str) -> None:
    """A kubeconfig with a context for each cluster, whose namespace is `ml`."""
    named = {name: {"name": name} for name in clusters}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": current,
        "clusters": [{**named[name], "cluster": {"server": clusters[name].url}} for name in named],
        "users": [{**each, "user": {"token": "secret"}} for each in named.values()],
        "contexts": [
            {"name": name, "context": {"cluster": name, "user": name, "namespace": "ml"}}
            for name in named
        ],
    }
    path.write_text(yaml.safe_dump(document))


def use(handle: kdist.JobHandle) -> None:
    """Ask for all that a handle asks a cluster for, also where it waits through outages."""
    assert handle.status().name == "digits"
    with pytest.raises(kdist.KdistError) as caught:
        handle.wait("running", timeout=0.2)
    assert caught.value.code == Code.TIMEOUT


def test_a_handle_keeps_its_cluster_when_another_context_becomes_the_current_one(
    clusters: dict[str, Api], stores: dict[str, Store], file: Path, home: Path
) -> None:
    applied = kdist.load(file).apply()
    found = kdist.get("digits")
    write_contexts(home / "config", clusters, current="second")
    for each in (applied, found):
        use(each)
    write_contexts(home / "other", {"second": clusters["second"]}, current="second")
    os.environ["KUBECONFIG"] = str(home / "other")  # which the fixture sets back
    (home / "config").unlink()
    for each in (applied, found):
        use(each)
    assert not clusters["second"].asked
    with pytest.raises(JobNotFoundError):
        kdist.get("digits")
    applied.delete()
    assert PLACES["job"] not in stores["first"].objects


def test_threads_with_two_contexts_act_on_two_clusters(
    clusters: dict[str, Api], stores: dict[str, Store], file: Path
) -> None:
    handles: dict[str, kdist.JobHandle] = {}

    def apply(name: str, nodes: int) -> None:
        handles[name] = kdist.load(file, f"spec.nodes.max={nodes}").apply(context=name)

    together(lambda: apply("first", 4), lambda: apply("second", 5))
    wanted = [stores[name].objects[PLACES["job"]]["spec"]["parallelism"] for name in NAMES]
    assert wanted == [4, 5]
    before = {name: len(clusters[name].asked) for name in NAMES}
    together(lambda: use(handles["first"]), lambda: use(handles["second"]))
    assert all(len(clusters[name].asked) > before[name] for name in NAMES)
    assert [handles[name].status().nodes.max for name in NAMES] == [4, 5]
    handles["second"].delete()
    assert PLACES["job"] in stores["first"].objects
    assert PLACES["job"] not in stores["second"].objects


def together(*actions: Callable[[], None]) -> None:
    """Do these in threads; what one of them raises is raised here."""
    with ThreadPoolExecutor(len(actions)) as pool:
        for done in [pool.submit(each) for each in actions]:
            done.result()


def test_waits_that_are_over_leave_no_thread_and_share_their_connections(
    clusters: dict[str, Api], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_UNREAD_SECONDS", 0.1)
    handle = kdist.load(file).apply()
    use(handle)
    before, known = len([*Path("/proc/self/fd").iterdir()]), {*threading.enumerate()}
    for _ in range(100):
        with pytest.raises(kdist.KdistError):
            handle.wait("running", timeout=0)
    kept = MAX_CONNECTIONS  # each with a thread, since this process is the server too
    end = time.monotonic() + PATIENCE
    while len({*threading.enumerate()} - known) > kept:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 2 * kept
