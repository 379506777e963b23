"""Rows of the training dashboard: overview, learning, step breakdown, communication, stragglers."""

from __future__ import annotations

from kdist.agents.metrics import STRAGGLER_RATIO
from tools.dashboards import goodput
from tools.dashboards.model import (
    BUSY,
    GOODPUT,
    RATE,
    RESTARTED,
    RESTARTS,
    SILENT_SECONDS,
    STALLED_SECONDS,
    PanelRow,
    at_least,
    at_most,
    bars,
    lines,
    stack,
    stat,
)

_BUSY = f"sum by (rank) (rate({BUSY}[{RATE}]))"
_BUSY_OF_STEP = f"{_BUSY} / sum by (rank) (rate(kdist_steps_total{{}}[{RATE}]))"

OVERVIEW = PanelRow(
    "Overview",
    (
        stat(
            "State",
            "What the agents are doing",
            "max by (state) (kdist_job_state{} == 1)",
            "none",
            width=4,
            shows_name=True,
        ),
        stat(
            "Progress",
            "Steps done of all steps",
            "max(kdist_last_step{}) / max(kdist_target_steps{})",
            "percentunit",
            minimum=0.0,
            maximum=1.0,
        ),
        stat(
            "Time to go",
            "At the present pace, without interruptions",
            (
                "clamp_min(max(kdist_target_steps{}) - max(kdist_last_step{}), 0) * "
                "max(kdist_step_duration_ewma_seconds{})"
            ),
            "s",
        ),
        stat(
            "Last step",
            "Time since any rank finished a step",
            "clamp_min(time() - max(kdist_last_step_timestamp_seconds{}), 0)",
            "s",
            decimals=1,
            thresholds=at_most(*STALLED_SECONDS),
        ),
        stat(
            "Loss",
            (
                "Training loss of the last reported step: the mean over all ranks; of a script, "
                "what its rank 0 reports"
            ),
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
            (
                "Share of the shown time that went into steps that count, their waiting for "
                "data left out"
            ),
            goodput.OF_TRAINING,
            "percentunit",
            width=4,
            decimals=1,
            thresholds=at_least(*GOODPUT),
        ),
        stat(
            "Restarts",
            "Restarts of the worker group since its agents started",
            f"max({RESTARTS})",
            "none",
            thresholds=at_most(*RESTARTED),
        ),
        stat(
            "Lost steps",
            "Steps done again after a restart",
            "sum(kdist_lost_steps_total{})",
            "none",
            thresholds=at_most(1, 1000),
        ),
        stat(
            "Checkpoint age",
            "Time since the last durable save",
            "clamp_min(time() - max(kdist_checkpoint_last_success_timestamp_seconds{}), 0)",
            "s",
            decimals=0,
        ),
        stat(
            "Checkpoint step",
            "Step of the last durable save",
            "max(kdist_checkpoint_last_success_step{})",
            "none",
        ),
        stat(
            "Step time",
            "Median time of a step",
            (
                "histogram_quantile(0.5, sum by (le) "
                f"(rate(kdist_step_duration_seconds_bucket{{}}[{RATE}])))"
            ),
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
            thresholds=at_most(1.2, STRAGGLER_RATIO),
        ),
    ),
)


_STEPS = f"sum(rate(kdist_steps_total{{}}[{RATE}]))"
_PHASES = f"sum(rate(kdist_step_phase_seconds_total{{}}[{RATE}]))"


def _quantiles(metric: str) -> dict[str, str]:
    rate = f"sum by (le) (rate({metric}_bucket{{}}[{RATE}]))"
    return {
        f"p{share:.0%}".rstrip("%"): f"histogram_quantile({share}, {rate})"
        for share in (0.5, 0.9, 0.99)
    }


LEARNING = PanelRow(
    "Learning",
    (
        lines(
            "Loss",
            (
                "Training loss: the mean over all ranks; of a script, what its rank 0 reports. "
                "Where there is an evaluation, its loss too"
            ),
            "none",
            {"loss": "max(kdist_loss{})", "evaluation": "max(kdist_evaluation_loss{})"},
            width=12,
            height=9,
        ),
        lines(
            "Gradient norm",
            "Before clipping, where it is clipped",
            "none",
            {"norm": "max(kdist_grad_norm{})"},
            logarithmic=True,
            width=6,
            height=9,
        ),
        lines(
            "Learning rate",
            "Of parameter group 0",
            "none",
            {"rate": "max(kdist_learning_rate{})"},
            minimum=0.0,
            width=6,
            height=9,
        ),
        lines(
            "Progress",
            "Highest step done, and the last one that a checkpoint holds",
            "none",
            {
                "step": "max(kdist_last_step{})",
                "checkpoint": "max(kdist_checkpoint_last_success_step{})",
                "target": "max(kdist_target_steps{})",
            },
            width=12,
        ),
        lines(
            "Throughput",
            "Samples per second, all ranks together",
            "cps",
            {"samples": f"sum(rate(kdist_samples_total{{}}[{RATE}]))"},
            minimum=0.0,
            width=6,
        ),
        lines(
            "Steps that were not finite",
            "NaN or infinite loss or gradient, per second",
            "cps",
            {"{{kind}}": f"sum by (kind) (rate(kdist_nonfinite_total{{}}[{RATE}]))"},
            minimum=0.0,
            width=6,
        ),
    ),
)

