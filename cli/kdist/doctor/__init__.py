"""Checks of a cluster and of this machine before a job meets them: each one small, each with the
fix for what it finds.
"""

from kdist.doctor.examine import check_cluster, check_machine
from kdist.doctor.finding import Finding, Severity

__all__ = ["Finding", "Severity", "check_cluster", "check_machine"]
