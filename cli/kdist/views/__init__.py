"""Tables and live views of jobs: values in, text or rich's renderables out. Nothing here asks a
cluster, reads a file or prints.

`live` fills a `JobView` for `kdist run` and for `kdist status -w`, and draws `kdist top`;
`frame` arranges it for the size of the terminal. `status_table` has the rows of `kdist status`,
`top` those of `kdist top`. Tables for one command alone stay in that command.

rich is imported only where a view is drawn, because importing it takes longer than most commands
take to run. Read `live` first.
"""
