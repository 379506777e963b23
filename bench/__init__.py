"""Measurements next to peers, in one run on one machine: printed by `make bench`, never part of the
tests.
"""
