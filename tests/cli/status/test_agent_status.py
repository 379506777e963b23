"""What an agent reports of the others that it hears is read, and nothing is made of rubbish."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from kdist.status import documents
from kdist.status.agent_status import AgentStatus, PeerStatus, read_training
from kdist.status.job_status import JobStatus, Nodes, Phase
from kdist.views.status_table import status_rows
from tests.cli.status.objects import report


def test_the_agents_that_are_heard_are_read_with_the_age_of_the_news() -> None:
    peers = {"heard": ["10.0.0.1", 7], "silent": ["10.0.0.2"], "age_seconds": 0.5}
    found = AgentStatus.read("digits-0", {**report(), "peers": peers})
    assert found is not None
    assert found.peers == PeerStatus(frozenset({"10.0.0.1"}), frozenset({"10.0.0.2"}), 0.5)


@pytest.mark.parametrize(
    "peers",
    [None, [], "all", {}, {"heard": ["10.0.0.1"]}, {"heard": [], "age_seconds": math.inf}],
)
def test_an_agent_that_cannot_tell_testifies_nothing(peers: object) -> None:
    found = AgentStatus.read("digits-0", {**report(), "peers": peers})
    assert found is not None
    assert found.peers is None


def test_a_field_of_a_type_that_nothing_reads_is_refused_and_not_left_out() -> None:
    @dataclass
    class Odd:
        pod: str
        rate: complex

    for _ in range(2):  # what is refused is not remembered
        with pytest.raises(TypeError, match=r"Odd\.rate: complex has no reader"):
            documents.read_fields(Odd, {"pod": "a"})
    assert documents.read_fields(Odd, {"pod": "a"}, rate=1j) == {"pod": "a", "rate": 1j}


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"checkpoint_interval": 90.0, "checkpoint_bytes": 1 << 30}, "every 1:30, 40 GiB an hour"),
        ({"checkpoint_interval": 60.0}, "every 1:00"),
        ({"checkpoint_bytes": 1 << 30}, None),
        ({"checkpoint_interval": "soon", "checkpoint_bytes": math.inf}, None),
    ],
)
def test_how_often_a_run_saves_and_what_it_writes_is_shown(
    told: dict[str, object], shown: str | None
) -> None:
    found = AgentStatus.read("digits-0", {**report(), **told})
    assert found is not None
    status = JobStatus(
        *("digits", "ml", "job", Phase.RUNNING, "", "", Nodes(1, 1, 1)), **read_training([found])
    )
    assert dict(status_rows(status)).get("saves") == shown


def test_the_address_of_the_run_in_its_tracker_is_shown() -> None:
    told = [
        AgentStatus.read("digits-0", {**report(), "tracker": url}) for url in (None, "https://a")
    ]
    status = JobStatus(
        *("digits", "ml", "job", Phase.RUNNING, "", "", Nodes(2, 2, 2)),
        **read_training([each for each in told if each is not None]),
    )
    assert dict(status_rows(status))["tracker"] == "https://a"
