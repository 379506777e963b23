"""The commands: one file each, named as typed, with the click command `command`.

A command parses its options, calls the package that does the work (`jobs`, `deploy`, `local`,
`report`, ...) and prints the result; logic does not belong here. `options` has what commands share:
common options, the connection, and how a job or run is named. Heavy imports are inside functions,
so that `kdist --help` and completion are fast. The table of commands is in `kdist.app`.
"""
