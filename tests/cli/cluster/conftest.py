"""What the tests of the connection may ask for: a server that answers as told, and a connection to
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist import cluster
from kdist.cluster import Cluster, transport
from tests.cli.cluster.api import Answer, Api, write_kubeconfig

Serve = Callable[..., Api]
Connect = Callable[..., Cluster]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that people would not notice, told of at once."""
    monkeypatch.setattr(transport, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(transport, "QUIET_SECONDS", 0.0)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(answer)` starts a server; it ends with the test."""
    started: list[Api] = []

    def start(answer: Answer, **how: Any) -> Api:
        started.append(Api(answer, **how))
        return started[-1]

    yield start
    for api in started:
        api.close()


@pytest.fixture
def reported() -> list[str]:
    """What the connection told the person."""
    return []


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: list[str]) -> Connect:
    """`connect(url)` connects to a server by a kubeconfig of its own."""

    def make(url: str, *, retry_seconds: float = 5.0, **how: Any) -> Cluster:
        file = tmp_path / "kubeconfig"
        write_kubeconfig(file, url, **how)
        monkeypatch.setenv("KUBECONFIG", str(file))
        return cluster.connect(retry_seconds=retry_seconds, notify=reported.append)

    return make
