"""The cluster as kdist uses it: objects as plain documents, watches and logs that survive an
outage, exec and forwarding.

`connect` reads the kubeconfig (exec plugins, in-cluster accounts and contexts included) and gives a
`Cluster`. This room is the only one that imports `kubernetes`, and only where it must: for the
tokens of an OpenID provider, and to forward ports; never its typed models, which cost half a second
to import.
"""

from kdist.cluster.access import Impersonation
from kdist.cluster.api_errors import ApiError, ApiNotFoundError
from kdist.cluster.applied import Applied, essence
from kdist.cluster.client import Cluster, connect
from kdist.cluster.ownership import ForeignError, check_owner, describe_owner
from kdist.cluster.streams import ExecSession
from kdist.cluster.transport import deadline

__all__ = [
    "ApiError",
    "ApiNotFoundError",
    "Applied",
    "Cluster",
    "ExecSession",
    "ForeignError",
    "Impersonation",
    "check_owner",
    "connect",
    "deadline",
    "describe_owner",
    "essence",
]
