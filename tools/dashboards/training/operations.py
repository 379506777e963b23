"""Rows of the training dashboard: goodput, checkpoints, reliability, GPUs, resources, exporter."""

from __future__ import annotations

from kdist import backends
from tools.dashboards import goodput
from tools.dashboards.model import (
    RATE,
    RESTARTED,
    RESTARTS_LEFT,
    PanelRow,
    at_least,
    at_most,
    bars,
    lines,
    stack,
    stat,
)

_WALL = f"sum(rate(kdist_wall_seconds_total{{}}[{RATE}]))"
_EXITS = 'label_replace(kdist_worker_exits_total{}, "signal", "", "signal", "none")'


def _mean_duration(mode: str) -> str:
    labels = f'{{op="save", mode="{mode}"}}'
    total, count = (
        f"sum(rate(kdist_checkpoint_duration_seconds_{end}{labels}[$__rate_interval]))"
        for end in ("sum", "count")
    )
    return f"{total} / ({count} > 0)"


GOODPUT = PanelRow(
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
                "{{category}}": f"topk(6, sum by (category) ({goodput.UNPRODUCTIVE}) > 0)",
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
            "Mean time of a rendezvous, of the agent that waited longest",
            (
                "max(kdist_rendezvous_duration_seconds_sum{} / "
                "kdist_rendezvous_duration_seconds_count{})"
            ),
            "s",
            height=4,
            decimals=1,
        ),
    ),
)

CHECKPOINTS = PanelRow(
    "Checkpoints",
    (
        lines(
            "Save duration",
            "Blocking is how long training waits, total lasts until the commit is durable",
            "s",
            {
                "blocking": _mean_duration("blocking"),
                "total": _mean_duration("total"),
                "total of the last": "max(kdist_checkpoint_last_duration_seconds{})",
            },
            spans_gaps=True,
            minimum=0.0,
            width=6,
        ),
        lines(
            "Age and interval",
            "Time since the last durable save, training that a loss of all ranks now would cost, "
            "and the time between two saves",
            "s",
            {
                "age": (
                    "clamp_min(time() - max(kdist_checkpoint_last_success_timestamp_seconds{}), 0)"
                ),
                "at risk": "max(kdist_checkpoint_at_risk_seconds{})",
                "interval": "max(kdist_checkpoint_interval_seconds{})",
            },
            minimum=0.0,
            width=6,
        ),
        lines(
            "Size",
            "Of the last good checkpoint",
            "bytes",
            {"size": "max(kdist_checkpoint_size_bytes{})"},
            minimum=0.0,
            width=6,
        ),
        bars(
            "Attempted, failed, skipped",
            "Saves and restores, failures by cause, and checkpoints that a resume found damaged",
            "none",
            {
                "{{op}}": "sum by (op) (kdist_checkpoint_attempts_total{})",
                "{{op}} failed: {{cause}}": (
                    "sum by (op, cause) (kdist_checkpoint_failures_total{})"
                ),
                "skipped: {{cause}}": "sum by (cause) (kdist_checkpoint_fallbacks_total{})",
            },
            width=6,
        ),
    ),
)

RELIABILITY = PanelRow(
    "Reliability",
    (
        lines(
            "Group",
            "Ranks of the worker group, its largest size, and its generation",
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
            (
                "By cause, of the agent that counted most; the other nodes count a failed rank as "
                "a lost node"
            ),
            "none",
            {"{{cause}}": "max by (cause) (kdist_worker_group_restarts_total{})"},
            width=5,
            thresholds=at_most(*RESTARTED),
        ),
        stat(
            "Restarts left",
            "Until the job's restart limit; a checkpoint of a later step resets it",
            "min(kdist_restarts_remaining{})",
            "none",
            width=5,
            height=7,
            thresholds=at_least(*RESTARTS_LEFT),
        ),
    ),
)


_FLOPS = f"sum(rate(kdist_model_flops_total{{}}[{RATE}]))"
_CONTAINERS = "|".join(dict.fromkeys(backends.get(name).container for name in backends.NAMES))
_MEMORY = f'container_memory_working_set_bytes{{container=~"{_CONTAINERS}"}}'
_CPU = f'rate(container_cpu_usage_seconds_total{{container=~"{_CONTAINERS}"}}[{RATE}])'
_ACTIVE = "DCGM_FI_PROF_SM_ACTIVE{} or DCGM_FI_PROF_GR_ENGINE_ACTIVE{}"

