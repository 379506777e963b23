"""Elements: what is escaped, and what is not."""

from __future__ import annotations

from html import unescape
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from kdist.report.page import Markup, element, join

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\r")
)


def test_an_element_has_content_and_attributes() -> None:
    line = element("line", x1=2, y1=1 / 3, class_="rule", text_anchor="end", id=None)
    assert line == '<line x1="2" y1="0.3" class="rule" text-anchor="end"></line>'
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert element("p", "a < b", element("b", "c")) == "<p>a &lt; b<b>c</b></p>"


@given(TEXT, TEXT)
def test_no_text_can_add_markup(content: str, value: str) -> None:
    markup = element("p", content, title=value)
    tree = ElementTree.fromstring(markup)  # noqa: S314 - our own
    assert (tree.text or "", list(tree)) == (content, [])
    assert unescape(markup.split('"')[1]) == value


def test_joined_markup_is_not_escaped_again() -> None:
    both = join("<", element("b", "&"))
    assert both == "&lt;<b>&amp;</b>"
    assert join(both) == both
    assert isinstance(both, Markup)
