"""The training loop, and what one rank needs for it.

Read `trainer` first: `train` runs a training from its first step to its last, `train_step` is one
optimizer step. `context` lists everything that the loop works with; `builder` builds it from
train.json and the user's workload, `model` the model in it, and `workload_checks` refuses what
cannot be trained. `forward_backward` is gradient accumulation and pipeline passes, `optimizer` the
update of the weights. `sync` is the all-reduce of losses and flags every few steps, and what
follows from it, also from a loss that is NaN. `evaluation` measures the model on the test split.
`training_state` is what a checkpoint holds, `checkpointing` decides when it is saved, and
`step_log` writes the ledger. What is optional has a null object for jobs that do not ask for it.

How a model is distributed over ranks is in `kdist_trainer.parallel`; how a checkpoint reaches the
disk, in `kdist_trainer.checkpoint`. `regroup` is recovery in place: how a rank leaves a broken
group with its `KeptState`, how the next group continues with it, and what a worker builds before it
has a group. `carrying` is a save that one rank writes alone meanwhile.
"""
