"""The training loop, and what one rank needs for it.

Read `trainer` first: `train` runs a training from its first step to its last, `train_step` is one
optimizer step. `context` lists everything that the loop works with; `builder` builds it from
train.json and the user's workload, `model` the model in it. `forward_backward` is gradient
accumulation and pipeline passes, `loss_scale` the factor of the loss, `lr_scheduler` the learning
rate. `sync` is the all-reduce of losses and flags every few steps, and `interval_sync` is what the
loop does with it. `checkpointing` decides when state is saved and what is in it, `step_log` writes
the ledger. What is optional has a module of its name, with a null object for jobs that do not ask
for it: `ema`, `early_stopping`, `gradient_guard`, `pretrained`, `profiler`.

How a model is distributed over ranks is in `kdist_trainer.parallel`; how a checkpoint reaches the
disk, in `kdist_trainer.checkpoint`. `regroup` is recovery in place: how a rank leaves a broken
group with its `kept_state`, how the next group continues with it, and what a worker builds before
it has a group.
"""
