"""The bench of collectives: what `kdist bench` runs on every rank, as a script under the same agent
and rendezvous as any job.

Sizes and bandwidths are nccl-tests' (its doc/PERFORMANCE.md): S is the bytes of the largest buffer
of a rank, algbw = S / t, and busbw = algbw times a factor that makes it comparable to the speed of
a link, whatever the number of ranks.
"""
