"""What a user's own script is given: the checkpoints that it asks for, and the timing of its
collectives, which it does not know of.

`api` is `kdist_trainer.Checkpointer`, and how the ranks of a script agree on when to save and when
to stop; `stop` is `kdist_trainer.stop_requested`, for scripts with and without checkpoints;
`state` is the whole state of a script; `sharded_loader` its data, at any number of ranks.
`collectives` counts and times the collectives of an
unchanged script, and `tracker_identity` gives it one curve in W&B and MLflow;
`printed_progress` finds its steps in what it prints, `accelerate_config` names what `accelerate
launch` would have set. Not here:
`kdist_trainer.run_script`, which runs it, and what it has of a training framework
(`kdist_trainer.integrations`).
"""
