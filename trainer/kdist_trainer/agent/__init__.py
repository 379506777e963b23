"""The elastic agent of one node: torch.distributed.elastic's agent with kdist's rules for failures,
joining nodes and stopping.

Here belongs what runs in the agent process and in the first lines of a worker: process setup,
starting and monitoring workers, the analysis of their exits, the restart policy, the exit record,
the relay of their output. Not here: how nodes find each other (`kdist_trainer.rendezvous`), the
metrics that the agent serves (`kdist_trainer.metrics`), what a worker trains
(`kdist_trainer.training`), and torch's private names (`kdist_trainer.rendezvous.torch_internals`).

Read `launch` first, which runs an agent from start to exit; then `agent`, one round of which joins
the rendezvous and runs a worker group, and `monitor`, which watches that group and kills what
outlives its grace period. `termination` decides what follows. `worker_group` has the worker
processes, also those that continue in the next group. `tracker_process` starts and watches the
process of a tracker, `compile_cache` keeps what torch.compile has compiled, `trainjob_status`
reports progress to Kubeflow Trainer. `forkserver` and `preload` only make processes start fast.
"""
