"""Checkpoints: a training's state reaches the disk or an object store as a whole or not at all, and
is verified when it is read.

The training loop calls `checkpointer`, a user's own script `script_api`. `writer` copies and writes
a state, and `commit` makes it a checkpoint; `restore` chooses one and `reader` reads it with
`safe_unpickler`. `manifest` says what is in the folder and in a checkpoint, `lock` who may write,
`ledger` what has happened. `location` opens a folder or a URL, `group` connects the ranks that take
part and has those of a script save together, `probe` tries the folder. `listing`, `export` and
`__main__` answer `kdist checkpoints`. All writing goes through `storage`, which knows disks and
object stores. Read `manifest` first.

`save_clock` says when a save is due by the time, and `training_time` how long a run has trained
since its last commit; `interval` finds how often to save. Steps are counted in
`kdist_trainer.training`.
"""
