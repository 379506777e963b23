"""A job, in a cluster or on this machine, and what can be done with it.

`cluster` has the operations on jobs in a cluster, `local` runs a job as processes of this machine.
Nothing here prints or parses arguments: operations return values and messages, and report progress
to the function that they are given.
"""
