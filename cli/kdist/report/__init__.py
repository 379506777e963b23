"""`kdist report`: where the time of a run went, computed from the ledger next to its checkpoints.

`goodput` adds the time by category and by attempt to the end report of `kdist.ledger`; `text` turns
the report into rows for a terminal, `html` into a page, drawn with `page` and `chart`. `history`
reads the run of a job in a cluster. Read `goodput` first: its categories are what all the others
show.
"""
