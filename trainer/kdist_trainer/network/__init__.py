"""Connections with other machines, torch-free: the one server, and HTTP connections whose time is
bounded.

`server` listens, bounds what anyone who reaches a port may use, and defines what a protocol sees of
one client; `pages` serves pages over HTTP. The exporter, the exchange of a round and the
controller's endpoint are protocols on it. `deadline_http` connects to servers of others, with a
time-out for a whole answer. `socket_filter` keeps newcomers from a socket that torch listens on.
"""
