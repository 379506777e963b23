"""How nodes find each other: torch's dynamic rendezvous over a store that no agent's loss takes
away, one file per store.
"""
