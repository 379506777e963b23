"""The precision that a training computes in, and the random numbers that it draws.

`precision` casts, scales and clips, and steps the optimizer. `rng` derives every draw of a managed
training from its seed and place, and reads and restores the generators of a script. Not here: the
order of the samples (`kdist_trainer.data`).
"""
