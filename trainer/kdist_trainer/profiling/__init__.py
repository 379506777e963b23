"""Profiles on request: someone asks a running training, all ranks record the same steps, and the
traces are fetched.
"""
