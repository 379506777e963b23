"""The managed training loop, and what one rank needs for it.

Read `trainer` first: `train` runs a training from its first step to its last, `step` is one
optimizer step. `builder` makes the `TrainContext` (`context`) from train.json and the user's
workload. `checkpointing` decides when state is saved and what is in it. `sync` is the all-reduce of
losses and flags every few steps, and `interval_sync` is what the loop does with it.
`forward_backward` is gradient accumulation and pipeline passes. What is optional has a module of
its name: `ema`, `early_stopping`, `gradient_guard`, `pretrained`, `profiler`.

How a model is spread over ranks is in `kdist_trainer.parallel`; how a checkpoint reaches the disk,
in `kdist_trainer.checkpoint`.
"""
