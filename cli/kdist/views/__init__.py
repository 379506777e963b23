"""Tables and live views of jobs: values in, text or rich's renderables out. Nothing here asks a
cluster, reads a file or prints.

`live` renders the view of `kdist run` and of `kdist status -w` from one `JobView`, whichever of the
two fills it. `status_table` has the rows of `kdist status`, `top` those of `kdist top`. Tables for
one command alone stay in that command.

rich is imported in `live` only, and `live` only where a view is drawn, because importing rich takes
longer than most commands take to run. Read `live` first.
"""
