"""The page of all metrics, from their declarations."""

from __future__ import annotations

from kdist_trainer.metrics.exporter import CATALOGUE, label_names
from kdist_trainer.metrics.metric import Kind, Metric

_INTRODUCTION = """# Metrics

Every agent (one per node) serves `/metrics` on port 9401. If that port is in use, it picks a
free one, which `kdist run` shows. The table below is generated from the declarations in
`trainer/kdist_trainer/metrics`; CONTRIBUTING.md says how to add a metric.

- **From** tells where the value comes from. *rank*: one series per local rank of the current
  worker group. *node*: counters and histograms are summed over the local ranks; of gauges the
  maximum is shown. *local rank 0*: the node's first rank reports for the node. *rank 0*: global
  rank 0 reports for the job, and only the agent that runs it shows the metric. *agent*: the
  agent's own value.
- Counters never go back, not even when workers restart, and a lost record loses no count,
  because records carry cumulative values. Before a scrape is answered, its counters are saved
  in the checkpoint folder; if the agent is replaced, the next agent of the same node (or of the
  same completion index) continues them. When a rendezvous assigns other ranks to a node, the
  counts of the old ranks continue under the labels of the new ones. The sum over `rank` is
  therefore always right; to examine a single rank, use rates within one generation.
- A metric is absent while its value is unknown. A script that reports no steps has no step
  metrics; its collectives are measured nevertheless, and its time counts as `unobserved`. A
  series of *failures*, *fallbacks* or *collectives* is absent while it is zero. A loss that is
  NaN is shown as NaN.
- `kdist_wall_seconds_total` always adds up to the time that the agents of the node have run.
  The time of a step is attributed when the step is over. Until then the category is estimated
  from the rank's heartbeat, and a wrong estimate is corrected within the following seconds.
- Collectives are those of a step's forward and backward passes. `ddp` and `pipeline` all-reduce
  the gradients over the copies of the model. `fsdp` gathers the weights of each block in both
  passes and scatters its gradients in the last backward pass; `hsdp` also all-reduces each
  rank's shard over the nodes. `tensor` all-reduces activations. Bytes count the unsharded
  tensor: all that is gathered or scattered. Sends between pipeline stages are not counted; they
  only show in `comm_exposed`.
- All-reduces overlap, so `kdist_allreduce_duration_seconds_sum` may exceed the elapsed time.
  Use it for quantiles, and `kdist_collective_seconds_total`, which counts overlapping time
  once, for time. For scripts, all collectives of the training's threads are measured;
  `KDIST_COLLECTIVE_TIMING=off` in the environment or `spec.script.collectiveTiming: off` turns
  this off.
- `comm_exposed` is waiting time that no computation overlaps: the tail of `ddp`'s all-reduces
  and, on a CPU, all the time that a rank of another strategy waits for its peers in these
  passes. On a GPU this time is not known for `fsdp`, `hsdp` and `tensor`; it is included in
  `forward` and `backward`.
- Model FLOPs are counted in an additional forward pass at the start of each generation, whose
  result is discarded, and multiplied by three. torch's counter covers matrix products,
  convolutions and attention. Compiled models and strategies that split layers are not counted.
  Model FLOPs utilization (MFU) is
  `sum(rate(kdist_model_flops_total[5m])) / (max(kdist_world_size) * \
max(kdist_device_peak_flops))`.
- Every series has the label `kdist_job`. An agent has at most 100 + 30 x local ranks series.

| metric | type | from | labels | unit | help |
|---|---|---|---|---|---|
"""


def render() -> str:
    """Text of the page."""
    return _INTRODUCTION + "".join(
        _row(metric) + "\n" for metric in sorted(CATALOGUE, key=lambda metric: metric.name)
    )


def _row(metric: Metric) -> str:
    labels = ", ".join(_label(metric, name) for name in label_names(metric)[1:])
    buckets = (
        f"; buckets {' '.join(f'{bound:g}' for bound in metric.buckets)}"
        if metric.kind is Kind.HISTOGRAM
        else ""
    )
    cells = [
        f"`{metric.name}`",
        metric.kind,
        metric.scope,
        labels or "-",
        metric.unit or "-",
        metric.help + buckets,
    ]
    return f"| {' | '.join(cells)} |"


def _label(metric: Metric, name: str) -> str:
    if name not in metric.labels or not any(metric.series):
        return f"`{name}`"
    index = metric.labels.index(name)
    values = dict.fromkeys(series[index] for series in metric.series)
    return f"`{name}` = {', '.join(values)}"
