"""The commands of the core: one file each, named as typed, with the click command `command`.

A command parses its options, calls the package that does the work (`job`, `deploy`, ...) and prints
the result; logic does not belong here. A slice (`drill`, `report`, ...; see `kdist.slices`) has its
command in its own package. `options` has the options that commands share; `targets` finds the `Job`
that an invocation names, and no command asks where it is. Heavy imports are inside functions, so
that `kdist --help` and completion are fast. The table of commands is in `kdist.app`.
"""
