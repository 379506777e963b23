"""Metrics: declared, sent by each rank to its agent, and served to Prometheus.

`rank_metrics` and `agent_metrics` hold every metric with its name, which ends with its unit, and
help: to add a metric, add one there; `metric` has what both are made of. `transport` sends a rank's
`StepStats` to its agent. There `aggregation` sums over ranks and restarts and divides the wall time
(goodput), `exporter` serves the routes (`/metrics`, `/healthz`, `/readyz`, `/status`), `status`
writes the document of the last one, and `persistence` keeps the counters across restarts of the
agent.

Nothing here imports torch. How things are measured is in `kdist_trainer.instrumentation`. Read
`rank_metrics` first, then `exporter`.
"""
