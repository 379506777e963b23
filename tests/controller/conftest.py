"""What the tests of the controller may ask for: a small Kubernetes, and a controller that works in
single steps, so that it can be stopped between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist import cluster
from kdist.agents.client import AgentTransport
from kdist.cluster import Cluster, ForeignError, transport
from kdist_controller.agent_poller import AgentPoller
from kdist_controller.cache import Cache, trim
from kdist_controller.controller import Observer
from kdist_controller.executor import FIELD_MANAGER, Executor
from kdist_controller.metrics import Metrics
from kdist_controller.node_recovery import NodeCache, NodeRecovery
from kdist_controller.observation import Observed
from kdist_controller.reconcile import reconcile
from kdist_controller.resource import JobKey
from tests.cli.cluster.api import Api, write_kubeconfig
from tests.controller.kubernetes import Kubernetes
from tests.controller.rights import TOKEN, RightsServer

_MOST_ROUNDS = 40


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that people would not notice."""
    monkeypatch.setattr(transport, "FIRST_PAUSE", 0.01)


@pytest.fixture
def kubernetes(request: pytest.FixtureRequest) -> Kubernetes:
    """A cluster without jobs, and without operators unless a test's parameter says otherwise."""
    return getattr(request, "param", None) or Kubernetes()


@pytest.fixture
def api(kubernetes: Kubernetes) -> Iterator[Api]:
    """Its server. No controller may ask for what the chart does not let it."""
    rights = RightsServer(kubernetes)
    server = Api(rights)
    yield server
    server.close()
    assert rights.refused == []


@pytest.fixture
def connection(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A connection to it, as the controller has one; commands have another, of an admin."""
    file = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(file))
    write_kubeconfig(file, api.url, user={"token": TOKEN})
    connected = cluster.connect(retry_seconds=1.0, field_manager=FIELD_MANAGER)
    write_kubeconfig(file, api.url)
    return connected


class Stepper:
    """A controller that works in single steps."""

    def __init__(self, kubernetes: Kubernetes, connection: Cluster) -> None:
        self.kubernetes = kubernetes
        self.connection = connection
        self.kinds = connection.kinds()
        self.observed: Observed | None = None
        """The job as it was last seen."""

    def settle(self, name: str = "digits") -> NodeRecovery:
        """Start a controller that knows nothing, and let it work until nothing is left to do;
        returns what recovers its jobs.
        """
        key = JobKey("ml", name)
        cache = Cache()
        metrics = Metrics(list, lambda: 0, lambda: 0, list)
        poller = _Poller(self.kubernetes, self.connection, metrics)
        recovery = NodeRecovery(self.connection, cache, refuse, leads=lambda: True, notify=print)
        observer = Observer(
            cluster=self.connection,
            cache=cache,
            poller=poller,
            nodes=NodeCache(cache),
            recovery=recovery,
            kinds=self.kinds,
        )
        pause = None
        for _ in range(_MOST_ROUNDS):
            self._watch(cache)
            self.observed = observed = observer.observe(key)
            if observed is None:
                return recovery
            changes, written = reconcile(observed), len(self.kubernetes.writes)
            try:
                Executor(self.connection, cache, observed).execute(changes)
            except ForeignError as error:
                if error.found is None:
                    raise
                observer.foreign[key] = error.found
                continue
            recovery.plan(observed)
            if pause is None:
                pause = recovery.avoid_nodes(key)
            if len(self.kubernetes.writes) == written:
                return recovery
        pytest.fail(f"{name} does not settle: {changes}")

    def _watch(self, cache: Cache) -> None:
        """See what a watch would have brought by now."""
        for kind, listed in self.kubernetes.list_all().items():
            cache.replace(kind, None, map(trim, listed))


def refuse(namespace: str, pod: Any) -> AgentTransport:
    raise AssertionError(f"{pod} of {namespace} was asked over the network")


class _Poller(AgentPoller):
    """Agents that answer at once."""

    def __init__(self, kubernetes: Kubernetes, connection: Cluster, metrics: Metrics) -> None:
        super().__init__(
            connection,
            lambda _, __: pytest.fail("asked over the network"),
            metrics=metrics,
            notify=print,
        )
        self._kubernetes = kubernetes

    def answers(self, key: JobKey) -> dict[str, Any]:  # noqa: ARG002 - of one job
        return dict(self._kubernetes.reports)


@pytest.fixture
def stepper(kubernetes: Kubernetes, connection: Cluster) -> Stepper:
    """A controller that works in single steps."""
    return Stepper(kubernetes, connection)


JobOf = Callable[..., dict[str, Any]]


@pytest.fixture
def job() -> JobOf:
    """Make a TrainingJob: `job(nodes=2, train={"epochs": 3})`."""

    def make(name: str = "digits", **spec: Any) -> dict[str, Any]:
        settings = {
            "image": "registry.example.com/kdist-trainer:1",
            "backend": "job",
            "nodes": {"min": 1, "max": 4},
            "train": {"workload": "digits", "epochs": 3, "globalBatch": 64},
            **spec,
        }
        return {"metadata": {"name": name}, "spec": settings}

    return make
