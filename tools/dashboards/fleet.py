"""The dashboard of all trainings: which run, which are stalled, and where the time of the machines
goes.
"""

from kdist.agents.metrics import STRAGGLER_RATIO
from tools.dashboards.goodput import OBSERVED, OF_ALL, PRODUCTIVE, WALL
from tools.dashboards.model import (
    BUSY,
    GOODPUT,
    RATE,
    RESTARTED,
    RESTARTS,
    STALLED_SECONDS,
    Dashboard,
    Kind,
    Panel,
    PanelRow,
    Threshold,
    Variable,
    at_least,
    at_most,
    bars,
    lines,
    stack,
    stat,
)

_BY_JOB = "by (namespace, kdist_job)"
_BUSY_OF_RANK = (
    f"sum by (namespace, kdist_job, rank) (rate({BUSY}[{RATE}]))"
    f" / sum by (namespace, kdist_job, rank) (rate(kdist_steps_total{{}}[{RATE}]))"
)

NOW = PanelRow(
    "Now",
    (
        stat(
            "Trainings",
            "Jobs whose agents export metrics",
            f"count(max {_BY_JOB} (kdist_job_info{{}}))",
            "none",
            width=4,
            height=3,
        ),
        stat(
            "At work",
            "Jobs that make steps",
            f'count(max {_BY_JOB} (kdist_job_state{{state="running"}}) == 1) or vector(0)',
            "none",
            width=4,
            height=3,
        ),
        stat(
            "Ranks",
            "Ranks of all worker groups",
            f"sum(max {_BY_JOB} (kdist_world_size{{}}))",
            "none",
            width=4,
            height=3,
        ),
        stat(
            "Samples",
            "Samples per second, all jobs",
            f"sum(rate(kdist_samples_total{{}}[{RATE}]))",
            "cps",
            width=4,
            height=3,
            decimals=0,
        ),
        stat(
            "Goodput",
            "Share of the agents' time, within the shown range, that went into steps",
            OF_ALL,
            "percentunit",
            width=4,
            height=3,
            decimals=1,
            thresholds=at_least(*GOODPUT),
        ),
        stat(
            "Restarts",
            "Of all jobs since their agents started",
            f"sum({RESTARTS}) or vector(0)",
            "none",
            width=4,
            height=3,
        ),
        Panel(
            title="Trainings",
            description="One line for each job",
            kind=Kind.TABLE,
            text_label="state",
            queries={
                "State": "max by (namespace, kdist_job, state) (kdist_job_state{} == 1)",
                "Ranks": f"max {_BY_JOB} (kdist_world_size{{}})",
                "Progress": (
                    f"max {_BY_JOB} (kdist_last_step{{}}) / max {_BY_JOB} (kdist_target_steps{{}})"
                ),
                "Loss": f"max {_BY_JOB} (kdist_loss{{}})",
                "Samples/s": f"sum {_BY_JOB} (rate(kdist_samples_total{{}}[{RATE}]))",
                "FLOP/s": f"sum {_BY_JOB} (rate(kdist_model_flops_total{{}}[{RATE}]))",
                "Goodput": f"(sum {_BY_JOB} ({PRODUCTIVE}) > 0) / sum {_BY_JOB} ({OBSERVED})",
                "Restarts": RESTARTS,
                "Skew": (
                    f"round(max {_BY_JOB} ({_BUSY_OF_RANK}) / quantile {_BY_JOB} (0.5, "
                    f"{_BUSY_OF_RANK}), 0.01)"
                ),
                "Last step": f"time() - max {_BY_JOB} (kdist_last_step_timestamp_seconds{{}})",
            },
            unit="none",
            units={
                "Progress": "percentunit",
                "Goodput": "percentunit",
                "Last step": "s",
                "Samples/s": "cps",
                "FLOP/s": "flops",
            },
            column_thresholds={
                "Goodput": at_least(*GOODPUT),
                "Restarts": (
                    Threshold(None, "neutral"),
                    Threshold(RESTARTED[0], "warning"),
                    Threshold(RESTARTED[1], "bad"),
                ),
                "Skew": (
                    Threshold(None, "neutral"),
                    Threshold(1.2, "warning"),
                    Threshold(STRAGGLER_RATIO, "bad"),
                ),
                "Last step": (
                    Threshold(None, "neutral"),
                    Threshold(STALLED_SECONDS[0], "warning"),
                    Threshold(STALLED_SECONDS[1], "bad"),
                ),
            },
            width=24,
            height=6,
        ),
    ),
)

TIME = PanelRow(
    "Time",
    (
        stack(
            "Agents by what they do",
            "Agents in each category of wall time",
            "none",
            {"{{category}}": f"sum by (category) (rate(kdist_wall_seconds_total{{}}[{RATE}]))"},
            width=12,
            height=8,
            decimals=1,
        ),
        bars(
            "Time by category",
            "Agents' time within the shown range",
            "s",
            {"{{category}}": f"sort_desc(sum by (category) ({WALL}) > 0)"},
            width=6,
            height=8,
        ),
        bars(
            "Longest without a step",
            "Time since the last step of each job",
            "s",
            {
                "{{kdist_job}}": (
                    f"topk(8, clamp_min(time() - max {_BY_JOB} "
                    f"(kdist_last_step_timestamp_seconds{{}}), 0))"
                )
            },
            width=6,
            height=8,
        ),
        lines(
            "Throughput",
            "Samples per second of each job",
            "cps",
            {"{{kdist_job}}": f"sum {_BY_JOB} (rate(kdist_samples_total{{}}[{RATE}]))"},
            width=12,
            minimum=0.0,
        ),
        lines(
            "Loss",
            "Of each job",
            "none",
            {"{{kdist_job}}": f"max {_BY_JOB} (kdist_loss{{}})"},
            width=12,
        ),
    ),
)

MACHINES = PanelRow(
    "Machines",
    (
        lines(
            "Avoided nodes",
            "1 while a job avoids a node, as reported by the controller",
            "none",
            {
                "{{kdist_namespace}} {{kdist_job}} {{node}}": (
                    "max by (kdist_namespace, kdist_job, node) "
                    '(kdist_controller_node_avoided{kdist_namespace=~"$namespace"})'
                )
            },
            width=12,
            minimum=0.0,
            optional=True,
        ),
        bars(
            "Restarts after machine faults",
            "Restarts of each job caused by a GPU or node fault",
            "none",
            {
                "{{kdist_job}} {{cause}}": (
                    "max by (namespace, kdist_job, cause) "
                    '(kdist_worker_group_restarts_total{cause=~"device|node"})'
                )
            },
            width=12,
            optional=True,
            thresholds=at_most(1, 2),
        ),
    ),
    collapsed=True,
)

FLEET = Dashboard(
    uid="kdist-fleet",
    title="kdist / Fleet",
    description="All training jobs: which run, which are stalled, and where machine time goes.",
    rows=(NOW, TIME, MACHINES),
    variables=(
        Variable("namespace", "Namespace", "kdist_job_info", all_value=".*"),
        Variable("job", "Job", "kdist_job_info"),
        Variable("instance", "Instance", "kdist_job_info"),
    ),
    hours=6,
)
