"""Profiles on request: the ranks of a running training record the same steps.

`requests` has the files by which a profile is requested and answered, `__main__` the command that
`kdist profile` runs next to an agent, neither of which needs torch. `recorder` is the recording in
a rank, which `kdist_trainer.training.builder` loads by name. Read `requests` first.
"""
