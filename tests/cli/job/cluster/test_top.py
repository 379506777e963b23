"""Whose step takes how long, who is slow, and how it is shown: from metrics written by hand."""

from __future__ import annotations

import pytest

from kdist.agents import metrics
from kdist.agents.metrics import PHASES, AgentSample, describe_slow
from kdist.views import top


def page(
    rank: int,
    steps: int,
    *,
    data: float = 0.0,
    forward: float = 0.01,
    backward: float = 0.02,
    wait: float = 0.0,
) -> str:
    """Metrics of a rank after so many steps; the seconds are per step."""
    phases = dict.fromkeys(PHASES, 0.0) | {"data_wait": data, "forward": forward}
    phases |= {"backward": backward, "comm_exposed": wait}
    lines = [
        f'kdist_steps_total{{rank="{rank}"}} {steps}',
        f'kdist_samples_total{{rank="{rank}"}} {steps * 8}',
    ]
    lines += [
        f'kdist_step_phase_seconds_total{{rank="{rank}",phase="{name}"}} {each * steps}'
        for name, each in phases.items()
    ]
    lines += [
        f'kdist_collective_seconds_total{{rank="{rank}",op="all_reduce"}} {(wait + 0.004) * steps}'
    ]
    lines += [f'kdist_wall_seconds_total{{category="checkpoint_save"}} {0.001 * steps}']
    return "\n".join(lines)


def reading(rank: int, steps: int, generation: int = 1, **parts: float) -> AgentSample:
    ranks = [{"rank": rank, "step": steps, "phase": "step", "heartbeat_age": 0.1}]
    status = {"generation": generation, "world_size": 2, "ranks": ranks, "step": steps}
    return AgentSample(status, page(rank, steps, **parts))


def test_a_rank_is_shown_by_its_mean_step_since_the_reading_before() -> None:
    before = {"a": reading(0, 100, forward=0.5)}
    text = page(0, 110, forward=(0.5 * 100 + 0.01 * 10) / 110)
    now = {"a": AgentSample(reading(0, 110).status, text)}
    whole = metrics.breakdown_rows(now)[0]
    recent = metrics.breakdown_rows(now, before)[0]
    assert (recent.steps, whole.steps) == (10, 110)
    assert recent.phases["forward"] == pytest.approx(0.01)
    assert whole.phases["forward"] == pytest.approx(50.1 / 110)
    assert whole.collectives == {"all_reduce": pytest.approx(0.004)}
    assert (
        recent.collective_seconds
        == recent.to_document()["allReduceSeconds"]
        == pytest.approx(0.004)
    )
    assert whole.checkpoint == pytest.approx(0.001)


def test_the_slow_rank_is_reported_by_its_busy_time_although_its_all_reduces_are_the_shortest() -> (
    None
):
    now = {f"pod-{rank}": reading(rank, 50, wait=0.05) for rank in (0, 1, 3)}
    now["pod-2"] = reading(2, 50, data=0.05)
    rows = metrics.breakdown_rows(now)
    assert [row.rank for row in rows if row.slow] == [2]
    assert min(rows, key=lambda row: row.collective_seconds or 0).rank == 2
    printed = "rank 2 on pod-2 is slow: busy 2.7 times as long as the others, "
    assert list(describe_slow(rows)) == [f"{printed}most of it in waiting for data"]
    assert top.cells(rows[2])[-1] == "SLOW"


def test_what_a_rank_exchanges_is_reported_by_kind_and_shown_together() -> None:
    gathered = "\n".join(
        f'kdist_collective_seconds_total{{rank="0",op="{op}"}} {seconds}'
        for op, seconds in (("all_gather", 3.0), ("reduce_scatter", 1.0))
    )
    text = f'kdist_steps_total{{rank="0"}} 100\n{gathered}'
    (row,) = metrics.breakdown_rows({"a": AgentSample(reading(0, 100).status, text)})
    spent = {"all_gather": pytest.approx(0.03), "reduce_scatter": pytest.approx(0.01)}
    assert row.to_document()["collectiveSeconds"] == spent
    assert row.to_document()["allReduceSeconds"] is None
    assert "40 ms" in top.cells(row)


