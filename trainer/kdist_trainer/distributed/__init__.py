"""The process group of torch.distributed that a rank trains in, and what becomes of one that broke.

`world` joins and leaves the group, on the GPUs of `devices`. `hosted_store` is the TCPStore by
which its ranks find each other. `group_abort` gets this rank out of a group whose other ranks are
dead or silent, and `left_groups` keeps such groups until they can be destroyed. `checkpoint_group`
is a second group, for the messages of saves and for state that one rank sends to all. `measure`
times collectives and finds slow links, `health_check` checks a node before it joins. Not here: how
agents find each other (`kdist_trainer.rendezvous`).
"""
