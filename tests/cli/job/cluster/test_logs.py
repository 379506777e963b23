"""The logs of all pods are one stream: in the order of their times, over restarts and replaced
pods, each line once.
"""

from __future__ import annotations

import json
import threading

import pytest

from kdist.cluster import Cluster
from kdist.errors import NotFoundError, UsageError
from kdist.job import cluster as jobs
from kdist.job.cluster.logs import Follower, PodLine, RankFilter, read, without_times
from kdist.job.job import LogSelection
from kdist.status import read_pod
from tests.cli.cluster.conftest import Connect, Serve
from tests.cli.job.cluster.test_wait import DONE
from tests.cli.job.cluster.world import FIRST, SECOND, World, lines
from tests.cli.status.objects import (
    RUNS,
    container,
    ended_pod,
    fetching_pod,
    pod,
    terminated,
    unscheduled,
    waiting,
)


def test_what_is_there_comes_in_the_order_of_its_times(cluster: Cluster, world: World) -> None:
    world.logs = {
        FIRST: lines("a", "c", at=0)[:1] + lines("c", at=2),
        SECOND: lines("b", at=1) + lines("d", at=3),
    }
    found = [
        (line.source, line.text)
        for line in read(cluster, jobs.fetch_snapshot(cluster, "digits"), LogSelection())
    ]
    assert found == [("digits-0", "a"), ("digits-1", "b"), ("digits-0", "c"), ("digits-1", "d")]


def test_one_pod_and_its_last_lines_can_be_chosen(cluster: Cluster, world: World) -> None:
    world.logs = {FIRST: lines("a"), SECOND: lines("b", "c", "d")}
    wanted = LogSelection(pod="1", tail=2)
    assert [
        line.text for line in read(cluster, jobs.fetch_snapshot(cluster, "digits"), wanted)
    ] == ["c", "d"]


def test_where_there_is_no_log_yet_the_reason_is_reported(cluster: Cluster, world: World) -> None:
    world.pods = [unscheduled(0, "0/2 nodes are available: 2 Insufficient cpu.")]
    with pytest.raises(NotFoundError, match="nothing to read yet: digits-0-abcde finds no node"):
        list(read(cluster, jobs.fetch_snapshot(cluster, "digits"), LogSelection()))
    with pytest.raises(NotFoundError, match="no container has been restarted"):
        list(read(cluster, jobs.fetch_snapshot(cluster, "digits"), LogSelection(previous=True)))


def test_the_log_of_an_init_container_is_read_where_it_has_run(
    cluster: Cluster, world: World
) -> None:
    world.pods = [fetching_pod(0, RUNS), fetching_pod(1, RUNS)]
    world.logs = {f"{FIRST}/fetch-data-0": lines("a", "b")}
    snapshot = jobs.fetch_snapshot(cluster, "digits")
    wanted = LogSelection(container="fetch-data-0")
    assert [line.text for line in read(cluster, snapshot, wanted)] == ["a", "b"]
    with pytest.raises(NotFoundError, match="nothing to read yet: digits starts: fetching") as none:
        list(read(cluster, snapshot, LogSelection()))
    assert none.value.next_command == "kdist logs digits -n ml -f -c fetch-data-0"
    with pytest.raises(UsageError, match="have no container `fetch-data-7`") as refused:
        list(read(cluster, snapshot, LogSelection(container="fetch-data-7")))
    assert refused.value.hint == "their containers: fetch-data-0, trainer"


def test_the_log_of_an_init_container_is_followed_to_its_end(
    cluster: Cluster, world: World
) -> None:
    world.pods = [fetching_pod(0, {"state": {"waiting": {"reason": "PodInitializing"}}})]
    reader = Reader(cluster, LogSelection(container="fetch-data-0"))
    world.logs[f"{FIRST}/fetch-data-0"] = lines("a", "b")
    reader.until("a", "b")
    reader.finish()
    assert reader.texts == ["a", "b"], "it ended though the job goes on"


