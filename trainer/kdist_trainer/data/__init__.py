"""Which samples a step uses, and how they reach a rank.

Only one number is ever saved: `samples_seen`. `order` turns it into the samples of the next step
and deals them to shards and ranks; `loader` fetches them, in the rank itself or ahead in processes.
Nothing here holds state that a resume needs.
"""
