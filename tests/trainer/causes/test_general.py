"""Every cause that a trainer may write has its sentence, where no row says more."""

from __future__ import annotations

from string import Formatter

from kdist_trainer.causes.advice import GENERAL
from kdist_trainer.config.exit_codes import Cause


def test_every_cause_of_the_trainer_has_a_sentence_and_advice() -> None:
    own_rules = {Cause.OOM_HOST}
    assert set(GENERAL) == set(Cause) - own_rules
    for cause, words in GENERAL.items():
        assert words.advice, cause
        fields = {name for _, name, _, _ in Formatter().parse(words.sentence) if name}
        assert "message" in fields <= {"where", "message", "collective"}, cause
