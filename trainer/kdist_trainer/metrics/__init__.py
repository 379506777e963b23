"""Metrics: declared, measured, sent by each rank to its agent, and served to Prometheus.

`declarations` and `step_stats` hold every metric with its name, unit and help: a new one is one
field there. A rank's `reporter` packs its `StepStats` into a datagram (`wire`); the agent's
`exporter` receives it, `aggregation` sums over ranks and restarts, and `endpoint` serves
`/metrics`, `/healthz`, `/readyz` and `/status`. `persistence` keeps counters across restarts of the
agent. Read `step_stats` first, then `exporter`.

Free of torch. What is measured, and how, is in `kdist_trainer.instrumentation`.
"""
