"""The workload kinds that the tests go through, with what kubectl calls their object."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kdist import backends
from tests.draw import read_seed

RESOURCE = {
    each.name: f"{each.kind.lower()}.{each.api_version.rpartition('/')[0]}"
    for each in map(backends.get, backends.NAMES)
}
# That of every cluster that is new enough, and the one whose pods never end by themselves.
FIRST = ("job", "statefulset")
DRAWN = random.Random(read_seed(Path(__file__).parent)).choice(FIRST)

_MARKED = [
    kind if kind == DRAWN else pytest.param(kind, marks=pytest.mark.wide) for kind in RESOURCE
]
every_kind = pytest.mark.parametrize("kind", _MARKED)
"""Each kind, for tests that take minutes: CI goes through one of `FIRST`, drawn by the commit or by
KDIST_SEED.
"""
operated_kind = pytest.mark.parametrize("kind", [*_MARKED[:2], *list(RESOURCE)[2:]])
"""Each kind, for tests that hold what an operator makes of it: CI goes through those of operators,
and one of `FIRST`.
"""
each_kind = pytest.mark.parametrize("kind", RESOURCE)
"""Each kind, for tests that take seconds."""
