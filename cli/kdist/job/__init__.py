"""A job, in a cluster or on this machine, and what can be done with it.

Read `job` first: the protocol `Job` has all that a command can do with one. `find` finds it, by
name or by file; `cluster` and `local` are the two places where it may be, each with an
implementation, and `goals` is what a status means to whoever waits. Nothing here prints or parses
arguments: operations return values and messages, and report progress to the job's `Dialog`.
"""
