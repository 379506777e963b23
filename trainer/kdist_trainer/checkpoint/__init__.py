"""Checkpoints: a training's state reaches the disk as a whole or not at all, and is verified when
it is read.

The training loop calls `checkpointer`, a user's own script `script_api`. `writer` copies and writes
a state, and `commit` makes it a checkpoint; `restore` chooses one and `reader` reads it with
`safe_unpickler`. `layout` says what is in the folder, `lock` who may write to it, `ledger` what has
happened. `group` connects the ranks that take part, `probe` tries the folder. `listing`, `export`
and `__main__` answer `kdist checkpoints`. All writing to the disk goes through `storage`. Read
`layout` first.

When a checkpoint is due is decided in `kdist_trainer.training`.
"""