BREAKDOWN = PanelRow(
    "Step breakdown",
    (
        lines(
            "Step time",
            "Quantiles over all ranks",
            "s",
            _quantiles("kdist_step_duration_seconds"),
            minimum=0.0,
        ),
        stack(
            "Where a step goes",
            "Mean seconds per step and phase: they sum to the step time",
            "s",
            {
                "{{phase}}": f"sum by (phase) (rate(kdist_step_phase_seconds_total{{}}[{RATE}]))"
                f" / ignoring(phase) group_left() {_STEPS}"
            },
        ),
        lines(
            "Waiting",
            (
                "Share of the step time spent waiting for data, and for peers where no "
                "computation hides it"
            ),
            "percentunit",
            {
                "data": (
                    f'sum(rate(kdist_step_phase_seconds_total{{phase="data_wait"}}[{RATE}]))'
                    f" / {_PHASES}"
                ),
                "peers": (
                    f'sum(rate(kdist_step_phase_seconds_total{{phase="comm_exposed"}}[{RATE}]))'
                    f" / {_PHASES}"
                ),
            },
            minimum=0.0,
        ),
        lines(
            "Model FLOP/s",
            (
                "Of the forward and backward passes of all ranks together, as torch counts "
                "them; less where it cannot count"
            ),
            "flops",
            {"all ranks": f"sum(rate(kdist_model_flops_total{{}}[{RATE}]))"},
            minimum=0.0,
        ),
        lines(
            "Memory",
            "Resident memory of each rank's process",
            "bytes",
            {"rank {{rank}}": "max by (rank) (kdist_rank_memory_bytes{})"},
            minimum=0.0,
        ),
        lines(
            "Batches ready",
            (
                "Prefetched chunks of samples of each rank: none is left where data loading is "
                "too slow"
            ),
            "none",
            {"rank {{rank}}": "max by (rank) (kdist_dataloader_queue_depth{})"},
            minimum=0.0,
        ),
    ),
)

_SECONDS = f'sum(rate(kdist_collective_seconds_total{{op="all_reduce"}}[{RATE}]))'
_BYTES = f'sum(rate(kdist_collective_bytes_total{{op="all_reduce"}}[{RATE}]))'
_WORLD = "max(kdist_world_size{})"
_AMONG_ALL = 'kdist_job_info{framework="ddp"}'  # other strategies reduce among some of the ranks

COMMUNICATION = PanelRow(
    "Communication",
    (
        lines(
            "All-reduce",
            "Time of one gradient bucket's all-reduce under ddp, waiting for peers included",
            "s",
            _quantiles("kdist_allreduce_duration_seconds"),
            minimum=0.0,
            width=6,
        ),
        lines(
            "Bus bandwidth",
            "Of ddp's own all-reduces (a lower bound, as waits are included) and of the probe",
            "Bps",
            {
                "training": (
                    f"{_BYTES} / {_SECONDS} * 2 * ({_WORLD} - 1) / {_WORLD} and on () {_AMONG_ALL}"
                ),
                "probe": "max(kdist_allreduce_probe_bus_bandwidth_bytes_per_second{})",
            },
            minimum=0.0,
            width=6,
        ),
        lines(
            "Traffic",
            "Payload that a rank exchanges each second, by the kind of collective",
            "Bps",
            {"{{op}}": f"avg by (op) (rate(kdist_collective_bytes_total{{}}[{RATE}]))"},
            minimum=0.0,
            width=6,
        ),
        lines(
            "Collectives",
            "Completed per second and rank, and those that failed in all ranks",
            "cps",
            {
                "{{op}}": f"avg by (op) (rate(kdist_collectives_total{{}}[{RATE}]))",
                "{{op}} failed: {{cause}}": (
                    f"sum by (op, cause) (rate(kdist_collective_failures_total{{}}[{RATE}]))"
                ),
            },
            minimum=0.0,
            width=6,
        ),
    ),
)

STRAGGLERS = PanelRow(
    "Stragglers",
    (
        lines(
            "Busy seconds per step",
            "By rank, without waits for peers: a slow rank is above the others",
            "s",
            {"rank {{rank}}": f"{_BUSY} / sum by (rank) (rate(kdist_steps_total{{}}[{RATE}]))"},
            minimum=0.0,
        ),
        lines(
            "Seconds in collectives per step",
            "By rank, with waits: a slow rank is below the others, as it waits least",
            "s",
            {
                "rank {{rank}}": f"sum by (rank) (rate(kdist_collective_seconds_total{{}}[{RATE}]))"
                f" / sum by (rank) (rate(kdist_steps_total{{}}[{RATE}]))"
            },
            minimum=0.0,
        ),
        bars(
            "Silence",
            "Time since each rank's last record",
            "s",
            {
                "rank {{rank}}": (
                    "sort_desc(clamp_min(time() - max by (rank) "
                    "(kdist_heartbeat_timestamp_seconds{}), 0))"
                )
            },
            thresholds=at_most(*SILENT_SECONDS),
        ),
    ),
)
