"""The commands: one file each, named as typed, with the click command `command`.

A command parses its options, calls the package that does the work (`jobs`, `deploy`, `local`, ...)
and prints the result; logic does not belong here. Options of kdist (`drill`, `report`, ...) have
their command in their own package. `options` has the options that
commands share; `targets` finds the job, run or cluster that an invocation names. Heavy imports are
inside functions, so that `kdist --help` and completion are fast. The table of commands is in
`kdist.app`.
"""
