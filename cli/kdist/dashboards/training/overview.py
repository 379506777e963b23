"""First row of the dashboard of one training: a glance tells whether it is well."""

from __future__ import annotations

from kdist.dashboards.panels import RATE, Row, at_least, at_most, stat
from kdist.steer.anatomy import SLOW_BY

_BUSY = f'sum by (rank) (rate(kdist_step_phase_seconds_total{{phase=~"data_wait|forward|backward|optimizer"}}[{RATE}]))'
_BUSY_OF_STEP = f"{_BUSY} / sum by (rank) (rate(kdist_steps_total{{}}[{RATE}]))"
_WALL = "increase(kdist_wall_seconds_total{}[$__range])"
_PRODUCTIVE = 'increase(kdist_wall_seconds_total{category="productive_step"}[$__range])'
_UNOBSERVED = 'increase(kdist_wall_seconds_total{category="unobserved"}[$__range])'
_LOST = "increase(kdist_lost_progress_seconds_total{}[$__range])"

OVERVIEW = Row(
    "Overview",
    (
        stat("State", "What the agents are doing", "max by (state) (kdist_job_state{} == 1)", "none", width=4, shows_name=True),
        stat(
            "Progress",
            "Steps done of the steps to do",
            "max(kdist_last_step{}) / max(kdist_target_steps{})",
            "percentunit",
            minimum=0.0,
            maximum=1.0,
        ),
        stat(
            "Time to go",
            "At the present pace, without interruptions",
            "clamp_min(max(kdist_target_steps{}) - max(kdist_last_step{}), 0) * max(kdist_step_duration_ewma_seconds{})",
            "s",
        ),
        stat(
            "Last step",
            "Time since any rank finished a step",
            "clamp_min(time() - max(kdist_last_step_timestamp_seconds{}), 0)",
            "s",
            decimals=1,
            steps=at_most(60, 120),
        ),
        stat(
            "Loss",
            "Training loss of the last step that was told: the mean over all ranks, of a script what its rank 0 reports",
            "max(kdist_loss{})",
            "none",
            decimals=4,
        ),
        stat(
            "Samples",
            "Samples per second, all ranks together",
            f"sum(rate(kdist_samples_total{{}}[{RATE}]))",
            "cps",
            width=4,
            decimals=0,
        ),
        stat("Ranks", "Ranks in the current group", "max(kdist_world_size{})", "none", width=4),
        stat(
            "Goodput",
            "Share of the shown time that went into steps that count, their waiting for data left out",
            f"clamp_min((sum({_PRODUCTIVE}) - sum({_LOST})) / sum({_WALL}), 0)"
            f" unless (sum({_UNOBSERVED}) > 0 unless sum({_PRODUCTIVE}) > 0)",
            "percentunit",
            width=4,
            decimals=1,
            steps=at_least(0.5, 0.8),
        ),
        stat(
            "Restarts",
            "Restarts of the group of ranks since its agents began",
            "max(sum by (instance) (kdist_worker_group_restarts_total{}) or 0 * kdist_generation{})",
            "none",
            steps=at_most(1, 4),
        ),
        stat("Lost steps", "Steps done again after a restart", "sum(kdist_lost_steps_total{})", "none", steps=at_most(1, 1000)),
        stat(
            "Checkpoint age",
            "Time since the last durable save: what a failure now would lose",
            "clamp_min(time() - max(kdist_checkpoint_last_success_timestamp_seconds{}), 0)",
            "s",
            decimals=0,
        ),
        stat("Checkpoint step", "Step of the last durable save", "max(kdist_checkpoint_last_success_step{})", "none"),
        stat(
            "Step time",
            "Median time of a step",
            f"histogram_quantile(0.5, sum by (le) (rate(kdist_step_duration_seconds_bucket{{}}[{RATE}])))",
            "s",
            width=4,
        ),
        stat(
            "Slowest to median rank",
            "Busy time of the slowest rank over that of the median rank",
            f"max({_BUSY_OF_STEP}) / quantile(0.5, {_BUSY_OF_STEP})",
            "none",
            width=4,
            decimals=2,
            steps=at_most(1.2, SLOW_BY),
        ),
    ),
)
