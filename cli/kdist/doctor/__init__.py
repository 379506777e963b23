"""Checks whether a cluster and this machine can run jobs, for `kdist doctor`.

Each check is a function that yields findings with a severity and a fix. `examine` has the table of
checks and runs them; `cluster_checks` and `local_checks` contain them; `finding` is their result.
Nothing is changed: checks only read, or use a server-side dry run. Checks of a running job belong
to `kdist.diagnose`.
"""

from kdist.doctor.examine import check_cluster
from kdist.doctor.finding import Finding, Severity
from kdist.doctor.local_checks import check as check_machine
