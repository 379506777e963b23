"""A watch of the controller goes on after an object that it could not take in."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from kdist.cluster import Cluster
from kdist_controller.cache import Cache
from kdist_controller.informer import Informer
from kdist_controller.resource import JobKey

_SECONDS = 60.0


class _FailingOnce(Cache):
    """A cache that meets something unforeseen in the first list that it is given."""

    lists = 0

    def replace(
        self, kind: str, namespace: str | None, listed: Iterable[dict[str, Any]]
    ) -> set[JobKey]:
        self.lists += 1
        if self.lists == 1:
            raise TypeError("no list of this shape was foreseen")
        return super().replace(kind, namespace, listed)


def test_a_watch_that_fails_in_an_unforeseen_way_starts_again(connection: Cluster) -> None:
    heard = threading.Event()
    informer = Informer(
        connection,
        _FailingOnce(),
        ("v1", "Pod"),
        namespace=None,
        selector="",
        metadata_only=False,
        notify=lambda _: heard.set(),
    )
    informer.start()
    assert informer.synced.wait(_SECONDS)
    assert heard.wait(_SECONDS)
