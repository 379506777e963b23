"""The one server for connections from other machines, torch-free. The exporter, the exchange of a
round and the controller's endpoint are protocols on it.

`server` has the bounds that hold for whoever can reach a port, `http` the pages over HTTP,
`addresses` where a process listens, and `descriptors` what keeps it working when it has no file
descriptor left.
"""
