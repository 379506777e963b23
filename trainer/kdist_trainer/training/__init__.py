"""The managed training loop, and what one rank needs for it.

`trainer` is the page to read first: `train` is a run from its first step to its last, `step` is one
optimizer step. `builder` makes the `TrainContext` (`context`) from train.json and the user's
workload. `checkpointing` decides when state is saved and what is in it, `sync` is the all-reduce of
losses and flags every few steps, `forward_backward` is gradient accumulation and pipeline passes.
What is optional has a module of its name: `ema`, `early_stopping`, `gradient_guard`, `pretrained`,
`profiler`.

How a model is spread over ranks is in `kdist_trainer.parallel`; how a checkpoint reaches the disk,
in `kdist_trainer.checkpoint`.
"""
