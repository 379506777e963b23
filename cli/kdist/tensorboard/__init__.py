"""`kdist port-forward NAME tensorboard`: shows the event files of a job in TensorBoard.

`forward` runs TensorBoard in a pod of the job, in a helper pod, or on this machine, and forwards a
local port to it. The trainer's part is `kdist_trainer.tensorboard`; the command is
`kdist.commands.port_forward`, which loads this package for the word `tensorboard`.
"""
