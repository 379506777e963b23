"""Instrumentation: timers, hooks and counters around a training, none of which changes what it
computes.

`step_timer` divides a step into phases; `collective_timer` and `script_collectives` time
collectives through the hooks of `collective_hooks`; `flight_recorder` notes each collective before
it begins, in memory that outlives the rank; `device_stats` reads memory and FLOPs; `fault_handler`
keeps the stack of a rank that a signal kills. Read `step_timer` first.

How the numbers reach Prometheus is in `kdist_trainer.metrics`.
"""
