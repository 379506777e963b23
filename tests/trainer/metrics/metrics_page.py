"""Makes docs/metrics.md of the declared metrics: `python -m tests.trainer.metrics.metrics_page`; a
test compares.
"""

from __future__ import annotations

from pathlib import Path

from kdist_trainer.metrics.declarations import Kind, Metric
from kdist_trainer.metrics.endpoint import CATALOGUE, label_names

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"

_INTRODUCTION = """# Metrics

Every agent (one per node) answers `/metrics` on port 9401, or on a free port, which `kdist run` \
shows, where that one is
taken. The table is made from the declarations in `trainer/kdist_trainer/metrics`: to add a \
metric, add a field there and run
`python -m tests.trainer.metrics.metrics_page`.

- **From** says whose number it is. *rank*: one series for each local rank of the current group. \
*node*: counters and
  histograms are the sum over the local ranks, gauges the largest. *witness*: the node's first \
local rank speaks for it.
  *leader*: rank 0 speaks for the job, and only the agent that has it shows the metric. *agent*: \
the agent's own.
- Counters never go back, not even when workers are restarted, and a lost record costs no count: \
records hold running sums.
  What a scrape shows is kept next to the checkpoints first, and the next agent of the same place \
goes on from it. When a new
  group gives this node other ranks, what the old ones had counted goes on under the labels of the \
new ones, so the sum over
  `rank` is right at any time; for one rank's behaviour take rates within a group.
- A metric is absent while its value is unknown, so a script that reports no steps has none of \
steps. Its all-reduces are
  there, counted as it makes them, and `unobserved` is the time in which nobody knows what it \
does. A series of *failures*,
  *fallbacks* and *collectives* is absent while it is zero. A
  loss that is NaN is shown as NaN.
- `kdist_wall_seconds_total` always sums to the time that the agents of its place have lived. A \
step's time is put into its
  category when the step is over; until then the category is a guess by the rank's heartbeat, and \
a wrong guess is made up for
  in the following seconds.
- Collectives are those of a step's forward and backward passes: `ddp` and `pipeline` reduce \
gradients over the copies of the
  model; `fsdp` gathers each block's weights in both passes, scatters its gradients in the last \
backward pass, and `hsdp`
  reduces each rank's part over the nodes besides; `tensor` reduces activations. Bytes are what a \
rank holds whole: all of what
  is gathered or scattered. What a pipeline's stages send each other is not among them, only in \
`comm_exposed`.
- All-reduces overlap, so `kdist_allreduce_duration_seconds_sum` may exceed the time that has \
passed: take quantiles of it,
  and `kdist_collective_seconds_total` for time, which counts overlaps once. Of scripts all \
collectives of the training's
  threads are counted; `KDIST_COLLECTIVE_TIMING=off` in the environment, or \
`spec.script.collectiveTiming: off`, measures nothing.
- `comm_exposed` is waiting that no computation hid: the tail of `ddp`'s all-reduces, and on a CPU \
all that a rank of the other
  strategies waited for its peers in these passes. On a GPU that is not known of `fsdp`, `hsdp` \
and `tensor`: there it stays in
  `forward` and `backward`.
- Model FLOPs are counted in a generation's first forward pass, whose result is thrown away, and \
taken three times: torch's
  counter knows matrix products, convolutions and attention. Not counted: compiled models, and \
strategies that split a layer.
  The utilisation (MFU) is `sum(rate(kdist_model_flops_total[5m])) / (max(kdist_world_size) * \
max(kdist_device_peak_flops))`.
- Every series has the label `kdist_job`. At most 80 + 30 x local ranks series per agent.

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


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render())
