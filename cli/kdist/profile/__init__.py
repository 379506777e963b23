"""`kdist profile`: records the next steps of a running job with torch's profiler.

`recording` requests a profile from one agent, waits until the ranks have recorded it, and downloads
the traces, from pods or from processes on this machine; the trainer's part is
`kdist_trainer.profiling`. `command` prints the table of operations.
"""
