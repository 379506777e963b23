"""Rows of the dashboard of one training: where its time went, what is kept, and what failed."""

from __future__ import annotations

from kdist.dashboards.panels import RATE, Row, at_least, at_most, bars, lines, stack, stat

_UNPRODUCTIVE = 'increase(kdist_wall_seconds_total{category!~"productive_step|unobserved"}[$__range])'
_WALL = f"sum(rate(kdist_wall_seconds_total{{}}[{RATE}]))"
_EXITS = 'label_replace(kdist_worker_exits_total{}, "signal", "", "signal", "none")'


def _mean_duration(mode: str) -> str:
    labels = f'{{op="save", mode="{mode}"}}'
    total, count = (f"sum(rate(kdist_checkpoint_duration_seconds_{end}{labels}[$__rate_interval]))" for end in ("sum", "count"))
    return f"{total} / ({count} > 0)"


GOODPUT = Row(
    "Goodput",
    (
        stack(
            "Wall time",
            "Share of the agents' wall time by what it went into",
            "percentunit",
            {
                "{{category}}": f"sum by (category) (rate(kdist_wall_seconds_total{{}}[{RATE}]))"
                f" / ignoring(category) group_left() {_WALL}"
            },
            maximum=1.0,
            width=12,
            height=8,
        ),
        bars(
            "What was not productive",
            "Seconds of all agents within the shown time",
            "s",
            {
                "{{category}}": f"topk(6, sum by (category) ({_UNPRODUCTIVE}) > 0)",
            },
            width=6,
            height=8,
        ),
        stat(
            "Lost progress",
            "Productive time that was done again after a restart",
            "sum(kdist_lost_progress_seconds_total{})",
            "s",
            decimals=1,
            height=4,
        ),
        stat(
            "Time to recover",
            "From the last failure to the first new step",
            "max(kdist_time_to_recover_seconds{})",
            "s",
            height=4,
            decimals=1,
        ),
        stat(
            "Time to first step",
            "From the start of this generation's ranks to their first step",
            "max(kdist_time_to_first_step_seconds{})",
            "s",
            height=4,
            decimals=1,
        ),
        stat(
            "Rendezvous",
            "Mean time to form a group, of the agent that waited most",
            "max(kdist_rendezvous_duration_seconds_sum{} / kdist_rendezvous_duration_seconds_count{})",
            "s",
            height=4,
            decimals=1,
        ),
    ),
)

CHECKPOINTS = Row(
    "Checkpoints",
    (
        lines(
            "Save duration",
            "Blocking is the stall that training sees, total lasts until the commit is durable",
            "s",
            {"blocking": _mean_duration("blocking"), "total": _mean_duration("total")},
            bridged=True,
            minimum=0.0,
            width=6,
        ),
        lines(
            "Age and interval",
            "Time since the last durable save, beside the time that lies between two",
            "s",
            {
                "age": "clamp_min(time() - max(kdist_checkpoint_last_success_timestamp_seconds{}), 0)",
                "interval": "max(kdist_checkpoint_interval_seconds{})",
            },
            minimum=0.0,
            width=6,
        ),
        lines(
            "Size", "Of the last good checkpoint", "bytes", {"size": "max(kdist_checkpoint_size_bytes{})"}, minimum=0.0, width=6
        ),
        bars(
            "Tried, failed, passed over",
            "Saves and restores, failures by cause, and checkpoints that a resume found damaged",
            "none",
            {
                "{{op}}": "sum by (op) (kdist_checkpoint_attempts_total{})",
                "{{op}} failed: {{cause}}": "sum by (op, cause) (kdist_checkpoint_failures_total{})",
                "passed over: {{cause}}": "sum by (cause) (kdist_checkpoint_fallbacks_total{})",
            },
            width=6,
        ),
    ),
)

RELIABILITY = Row(
    "Reliability",
    (
        lines(
            "Group",
            "Ranks of the group, the most it may have, and its generation",
            "none",
            {
                "ranks": "max(kdist_world_size{})",
                "at most": "max(kdist_world_size_max{})",
                "generation": "max(kdist_generation{})",
            },
            minimum=0.0,
        ),
        bars(
            "Ends of workers",
            "By cause and signal, normal ends included",
            "none",
            {"{{cause}} {{signal}}": f"sum by (cause, signal) ({_EXITS})"},
            width=6,
        ),
        bars(
            "Restarts",
            "By cause, as the agent saw them that saw most; to the other nodes a failed rank's node is lost",
            "none",
            {"{{cause}}": "max by (cause) (kdist_worker_group_restarts_total{})"},
            width=5,
            steps=at_most(1, 4),
        ),
        stat(
            "Restarts left",
            "Of the job's budget; a checkpoint of a later step fills it up",
            "min(kdist_restarts_remaining{})",
            "none",
            width=5,
            height=7,
            steps=at_least(2, 4),
        ),
    ),
)
