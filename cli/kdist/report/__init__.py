"""What a run's life came to: computed from the ledger beside its checkpoints, and shown as a
receipt. Pure.
"""
