"""Instrumentation: timers, hooks and counters around a training, none of which changes what it
computes.

`step_timer` divides a step into phases and times its collectives, as `kdist_trainer.script` does
those of unchanged scripts, through the hooks of `collective_hooks`, whose flight recorder records
each collective before its launch, in memory that outlives the rank. `device_stats` samples memory
and FLOPs; `fault_handler` keeps the stack of a rank that a signal kills. What torch does not
document is in `torch_internals`. Read `step_timer` first.

How the numbers reach Prometheus is in `kdist_trainer.metrics`.
"""
