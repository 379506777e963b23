"""The data of a training: which samples a step uses, and how they are loaded.

Only one number is ever saved: `samples_seen`. `sampler` orders the samples, `step_plan` divides
them into steps, virtual shards and ranks, and `loader` loads them, in the rank itself or ahead of
time in worker processes. Nothing here holds state that a resume needs.
"""
