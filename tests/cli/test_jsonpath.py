"""`-o jsonpath=…` picks what kubectl's picks."""

from __future__ import annotations

import pytest

from kdist import jsonpath
from kdist.errors import UsageError

DOCUMENT = {
    "items": [{"name": "a", "step": 3}, {"name": "b", "step": None}],
    "odd.key": {"x": [1, 2]},
    "phase": "Läuft",
}


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{.phase}", "Läuft"),
        ("{.items[*].name}", "a b"),
        ("{.items[0].step}", "3"),
        ("{.items[-1].name}", "b"),
        ("{.items[1].step}", "null"),
        ("{.items[7].name}", ""),
        ("{.nothing.at.all}", ""),
        ("{['odd.key'].x[1]}", "2"),
        ("{.items[0]}", '{"name": "a", "step": 3}'),
        (".phase", "Läuft"),
        ("{$.phase}", "Läuft"),
        ('phase={.phase}{"\\n"}step={.items[0].step}', "phase=Läuft\nstep=3"),
    ],
)
def test_a_template_picks_what_it_says(template: str, found: str) -> None:
    assert jsonpath.find(template, DOCUMENT) == found


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{range .items[*]}{.name}{end}", "range and end"),
        ("{.a[?(@.b)]}", r"filters"),
        ("{.items[?(@.name=='a')].step}", r"filters"),
        ("{..name}", "recursive descent"),
        ("{['phase','odd.key']}", "unions"),
        ("{.items[0,1].name}", "unions"),
        ("{.items[0:2].name}", "slices"),
    ],
)
def test_what_kubectl_has_and_kdist_has_not_is_named(template: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"jsonpath does not understand {what}") as reported:
        jsonpath.find(template, DOCUMENT)
    assert "jq" in (reported.value.hint or "")


@pytest.mark.parametrize("template", ["{.items[}", "{.phase", "}", "{}}", "{.items[a]}"])
def test_a_template_that_cannot_be_read_is_wrong_usage(template: str) -> None:
    with pytest.raises(UsageError, match="jsonpath cannot read"):
        jsonpath.find(template, DOCUMENT)
