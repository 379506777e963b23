"""Rows of the dashboard of one training: the devices and pods that it runs on, and who measures it."""

from __future__ import annotations

from kdist.dashboards.panels import RATE, Row, at_most, bars, lines

_FLOPS = f"sum(rate(kdist_model_flops_total{{}}[{RATE}]))"
_MEMORY = 'container_memory_working_set_bytes{container="trainer"}'
_CPU = f'rate(container_cpu_usage_seconds_total{{container="trainer"}}[{RATE}])'
_ACTIVE = "DCGM_FI_PROF_SM_ACTIVE{} or DCGM_FI_PROF_GR_ENGINE_ACTIVE{}"

DEVICES = Row(
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
            {"rank {{rank}}": f"sum by (rank) (rate(kdist_device_alloc_retries_total{{}}[{RATE}]))"},
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
    """What DCGM's exporter says of a GPU, by the pod that uses it: scraped without `honorLabels`, `pod` is the exporter's own."""
    known = expression
    for label in ("namespace", "pod"):
        known = f'label_replace({known}, "{label}", "$1", "exported_{label}", "(.+)")'
    return f"max by (pod, gpu) ({_of_pod(known)})"


RESOURCES = Row(
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
            "Share of time with work on the multiprocessors; of any engine, where DCGM tells no more",
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
            "Number of the newest error that the driver told of each GPU; 0 is none, NVIDIA's list says what the others mean",
            "none",
            {"{{pod}} GPU {{gpu}}": _of_gpu("DCGM_FI_DEV_XID_ERRORS{}")},
            optional=True,
            steps=at_most(1, 1),
        ),
    ),
    collapsed=True,
)

# Of all that a Prometheus scrapes, what told of this training, lately: one that is down has no other word for whose it is.
_AGENTS = "and on (namespace, job, instance) last_over_time(kdist_job_info{}[10m])"

EXPORTER = Row(
    "Exporter",
    (
        lines("Scraped", "Agents that answer Prometheus", "none", {"up": f"sum(up{{}} {_AGENTS})"}, minimum=0.0, width=6),
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