DEVICES = PanelRow(
    "GPUs (where there are any)",
    (
        lines(
            "Model FLOPs utilization",
            "Model FLOP/s over what the devices can do at most",
            "percentunit",
            {"MFU": f"{_FLOPS} / (max(kdist_world_size{{}}) * max(kdist_device_peak_flops{{}}))"},
            optional=True,
            minimum=0.0,
            width=6,
        ),
        lines(
            "Device memory",
            "Allocated for tensors, and reserved by torch, of the rank with most",
            "bytes",
            {
                "allocated": "max(kdist_device_memory_allocated_bytes{})",
                "reserved": "max(kdist_device_memory_reserved_bytes{})",
            },
            optional=True,
            minimum=0.0,
            width=6,
        ),
        lines(
            "Peak device memory",
            "Peak of what was allocated for tensors, by rank",
            "bytes",
            {"rank {{rank}}": "max by (rank) (kdist_device_memory_peak_bytes{})"},
            optional=True,
            minimum=0.0,
            width=6,
        ),
        lines(
            "Allocator retries",
            "Times that torch freed its cache to allocate more: memory is nearly exhausted",
            "cps",
            {
                "rank {{rank}}": (
                    f"sum by (rank) (rate(kdist_device_alloc_retries_total{{}}[{RATE}]))"
                )
            },
            optional=True,
            minimum=0.0,
            width=6,
        ),
    ),
    collapsed=True,
)

_OF_THIS_TRAINING = "on (namespace, pod) group_left() group by (namespace, pod) (kdist_job_info{})"


def _of_pod(expression: str) -> str:
    """A metric of pods that others export, for the pods of the training only."""
    return f"({expression}) * {_OF_THIS_TRAINING}"


def _of_gpu(expression: str) -> str:
    """A metric of DCGM's exporter, by GPU and the pod that uses it: scraped without `honorLabels`,
    `pod` is the exporter's own, and `exported_pod` the one that uses the GPU.
    """
    known = expression
    for label in ("namespace", "pod"):
        known = f'label_replace({known}, "{label}", "$1", "exported_{label}", "(.+)")'
    return f"max by (pod, gpu) ({_of_pod(known)})"


RESOURCES = PanelRow(
    "Resources (cAdvisor and DCGM, where they are)",
    (
        lines(
            "Memory",
            "Working set of each pod",
            "bytes",
            {"{{pod}}": f"sum by (pod) ({_of_pod(_MEMORY)})"},
            optional=True,
            minimum=0.0,
            width=12,
        ),
        lines(
            "CPU",
            "Cores that each pod uses",
            "none",
            {"{{pod}}": f"sum by (pod) ({_of_pod(_CPU)})"},
            optional=True,
            minimum=0.0,
            width=12,
        ),
        lines(
            "GPU activity",
            (
                "Share of time with work on the multiprocessors; of any engine, if DCGM "
                "exports no more"
            ),
            "percentunit",
            {"{{pod}} GPU {{gpu}}": _of_gpu(_ACTIVE)},
            optional=True,
            minimum=0.0,
        ),
        lines(
            "Tensor cores",
            "Share of time with work on the tensor cores",
            "percentunit",
            {"{{pod}} GPU {{gpu}}": _of_gpu("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{}")},
            optional=True,
            minimum=0.0,
        ),
        bars(
            "Last XID error",
            (
                "Number of the newest error that the driver reported for each GPU; 0 is none, "
                "NVIDIA's list explains the others"
            ),
            "none",
            {"{{pod}} GPU {{gpu}}": _of_gpu("DCGM_FI_DEV_XID_ERRORS{}")},
            optional=True,
            thresholds=at_most(1, 1),
        ),
    ),
    collapsed=True,
)

# Of all that a Prometheus scrapes, the targets that exported this training's metrics in the last
# ten minutes: `up` of one that is down has no label of the training.
_AGENTS = "and on (namespace, job, instance) last_over_time(kdist_job_info{}[10m])"

EXPORTER = PanelRow(
    "Exporter",
    (
        lines(
            "Scraped",
            "Agents that Prometheus can scrape",
            "none",
            {"up": f"sum(up{{}} {_AGENTS})"},
            minimum=0.0,
            width=6,
        ),
        lines(
            "Scrape",
            "Time of a scrape, by agent",
            "s",
            {"{{instance}}": "max by (instance) (kdist_exporter_scrape_duration_seconds{})"},
            minimum=0.0,
            width=6,
        ),
        lines(
            "Records",
            "From ranks to their agent, per second; dropped ones cost resolution, never a count",
            "cps",
            {
                "{{outcome}}": f"sum by (outcome) (rate(kdist_exporter_records_total{{}}[{RATE}]))",
                "dropped": f"sum(rate(kdist_exporter_records_dropped_total{{}}[{RATE}]))",
            },
            minimum=0.0,
            width=6,
        ),
        lines(
            "Series",
            "Samples of one scrape",
            "none",
            {"{{instance}}": f"max by (instance) (scrape_samples_scraped{{}} {_AGENTS})"},
            minimum=0.0,
            width=6,
        ),
        lines(
            "Refused connections",
            "Closed by the agents to stay within their bounds, per second",
            "cps",
            {
                "{{server}}: {{reason}}": (
                    f"sum by (server, reason) (rate(kdist_connections_refused_total{{}}[{RATE}]))"
                )
            },
            minimum=0.0,
            width=24,
        ),
    ),
)
