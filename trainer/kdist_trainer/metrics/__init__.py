"""Metrics: declared, sent by each rank to its agent, and served to Prometheus.

`declarations` and `step_stats` hold every metric with its name, unit and help: to add a metric,
add one field there. A rank's `reporter` packs its `StepStats` into a
datagram (`wire`). The agent's `exporter` gets it from the `receiver`, `aggregation` sums over ranks
and restarts, `wall_time` computes goodput. `exporter` has the table of routes (`/metrics`,
`/healthz`, `/readyz`, `/status`), and `endpoint` is the HTTP server. `persistence` keeps the
counters across restarts of the agent.

Nothing here imports torch. How things are measured is in `kdist_trainer.instrumentation`. Read
`step_stats` first, then `exporter`.
"""
