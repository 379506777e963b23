"""A watch goes on where it was cut, lists again when its place is gone, and misses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from kdist.cluster import ApiError, watch
from tests.cli.cluster.api import Asked, Reply, refusal
from tests.cli.cluster.conftest import Connect, Serve


def pod(name: str, version: int, **fields: Any) -> dict[str, Any]:
    """A pod as a list or a watch gives it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "uid": name, "resourceVersion": str(version)},
        **fields,
    }


def listing(version: int, *pods: dict[str, Any]) -> Reply:
    """A list at a version."""
    return Reply(document={"metadata": {"resourceVersion": str(version)}, "items": list(pods)})


def event(kind: str, document: dict[str, Any]) -> str:
    """A line of a watch."""
    return json.dumps({"type": kind, "object": document})


class Script:
    """Answers lists and watches, each with the next of its replies; the last watch says nothing and
    ends.
    """

    def __init__(self, lists: list[Reply], watches: list[Reply]) -> None:
        self._lists = lists
        self._watches = watches
        self.watched_from: list[str] = []

    def __call__(self, asked: Asked) -> Reply:
        if "watch" not in asked.query:
            return self._lists.pop(0)
        self.watched_from.append(asked.query["resourceVersion"])
        return self._watches.pop(0) if self._watches else Reply(lines=[])


def seen(events: Iterator[tuple[str, dict[str, Any]]], count: int) -> list[tuple[str, str, str]]:
    """The next events: what, whose, and at which version."""
    return [
        (what, each["metadata"]["name"], each["metadata"]["resourceVersion"])
        for what, each in islice(events, count)
    ]


def test_what_is_there_comes_first_and_then_every_change(serve: Serve, connect: Connect) -> None:
    script = Script(
        [listing(5, pod("a", 3))],
        [Reply(lines=[event("ADDED", pod("b", 6)), event("DELETED", pod("a", 7))])],
    )
    events = connect(serve(script).url).watch("v1", "Pod", selector="x=y")
    assert seen(events, 3) == [("ADDED", "a", "3"), ("ADDED", "b", "6"), ("DELETED", "a", "7")]
    assert script.watched_from == ["5"]


@pytest.mark.parametrize("cut", [True, False], ids=["within an answer", "after it"])
def test_a_cut_watch_goes_on_from_what_it_saw_last(
    cut: bool, serve: Serve, connect: Connect
) -> None:
    script = Script(
        [listing(5)],
        [
            Reply(lines=[event("ADDED", pod("a", 6)), event("BOOKMARK", pod("", 9))], cut=cut),
            Reply(lines=[event("MODIFIED", pod("a", 10))]),
        ],
    )
    events = connect(serve(script).url).watch("v1", "Pod")
    assert seen(events, 2) == [("ADDED", "a", "6"), ("MODIFIED", "a", "10")]
    assert script.watched_from == ["5", "9"], "the bookmark is the place to go on from"


def test_a_line_that_was_cut_in_two_is_asked_for_again(serve: Serve, connect: Connect) -> None:
    half = event("ADDED", pod("a", 6))[:30]
    script = Script([listing(5)], [Reply(lines=[half]), Reply(lines=[event("ADDED", pod("a", 6))])])
    assert seen(connect(serve(script).url).watch("v1", "Pod"), 1) == [("ADDED", "a", "6")]
    assert script.watched_from == ["5", "5"]


GONE = {
    "kind": "Status",
    "status": "Failure",
    "code": 410,
    "reason": "Expired",
    "message": "too old resource version",
}


