"""Elements of HTML and SVG as text. Content and attribute values are escaped here and nowhere
else.
"""

from __future__ import annotations

from html import escape

_VOID = frozenset({"meta"})  # elements that HTML does not close


class Markup(str):
    """Text that is HTML already: it becomes part of a page as it is."""

    __slots__ = ()


def join(*content: str) -> Markup:
    """One piece of markup from several; what is not `Markup` is escaped."""
    return Markup(
        "".join(part if isinstance(part, Markup) else escape(part, quote=False) for part in content)
    )


def element(tag: str, /, *content: str, **attributes: object) -> Markup:
    """One element of HTML or SVG.

    Args:
        tag: its name.
        content: what is inside; text is escaped, `Markup` is not.
        attributes: by name, where `class_` stands for `class` and `text_anchor` for `text-anchor`.
            A float is written with one decimal, and None leaves the attribute out.
    """
    head = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if tag in _VOID else f"{join(*content)}</{tag}>"
    return Markup(f"<{tag}{head}>{end}")


def _value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
