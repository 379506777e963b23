"""Profiles on request: the ranks of a running training record the same steps.

`requests` has the files by which a profile is requested and answered, `__main__` the command that
`kdist profile` runs next to an agent. The recording itself is in `kdist_trainer.training.profiler`.
Nothing here needs torch. Read `requests` first.
"""