def test_of_two_ranks_too_the_slower_one_is_named() -> None:
    now = {"a": reading(0, 50, wait=0.03), "b": reading(1, 50, backward=0.05)}
    rows = metrics.breakdown_rows(now)
    assert [row.rank for row in rows if row.slow] == [1]


def test_equal_ranks_and_a_rank_alone_are_not_slow() -> None:
    equal = {"a": reading(0, 50), "b": reading(1, 50, forward=0.012)}
    assert not any(row.slow for row in metrics.breakdown_rows(equal))
    alone = {"a": reading(0, 50, forward=9.0)}
    assert not any(row.slow for row in metrics.breakdown_rows(alone))


def test_counters_that_were_reset_are_taken_as_they_are() -> None:
    row = metrics.breakdown_rows({"a": reading(0, 5)}, {"a": reading(0, 100)})[0]
    assert row.steps == 5
    assert row.phases["backward"] == pytest.approx(0.02)


def test_an_agent_left_behind_in_an_older_generation_is_not_shown() -> None:
    now = {"a": reading(0, 9, generation=2), "cut-off": reading(0, 5, generation=1)}
    rows = metrics.breakdown_rows(now)
    assert [(row.rank, row.pod) for row in rows] == [(0, "a")]


def test_a_rank_that_has_not_stepped_yet_is_shown_without_times() -> None:
    ranks = [{"rank": 0, "step": None, "phase": "init", "heartbeat_age": 12.0}]
    silent = AgentSample({"generation": 1, "ranks": ranks}, "")
    row = metrics.breakdown_rows({"a": silent})[0]
    assert top.cells(row) == ("0", "a", "init", "-", *["-"] * 9, "silent for 12 s")


def test_of_very_many_ranks_the_slow_ones_are_among_those_shown() -> None:
    now = {f"pod-{rank:03}": reading(rank, 50) for rank in range(199)}
    now["pod-199"] = reading(199, 50, forward=0.2)
    shown, left = top.choose(metrics.breakdown_rows(now), 20)
    assert (len(shown), left, shown[-1].rank) == (20, 180, 199)


def test_the_headline_is_what_rank_0_says() -> None:
    leader = AgentSample({**reading(0, 8).status, "loss": 0.5, "target_steps": 1000}, "")
    now = {"b": reading(1, 7), "a": leader}
    expected = "d · step 8/1,000 · loss 0.5 · 2 ranks, generation 1 · no checkpoint yet"
    assert top.headline("d", now) == expected


def test_the_throughput_is_that_of_all_agents() -> None:
    now = {
        name: AgentSample({**reading(rank, 8).status, "samples_per_second": 100.0}, "")
        for rank, name in enumerate("ab")
    }
    assert "200 samples/s" in top.headline("d", now)
    assert top.to_document("d", now, [])["samplesPerSecond"] == 200


def test_programs_get_every_number() -> None:
    now = {"a": reading(0, 10)}
    document = top.to_document("d", now, metrics.breakdown_rows(now))
    assert (document["kind"], document["step"], document["worldSize"]) == ("Top", 10, 2)
    assert set(document["ranks"][0]["phases"]) == set(PHASES)


def test_an_answer_of_any_shape_is_no_trouble() -> None:
    status = {"ranks": [1, {"rank": "x"}, {"rank": 3, "step": "y"}], "generation": "z"}
    odd = AgentSample(status, 'kdist_steps_total{rank="q"} 1')
    rows = metrics.breakdown_rows({"a": odd, "b": AgentSample()})
    assert [(row.rank, row.step) for row in rows] == [(3, None)]
