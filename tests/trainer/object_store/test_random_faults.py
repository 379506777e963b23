"""Random operations under random faults, compared with a dictionary. KDIST_FAULTS is the number of
seeds.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress

import pytest

from kdist_trainer.object_store.errors import ObjectChangedError
from kdist_trainer.object_store.store import ObjectStore, Tag
from tests.trainer.object_store.s3_server import S3Server, drawn
from tests.trainer.object_store.test_store import race

SEEDS = int(os.environ.get("KDIST_FAULTS", "2"))
OPERATIONS = 150
SHARE = 0.25
NAMES = [f"{folder}/{name}" for folder in ("a", "b") for name in ("1", "2", "3", "4")]


class Model:
    """What the store must hold after every operation, each of which is checked."""

    def __init__(self, store: ObjectStore, generator: random.Random) -> None:
        self.store = store
        self.random = generator
        self.objects: dict[str, bytes] = {}
        self.tags: dict[str, Tag] = {}
        self.number = 0

    def step(self) -> None:
        """One operation on one name."""
        verbs = [self.get, self.put, self.put_new, self.replace, self.write, self.delete]
        self.random.choice([*verbs, self.list])(self.random.choice(NAMES))

    def content(self) -> bytes:
        """What was never written before."""
        self.number += 1
        return f"{self.number} ".encode() + self.random.randbytes(self.random.choice([0, 9, 5000]))

    def get(self, name: str) -> None:
        if name not in self.objects:
            with pytest.raises(FileNotFoundError):
                self.store.get(name, 10_000)
            return
        found = self.store.get(name, 10_000)
        assert (found.data, found.tag) == (self.objects[name], self.tags.get(name, found.tag))
        self.tags[name] = found.tag

    def put(self, name: str) -> None:
        data = self.content()
        self.tags[name] = self.store.put(name, data)
        self.objects[name] = data

    def put_new(self, name: str) -> None:
        data = self.content()
        if name in self.objects:
            with pytest.raises(FileExistsError):
                self.store.put_new(name, data)
            return
        self.tags[name] = self.store.put_new(name, data)
        self.objects[name] = data

    def replace(self, name: str) -> None:
        data, tag = self.content(), self.tags.get(name, Tag('"none"'))
        if name in self.objects and name in self.tags:
            self.tags[name] = self.store.replace(name, data, tag)
            self.objects[name] = data
        with pytest.raises(ObjectChangedError):
            self.store.replace(name, self.content(), tag)

    def write(self, name: str) -> None:
        data = self.content()
        with self.store.create(name) as file:
            file.write(data)
        self.objects[name] = data
        self.tags.pop(name, None)

    def delete(self, name: str) -> None:
        self.store.delete(name)
        self.objects.pop(name, None)
        self.tags.pop(name, None)

    def list(self, name: str) -> None:
        folder = name.split("/")[0]
        found = {one.name: one.size for one in self.store.list(folder)}
        assert found == {
            one: len(data) for one, data in self.objects.items() if one.startswith(f"{folder}/")
        }


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_operations_leave_what_they_say(
    store: ObjectStore, server: S3Server, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdist_trainer.object_store.store.FIRST_WAIT_SECONDS", 0.001)
    model = Model(store, random.Random(seed))
    with server.failing(drawn(seed, SHARE)):
        for _ in range(OPERATIONS):
            model.step()
    assert {key: entry.data for key, entry in server.objects.items()} == {
        f"a/prefix/{name}": data for name, data in model.objects.items()
    }
    assert server.uploads == {}
    assert len(server.requests) > OPERATIONS


@pytest.mark.parametrize("seed", range(SEEDS))
def test_lost_replies_make_no_second_winner(
    store: ObjectStore, server: S3Server, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdist_trainer.object_store.store.FIRST_WAIT_SECONDS", 0.001)
    created: list[int] = []
    replaced: list[int] = []

    def take(number: int) -> None:
        with suppress(FileExistsError):
            store.put_new("lock", f"created by {number}".encode())
            created.append(number)
        with suppress(ObjectChangedError):
            store.replace("lock", f"taken by {number}".encode(), free)
            replaced.append(number)

    with server.failing(drawn(seed, SHARE)):
        free = store.put_new("lock", b"free")
        race(take)
    assert (created, len(replaced)) == ([], 1)
    assert server.objects["a/prefix/lock"].data == f"taken by {replaced[0]}".encode()
    store.delete("lock")
    with server.failing(drawn(-seed, SHARE)):
        race(take)
    assert (len(created), len(replaced)) == (1, 1)
    assert server.objects["a/prefix/lock"].data == f"created by {created[0]}".encode()
