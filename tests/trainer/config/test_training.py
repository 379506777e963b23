"""Sections of `spec.train` that are written in a short form."""

from __future__ import annotations

from kdist_trainer.config import Best, Keep


class WiderKeep(Keep):
    """With one more field."""

    young: int | None = None


def test_what_is_kept_is_written_as_a_number_only_if_that_says_all() -> None:
    for kept in (Keep(last=2), WiderKeep(last=2, best=None)):
        assert kept.model_dump_json() == "2"
    for more in ({"young": 3}, {"every": 10}, {"best": Best()}):
        wider = WiderKeep.model_validate({"last": 2, **more})
        assert not wider.is_number
        assert WiderKeep.model_validate(wider.model_dump()) == wider
