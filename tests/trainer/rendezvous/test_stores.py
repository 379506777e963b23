"""What torch expects of a store: each of ours does as torch's own, also behind a prefix."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from kdist_trainer.rendezvous.stores import FileStore
from tests.trainer.rendezvous.test_kubernetes_store import open_store


@pytest.fixture(params=["file", "ConfigMap"])
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    """A store whose clients soon lose patience."""
    if request.param == "file":
        return FileStore(tmp_path / "store", timeout_seconds=0.3)
    return open_store(request.getfixturevalue("api"), seconds=0.3)


@pytest.fixture(params=["plain", "prefixed"])
def store(own: Store, request: pytest.FixtureRequest) -> Store:
    return own if request.param == "plain" else PrefixStore("round/7", own)


def test_it_does_what_torchs_own_stores_do(store: Any) -> None:
    twin: Any = HashStore()
    for one in (store, twin):
        one.set("a/b", "1")
        assert one.get("a/b") == b"1"
        assert [one.add("n", 3), one.add("n", 4)] == [3, 7]
        assert one.check(["a/b", "n"])
        assert not one.check(["a/b", "missing"])
        assert one.compare_set("c", "", "first") == b"first"
        assert one.compare_set("c", "wrong", "second") == b"first"
        assert one.compare_set("c", "first", "second") == b"second"
        assert one.compare_set("absent", "something", "new") == b"something"
        assert not one.check(["absent"])
        one.multi_set(["x", "y"], ["1", "2"])
        assert one.multi_get(["x", "y"]) == [b"1", b"2"]
        one.append("x", "0")
        assert one.get("x") == b"10"
        one.wait(["x"], timedelta(seconds=1))


def test_waiting_for_what_never_comes_ends_in_torchs_own_error(store: Any) -> None:
    with pytest.raises(dist.DistStoreError, match="missing"):
        store.get("missing")
    with pytest.raises(dist.DistStoreError, match="missing"):
        store.wait(["missing"], timedelta(milliseconds=100))
