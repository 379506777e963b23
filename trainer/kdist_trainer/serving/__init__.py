"""The one server for connections from other machines, torch-free. The exporter, the exchange of a
round and the controller's endpoint are protocols on it.

`server` has the bounds that hold for whoever can reach a port, `connection` what a protocol sees of
one client, `pages` the pages over HTTP, and `addresses` where a process listens.
"""
