"""Rows of the training dashboard: goodput, checkpoints, reliability, GPUs, resources, exporter."""

from __future__ import annotations

from kdist.dashboards.model import RATE, PanelRow, at_least, at_most, bars, lines, stack, stat

_UNPRODUCTIVE = (
    'increase(kdist_wall_seconds_total{category!~"productive_step|unobserved"}[$__range])'
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
                "age": (
                    "clamp_min(time() - max(kdist_checkpoint_last_success_timestamp_seconds{}), 0)"
                ),
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
            "Tried, failed, passed over",
            "Saves and restores, failures by cause, and checkpoints that a resume found damaged",
            "none",
            {
                "{{op}}": "sum by (op) (kdist_checkpoint_attempts_total{})",
                "{{op}} failed: {{cause}}": (
                    "sum by (op, cause) (kdist_checkpoint_failures_total{})"
                ),
                "passed over: {{cause}}": "sum by (cause) (kdist_checkpoint_fallbacks_total{})",
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
            (
                "By cause, as the agent saw them that saw most; to the other nodes a failed "
                "rank's node is lost"
            ),
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


_FLOPS = f"sum(rate(kdist_model_flops_total{{}}[{RATE}]))"
_MEMORY = 'container_memory_working_set_bytes{container="trainer"}'
_CPU = f'rate(container_cpu_usage_seconds_total{{container="trainer"}}[{RATE}])'
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
            "That tensors take, and that torch has reserved for them, of the rank with most",
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
            "Most that tensors of each rank ever took",
            "bytes",
            {"rank {{rank}}": "max by (rank) (kdist_device_memory_peak_bytes{})"},
            optional=True,
            minimum=0.0,
            width=6,
        ),
        lines(
            "Allocator retries",
            "Times that torch had to free its reserve to go on: memory is nearly too small",
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
    """What others say of a pod, of the pods of the training alone."""
    return f"({expression}) * {_OF_THIS_TRAINING}"


def _of_gpu(expression: str) -> str:
    """What DCGM's exporter says of a GPU, by the pod that uses it: scraped without `honorLabels`,
    `pod` is the exporter's own.
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
                "Share of time with work on the multiprocessors; of any engine, where DCGM "
                "tells no more"
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
                "Number of the newest error that the driver told of each GPU; 0 is none, "
                "NVIDIA's list says what the others mean"
            ),
            "none",
            {"{{pod}} GPU {{gpu}}": _of_gpu("DCGM_FI_DEV_XID_ERRORS{}")},
            optional=True,
            steps=at_most(1, 1),
        ),
    ),
    collapsed=True,
)

# Of all that a Prometheus scrapes, what told of this training, lately: one that is down has no
# other word for whose it is.
_AGENTS = "and on (namespace, job, instance) last_over_time(kdist_job_info{}[10m])"

EXPORTER = PanelRow(
    "Exporter",
    (
        lines(
            "Scraped",
            "Agents that answer Prometheus",
            "none",
            {"up": f"sum(up{{}} {_AGENTS})"},
            minimum=0.0,
            width=6,
        ),
        lines(
            "Scrape",
            "Time that an agent takes to answer",
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
    ),
)
