"""The one server for connections from other machines, torch-free. The exporter, the exchange of a
round and the controller's endpoint are protocols on it.

`server` listens, bounds what anyone who reaches a port may use, and defines what a protocol sees of
one client; `pages` serves pages over HTTP.
"""
