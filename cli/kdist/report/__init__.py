"""The goodput report of a run: where its time went, computed from the ledger next to its
checkpoints.

`ledger` reads the ledger's records and computes the end report (steps, restarts, recovery times,
goodput); `goodput` adds the time by category and by attempt; `text` turns the report into rows for
a terminal, `html` into a page. Read `goodput` first: its categories are what all the others show.

Everything here is a pure function of records. Where they come from, a folder on this machine or a
helper pod, is up to the caller: `kdist.local` or `kdist.jobs.history`.
"""