@pytest.mark.parametrize(
    "gone",
    [Reply(lines=[event("ERROR", GONE)]), Reply(410, GONE)],
    ids=["told as an event", "told as an answer"],
)
def test_a_place_that_is_gone_is_listed_again_and_only_differences_are_reported(
    gone: Reply, serve: Serve, connect: Connect
) -> None:
    script = Script(
        [
            listing(5, pod("a", 1), pod("b", 2), pod("c", 3)),
            listing(50, pod("a", 1), pod("b", 40), pod("d", 41)),
        ],
        [gone],
    )
    events = connect(serve(script).url).watch("v1", "Pod")
    assert [what for what, _, _ in seen(events, 3)] == ["ADDED"] * 3
    assert seen(events, 3) == [("DELETED", "c", "3"), ("MODIFIED", "b", "40"), ("ADDED", "d", "41")]


def test_a_server_that_restarts_during_a_watch_is_waited_for(
    serve: Serve, connect: Connect, reported: list[str]
) -> None:
    script = Script(
        [listing(5)],
        [
            Reply(lines=[event("ADDED", pod("a", 6))], cut=True),
            refusal(503, "starting"),
            Reply(lines=[event("ADDED", pod("b", 7))]),
        ],
    )
    assert len(seen(connect(serve(script).url).watch("v1", "Pod"), 2)) == 2
    assert script.watched_from == ["5", "6", "6"]
    assert reported[-1] == "the API server answers again"


def test_who_may_not_watch_hears_it_at_once(serve: Serve, connect: Connect) -> None:
    script = Script(
        [listing(5)],
        [
            refusal(
                403, 'User "jane" cannot watch resource "pods" in the namespace "ml"', "Forbidden"
            )
        ],
    )
    with pytest.raises(ApiError, match="may not watch pods in namespace ml"):
        list(connect(serve(script).url).watch("v1", "Pod"))


def test_a_watch_ends_when_its_time_is_over(serve: Serve, connect: Connect) -> None:
    script = Script([listing(5, pod("a", 1))], [])
    assert len(list(connect(serve(script).url).watch("v1", "Pod", timeout=0.05))) == 1


def test_a_long_list_comes_in_pages(serve: Serve, connect: Connect) -> None:
    def answer(asked: Asked) -> Reply:
        if "continue" not in asked.query:
            return Reply(
                document={"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "a"}}]}
            )
        return Reply(
            document={"metadata": {"resourceVersion": "9"}, "items": [{"metadata": {"name": "b"}}]}
        )

    found = connect(serve(answer).url).list("v1", "Pod", all_namespaces=True)
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [
        ("Pod", "a"),
        ("Pod", "b"),
    ]


def test_pages_of_large_objects_have_fewer_of_them(serve: Serve, connect: Connect) -> None:
    objects: list[dict[str, Any]] = [
        {"metadata": {"name": f"{number:02}"}, "x": "x" * 400_000} for number in range(40)
    ]
    sizes = []

    def answer(asked: Asked) -> Reply:
        limit, begin = asked.query["limit"], asked.query.get("continue", "0")
        sizes.append(int(limit))
        end = int(begin) + int(limit)
        metadata = {"continue": str(end)} if end < len(objects) else {}
        return Reply(document={"metadata": metadata, "items": objects[int(begin) : end]})

    found = connect(serve(answer).url).list("v1", "Pod", all_namespaces=True)
    assert [each["metadata"]["name"] for each in found] == [
        each["metadata"]["name"] for each in objects
    ]
    assert sizes[0] == watch.PAGE
    assert 1 <= sizes[-1] * 400_000 <= watch.PAGE_BYTES


def test_a_list_whose_pages_the_server_has_forgotten_is_taken_again_and_whole(
    serve: Serve, connect: Connect
) -> None:
    def answer(asked: Asked) -> Reply:
        if "continue" in asked.query:
            return Reply(410, GONE)
        if "limit" in asked.query:
            return Reply(
                document={
                    "metadata": {"continue": "more"},
                    "items": [{"metadata": {"name": "old"}}],
                }
            )
        return Reply(
            document={
                "metadata": {"resourceVersion": "9"},
                "items": [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}],
            }
        )

    found = connect(serve(answer).url).list("v1", "Pod", selector="x=y")
    assert [each["metadata"]["name"] for each in found] == ["a", "b"]
