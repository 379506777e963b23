"""Metrics: declared, sent by each rank to its agent, and served to Prometheus.

`declarations` and `step_stats` hold every metric with its name, unit and help: to add a metric,
add one field there. `transport` sends a rank's `StepStats` to its agent. There `aggregation` sums
over ranks and restarts and divides the wall time (goodput), `exporter` serves the routes
(`/metrics`, `/healthz`, `/readyz`, `/status`), `status` writes the document of the last one, and
`persistence` keeps the counters across restarts of the agent.

Nothing here imports torch. How things are measured is in `kdist_trainer.instrumentation`. Read
`step_stats` first, then `exporter`.
"""
