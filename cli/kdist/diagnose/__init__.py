"""Why a job does not do what it should: one ranked cause, with the evidence, the way out and the
next command. Pure.
"""

from kdist.diagnose.ranking import RULES, diagnose
from kdist.diagnose.rule import Diagnosis

__all__ = ["RULES", "Diagnosis", "diagnose"]
