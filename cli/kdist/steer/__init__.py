"""Verbs on a job that is there: scale, suspend, resume, restart, stop, and looks into its pods, ranks and checkpoints.

This room prints nothing: it answers with values and sentences, and tells of what takes long through a function it is given.
"""
