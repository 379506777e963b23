"""Client of the Kubernetes API: objects as plain documents, watches and logs that survive an
outage, exec and port forwarding.

`client` has the objects, `transport` sends requests and repeats them, `watch` and `streams` stay
connected, `kubeconfig` says which server to connect to, and with which credentials, `job_objects`
has the objects of one job, `polling` waits for conditions, `resources` knows the path of each kind,
`api_errors` what servers refuse. `connect` reads the kubeconfig (including exec plugins, in-cluster
service accounts and contexts) and returns a `Cluster`. Only this package imports `kubernetes`, and
only for the tokens of an OpenID provider and for port forwarding; never its typed models, which
take half a second to import.
"""

from kdist.cluster.api_errors import ApiError, ApiNotFoundError
from kdist.cluster.client import Applied, Cluster, connect, guard, normalize
from kdist.cluster.job_objects import JobObjects, find_makers
from kdist.cluster.kubeconfig import Impersonation
from kdist.cluster.streams import ExecSession
from kdist.cluster.transport import deadline
from kdist.manifest import ForeignError, JobOwner, describe_owner
