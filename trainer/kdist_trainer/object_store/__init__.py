"""Object stores (S3, Google Cloud Storage, Azure): reads and conditional writes of objects.

`store` has the operations that the rest of the trainer may use, each with one time limit for all
its attempts. It is the only module that uses obstore, which it imports when a store is opened: an
agent without a store does not pay for it. `files` reads and writes large objects as files. `errors`
has the errors, whose messages contain no secret. No module imports torch.

What the objects mean, such as checkpoints and their lock, belongs to `kdist_trainer.checkpoint`.
Read `store` first.
"""
