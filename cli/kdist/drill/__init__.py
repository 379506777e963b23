"""`kdist drill`: injects a fault into a running job on purpose, and measures how it recovers.

`faults` says which faults there are and when each is refused, `target` how a job is reached, in a
cluster (`cluster`) or on this machine (`local`), and `injection` is the program that runs next to
an agent. `drill` runs a drill from beginning to end; `report` is what it found. Read `drill` first.
"""