class Reader:
    """Follows in a thread; `texts` is what came so far."""

    def __init__(self, cluster: Cluster, wanted: LogSelection | None = None) -> None:
        self.texts: list[str] = []
        self.reported: list[str] = []
        self.follower = Follower(
            cluster, "digits", wanted or LogSelection(), notify=self.reported.append, interval=0.02
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self.follower.lines():
            self.texts.append(line.text)

    def until(self, *texts: str) -> None:
        """Wait until these have come; what comes otherwise fails the test."""
        for _ in range(3000):
            if sorted(self.texts) == sorted(texts):
                return
            self._thread.join(0.01)
        pytest.fail(f"expected {sorted(texts)}, found {sorted(self.texts)}")

    def finish(self) -> None:
        """Wait for the end."""
        self._thread.join(30)
        assert not self._thread.is_alive()


def restarted(times: int) -> dict[str, object]:
    """Pod 0, whose container runs again."""
    again = container(state={"running": {}}, ready=True, restarts=times, before=terminated(201))
    return pod(0, containerStatuses=[again])


def test_a_container_that_is_started_again_loses_and_doubles_no_line(
    cluster: Cluster, world: World
) -> None:
    world.pods, world.logs = [pod(0)], {FIRST: lines("a", "b")}
    reader = Reader(cluster)
    reader.until("a", "b")
    # The container wrote one more line and died; the next one has begun before anybody looked.
    world.before[FIRST] = lines("a", "b", "last words")
    vars(world).update(pods=[restarted(1)], logs={FIRST: lines("again", at=10)})
    reader.until("a", "b", "last words", "again")
    world.pods, world.workload = [ended_pod(0, 0, "Completed")], DONE
    reader.finish()
    assert reader.texts == ["a", "b", "last words", "again"]


def test_a_pod_that_replaces_another_is_followed_and_the_end_is_noticed(
    cluster: Cluster, world: World
) -> None:
    world.pods, world.logs = [pod(0)], {FIRST: lines("a")}
    reader = Reader(cluster)
    reader.until("a")
    world.logs["digits-0-fghij"] = lines("b", at=5)
    world.pods = [pod(0, name="digits-0-fghij")]
    reader.until("a", "b")
    world.pods, world.workload = [ended_pod(0, 0, "Completed", name="digits-0-fghij")], DONE
    reader.finish()
    assert reader.follower.snapshot is not None
    assert reader.follower.snapshot.status.phase == "Succeeded"


def test_waiting_for_the_first_line_says_why_once_for_each_reason(
    cluster: Cluster, world: World
) -> None:
    world.pods = [unscheduled(0, "0/2 nodes are available: 2 Insufficient cpu.")]
    reader = Reader(cluster)
    while not reader.reported:
        threading.Event().wait(0.01)
    world.pods = [pod(0, phase="Pending", **waiting("ImagePullBackOff", "reg/x: not found"))]
    while len(reader.reported) < 2:
        threading.Event().wait(0.01)
    world.pods, world.logs = [pod(0)], {FIRST: lines("a")}
    reader.until("a")
    assert "finds no node" in reader.reported[0]
    assert "does not exist" in reader.reported[1]
    world.workload, world.pods = DONE, [ended_pod(0, 0, "Completed")]
    reader.finish()


def test_a_reason_is_not_reported_again_for_having_lasted_longer() -> None:
    said = ["for 59 s: its controller", "for 1:00: its controller", "for 1:00:07: its controller"]
    assert len({without_times(f"nobody has made pods {each}") for each in said}) == 1
    assert (
        len({without_times(f"{count} of 2 needed nodes are at the rendezvous") for count in (1, 2)})
        == 2
    )


def test_a_limit_holds_for_what_was_there_and_not_for_what_comes(
    cluster: Cluster, world: World
) -> None:
    world.pods, world.logs = [pod(0)], {FIRST: lines("a", "b", "c")}
    reader = Reader(cluster, LogSelection(tail=1))
    reader.until("c")
    world.logs[FIRST] = lines("a", "b", "c", "d", "e")
    reader.until("c", "d", "e")
    world.workload, world.pods = DONE, [ended_pod(0, 0, "Completed")]
    reader.finish()
    assert reader.texts == ["c", "d", "e"]


def test_a_job_that_is_deleted_meanwhile_ends_the_following(cluster: Cluster, world: World) -> None:
    world.pods, world.logs = [pod(0)], {FIRST: lines("a")}
    reader = Reader(cluster)
    reader.until("a")
    world.config_map, world.workload, world.pods = None, None, []
    reader.finish()
    assert reader.texts == ["a"]


def reported(index: int, event: str, rank: int | None = None, printed: str = "") -> PodLine:
    document = {
        "time": "2026-01-31T12:00:00.000Z",
        "event": event,
        **({} if rank is None else {"rank": rank}),
    }
    return PodLine(read_pod(pod(index)), "", printed + json.dumps(document))


def test_ranks_are_found_in_the_logs_themselves_and_move_with_the_groups() -> None:
    chosen = RankFilter({1}, {})
    printed = PodLine(read_pod(pod(1)), "", "hello from somebody")
    assert not chosen.matches(printed)
    assert chosen.matches(reported(1, "worker-started", rank=1))
    assert chosen.matches(printed)
    assert not chosen.matches(reported(0, "progress", rank=0))
    assert not chosen.matches(reported(1, "rendezvous-completed"))
    assert not chosen.matches(reported(1, "worker-started", rank=0))
    assert not chosen.matches(printed)


def test_ranks_that_the_agents_report_of_need_no_beginning_of_the_log() -> None:
    printed = PodLine(read_pod(pod(1)), "", "hello")
    assert RankFilter({3}, {SECOND: [2, 3]}).matches(printed)
    assert not RankFilter({0}, {SECOND: [2, 3]}).matches(printed)


def test_what_a_rank_prints_is_its_own_and_not_its_neighbours() -> None:
    printed = PodLine(read_pod(pod(1)), "", "[rank3]: hello")
    assert RankFilter({3}, {}).matches(printed)
    assert not RankFilter({2}, {SECOND: [2, 3]}).matches(printed)


def test_what_looks_like_an_event_behind_other_text_is_text() -> None:
    assert reported(0, "progress", rank=0, printed="10%\r20%").event is None
    assert PodLine(read_pod(pod(0)), "", '{"time": broken').event is None


def test_who_no_longer_follows_is_reported_nothing_more(
    world: World, serve: Serve, connect: Connect
) -> None:
    world.pods, world.logs = [pod(0)], {FIRST: lines("a")}
    api = serve(world)
    reported: list[str] = []
    follower = Follower(
        connect(api.url, retry_seconds=0.1),
        "digits",
        LogSelection(),
        notify=reported.append,
        interval=0.02,
    )
    following = follower.lines()
    assert next(following).text == "a"
    world.logs = {FIRST: lines("a", "b")}
    assert next(following).text == "b"
    (reading,) = [thread for thread in threading.enumerate() if thread.name == f"log {FIRST}"]
    following.close()
    api.close()
    reading.join(30)
    assert not reading.is_alive()
    assert reported == []
