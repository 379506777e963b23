"""The benchmark of collectives that `kdist bench` runs on every rank, under the same agent and
rendezvous as any job.

`__main__` is one rank. What it measures with is in `kdist_trainer.distributed.measure`, since every
training may check its network before it begins.

Sizes and bandwidths are nccl-tests' (its doc/PERFORMANCE.md): S is the bytes of the largest buffer
of a rank, algbw = S / t, and busbw = algbw times a factor that makes it comparable to the speed of
a link, whatever the number of ranks.
"""
