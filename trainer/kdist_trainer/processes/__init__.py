"""Processes of one machine: their descendants, their signals, their threads, their liveness and
what they are forked from. Free of torch.

`process_tree` finds and kills the processes below this one; `liveness` has the heartbeat of a rank
and the pipe that ends a process with its parent; `signals` is SIGTERM and SIGINT; `threads` starts
threads, calls functions in the background for a bounded time, and reads what native threads do;
`thread_errors` is what follows when a thread raises; `script_forkserver` forks the ranks of
scripts, and `shim` stands for an agent that is forked.
`descriptors` and `preallocated` keep a process working when descriptors or disk space are used up.
Not here: the agent, which uses all of these (`kdist_trainer.agent`).
"""
