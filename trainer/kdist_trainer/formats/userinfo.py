"""URLs within a text, without the users and passwords that they name."""

from __future__ import annotations

import re
from typing import Final

_USERINFO: Final = re.compile(r"(?<=://)(?:[^\s/?#@]{0,256}:\S{0,2048}|[^\s/?#]{0,2048})@")


def hide_userinfo(text: str) -> str:
    """The text without the users and passwords of its URLs."""
    return _USERINFO.sub("", text)
