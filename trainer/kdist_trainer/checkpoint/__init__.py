"""Checkpoints: a training's state reaches the disk or an object store as a whole or not at all, and
is verified when it is read.

The training loop calls `checkpointer`, and so does `kdist_trainer.script` for a user's own script.
`writer` copies and writes a state, and `commit` makes it a checkpoint and removes old ones;
`restore` opens the folder and chooses a checkpoint, and `reader` reads it. `manifest` says what is
in the folder and in a checkpoint, `lock` who may write, `ledger` what has happened, `interval` when
to save. `__main__` and `export` answer `kdist checkpoints`. The ranks that take part are connected
by `kdist_trainer.distributed.checkpoint_group`. All writing goes through `storage`, which knows
disks and object stores. Read `manifest` first.
Steps are counted in `kdist_trainer.training`.
"""
