"""What the tests of looking at a job may ask for: a world of their own, and a connection to it."""

from __future__ import annotations

import pytest

from kdist.cluster import Cluster
from tests.cli.cluster.conftest import Connect, Serve, _hurry, connect, reported, serve
from tests.cli.job.cluster.world import World

__all__ = ["_hurry", "connect", "reported", "serve"]


@pytest.fixture
def world() -> World:
    """A job of two pods that trains."""
    return World()


@pytest.fixture
def cluster(world: World, serve: Serve, connect: Connect) -> Cluster:
    """A connection to the server that shows the world."""
    return connect(serve(world).url)
