"""The state of a training's modules and optimizers: what belongs to it, by which names, and how it
is loaded. Checkpoints, the continuation in place, averages and digests all read it here.

It is what the `state_dict` of the module has (parameters, frozen or not, buffers, extra state), the
optimizer's states that exist, and its groups with their numbers. Names are those of the module as
it was written: what `torch.compile`, DDP and activation checkpointing add to them is left out, when
the state is read as when it is loaded. Reading changes nothing; loading takes all of it, or raises
an error that names every difference and changes nothing.
"""

from kdist_trainer.state.attributes import (
    Attributes,
    describe_changed,
    eval_mode,
)
from kdist_trainer.state.kinds import (
    ValueKind,
    describe,
    digest_of,
    digests_of,
    find_differences,
    flatten,
    kind_of,
    put,
)
from kdist_trainer.state.loading import (
    EXTRA,
    StateMismatchError,
    find_module_problems,
    find_optimizer_problems,
    load_module,
    load_optimizer,
    load_state,
    read_module,
    read_optimizer,
    read_state,
    template,
)
from kdist_trainer.state.names import (
    AS_NEW,
    BufferNames,
    BufferSlot,
    absent_buffers,
    buffer_slots,
    parameter_names,
    separate,
)
