"""Object stores (S3, Google Cloud Storage, Azure): objects read and written with conditions.

`store` has the operations that the rest of the trainer may use, each with one budget of retries,
and settles writes whose reply was lost. It is the only module that knows obstore, which it imports
when a store is opened: an agent without a store pays nothing for it. `files` reads and writes large
objects as files. `errors` says what went wrong, never with a secret in it. Free of torch.

What the objects mean, such as checkpoints and their lock, belongs to `kdist_trainer.checkpoint`.
Read `store` first.
"""
