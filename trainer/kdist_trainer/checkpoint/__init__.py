"""Checkpoints: a training's state reaches the disk or an object store as a whole or not at all, and
is verified when it is read.

The training loop calls `checkpointer`, a user's own script `script_api` with `script_state`.
`writer` copies and writes a state, and `commit` makes it a checkpoint; `restore` opens the folder
and chooses a checkpoint, and `reader` reads it. `manifest` says what is in the folder and in a
checkpoint, `lock` who may write, `ledger` what has happened, `interval` when to save. `group`
connects the ranks that take part. `listing`, `export` and `__main__` answer `kdist checkpoints`.
All writing goes through `storage`, which knows disks and object stores. Read `manifest` first.
Steps are counted in `kdist_trainer.training`.
"""
