"""Tools for developers of kdist, run from a checkout and in no wheel.

They may import `kdist`; `kdist` and `kdist_trainer` never import them.
"""
