"""What a rank and its agent say to each other, besides the heartbeat (`processes.liveness`) and the
metrics (`metrics.transport`).

`control` is the socket by which a rank leaves a broken worker group and joins the next one,
`output` the pipes that its output and events go through, `result` the record of work that is done,
`failure` the record of what went wrong.
"""
