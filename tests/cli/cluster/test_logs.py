"""A log that is followed loses no line and doubles none, however often its connection is cut."""

from __future__ import annotations

from typing import Any

import pytest

from kdist.cluster import ApiError, ApiNotFoundError
from tests.cli.cluster.api import Asked, Reply, refusal
from tests.cli.cluster.conftest import Connect, Serve

LINES = [f"2026-01-01T00:00:0{second}.000000000Z line {second}" for second in range(6)]


class Kubelet:
    """A container that writes `LINES`, over connections that are cut after two lines each."""

    def __init__(self, *, ended_as: dict[str, Any]) -> None:
        self._ended_as = ended_as
        self.asked: list[dict[str, str]] = []

    def __call__(self, asked: Asked) -> Reply:
        if not asked.path.endswith("/log"):
            over = bool(self.asked) and self.asked[-1].get("sinceTime", "") >= LINES[-2].split()[0]
            state = (
                self._ended_as
                if over
                else {"name": "trainer", "containerID": "c1", "state": {"running": {}}}
            )
            return Reply(
                document={"metadata": {"name": "a"}, "status": {"containerStatuses": [state]}}
            )
        self.asked.append(dict(asked.query))
        since = asked.query.get("sinceTime", "")
        left = [line for line in LINES if line.split()[0] >= since]
        return Reply(lines=left[:3], cut=len(left) > 3)


@pytest.mark.parametrize(
    "ended_as",
    [
        {"name": "trainer", "containerID": "c1", "state": {"terminated": {}}},
        {"name": "trainer", "containerID": "c2", "state": {"running": {}}},
    ],
    ids=["it ended", "another took its place"],
)
def test_a_cut_log_goes_on_with_the_next_line(
    ended_as: dict[str, Any], serve: Serve, connect: Connect
) -> None:
    kubelet = Kubelet(ended_as=ended_as)
    found = list(connect(serve(kubelet).url).logs("a", follow=True))
    assert found == [f"line {second}" for second in range(6)]
    assert len(kubelet.asked) > 2


def test_stamps_are_shown_where_they_are_asked_for(serve: Serve, connect: Connect) -> None:
    api = serve(lambda _: Reply(lines=LINES))
    assert (
        list(connect(api.url).logs("a", timestamps=True, tail=6, previous=True, since=90)) == LINES
    )
    query = api.asked[-1].query
    assert query["tailLines"] == "6"
    assert query["previous"] == "true"
    assert query["sinceSeconds"] == "90"
    assert query["container"] == "trainer"
    list(connect(api.url).logs("a", since="2026-01-01T00:00:00Z"))
    assert api.asked[-1].query["sinceTime"] == "2026-01-01T00:00:00Z"


def test_equal_stamps_are_two_lines(serve: Serve, connect: Connect) -> None:
    api = serve(lambda _: Reply(lines=[LINES[0], LINES[0]]))
    assert list(connect(api.url).logs("a")) == ["line 0", "line 0"]


def test_a_container_that_has_not_begun_and_a_pod_that_is_gone_are_told_apart(
    serve: Serve, connect: Connect
) -> None:
    waiting = refusal(
        400, 'container "trainer" in pod "a" is waiting to start: ContainerCreating', "BadRequest"
    )
    with pytest.raises(ApiError, match="waiting to start: ContainerCreating") as raised:
        list(connect(serve(lambda _: waiting).url).logs("a"))
    assert raised.value.status == 400
    with pytest.raises(ApiNotFoundError):
        list(
            connect(
                serve(lambda _: refusal(404, 'pods "a" not found', "NotFound", name="a")).url
            ).logs("a")
        )
