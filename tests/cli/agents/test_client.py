"""The client of an agent's HTTP endpoint: responses that come, come late, or never come."""

from __future__ import annotations

import socket
import time

import pytest

from kdist.agents.client import STATUS_BYTES, AgentClient, PodTransport
from tests import hostile
from tests.cli.conftest import ServeAgent


class Recording:
    """A transport that answers each path with `body`, and records the paths."""

    def __init__(self, body: bytes | None) -> None:
        self.body = body
        self.paths: list[str] = []

    def get(self, path: str, *, timeout: float, most: int) -> bytes | None:  # noqa: ARG002 - the protocol
        self.paths.append(path)
        return self.body


def test_a_sample_holds_status_and_metrics(serve_agent: ServeAgent) -> None:
    client = AgentClient(PodTransport("127.0.0.1", serve_agent(b'{"step": 5}', 200)))
    sample = client.sample()
    assert sample is not None
    assert sample.status == {"step": 5}
    assert sample.metrics == '{"step": 5}'


@pytest.mark.parametrize(
    ("body", "status"), [(b"{}", 503), (b"not json", 200), (b"[]", 200), (b"", 200)]
)
def test_a_response_that_is_no_status_is_none(
    serve_agent: ServeAgent, body: bytes, status: int
) -> None:
    client = AgentClient(PodTransport("127.0.0.1", serve_agent(body, status)))
    assert client.status() is None
    assert client.sample() is None


@pytest.mark.parametrize("port", [0, 70000])
def test_an_impossible_port_gives_no_status(port: int) -> None:
    assert AgentClient(PodTransport("127.0.0.1", port)).status() is None


def test_an_agent_that_accepts_and_stays_silent_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        client = AgentClient(PodTransport("127.0.0.1", silent.getsockname()[1]), timeout=0.2)
        assert client.status() is None
    assert time.monotonic() - began < 60


def test_the_first_transport_that_answers_is_used_from_then_on() -> None:
    cut_off, working = Recording(None), Recording(b"{}")
    client = AgentClient(cut_off, working)
    assert client.sample() is not None
    assert cut_off.paths == ["/status"]
    assert working.paths == ["/status", "/metrics"]


@pytest.mark.parametrize("behaviour", hostile.BEHAVIOURS)
def test_a_hostile_agent_is_given_up_within_one_deadline(behaviour: hostile.Behaviour) -> None:
    with hostile.serve(behaviour) as server:
        began = time.monotonic()
        client = AgentClient(PodTransport("127.0.0.1", server.port), timeout=0.5)
        assert client.status() is None
        assert client.sample() is None
    assert time.monotonic() - began < hostile.LIFE_SECONDS / 2


def test_no_redirect_of_an_agent_is_followed(serve_agent: ServeAgent) -> None:
    port = serve_agent(b'{"state": "running"}', 200)
    with hostile.serve(hostile.redirect_to(port)) as server:
        assert AgentClient(PodTransport("127.0.0.1", server.port)).status() is None
    assert AgentClient(PodTransport("127.0.0.1", port)).status() == {"state": "running"}


def test_an_answer_of_the_largest_size_is_read_and_a_larger_one_is_not(
    serve_agent: ServeAgent,
) -> None:
    body = b'{"state": "running"}'.ljust(STATUS_BYTES)
    assert AgentClient(PodTransport("127.0.0.1", serve_agent(body, 200))).status() == {
        "state": "running"
    }
    assert AgentClient(PodTransport("127.0.0.1", serve_agent(body + b" ", 200))).status() is None
