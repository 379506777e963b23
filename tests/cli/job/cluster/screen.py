"""The screen of a terminal, as far as kdist's views use one: text that wraps at the last column and
scrolls, the cursor moved up or home, lines and the screen erased.
"""

from __future__ import annotations

import re

_PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)|\x1b")


class Screen:
    """What a reader of the terminal sees; `gone` holds the lines that have scrolled away."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.gone: list[str] = []
        self._lines = [""]
        self._row = self._column = 0

    def resize(self, columns: int, rows: int) -> None:
        """Take another size as xterm does: cut lines, scroll so that the cursor stays visible."""
        self.columns, self.rows = columns, rows
        self._lines = [line[:columns] for line in self._lines]
        self._column = min(self._column, columns - 1)
        self._scroll()

    @property
    def lines(self) -> list[str]:
        """The lines on the screen, from its top."""
        return [line.rstrip() for line in self._lines]

    def write(self, text: str) -> None:
        """Show the text, or do what its codes say."""
        for part in _PARTS.finditer(text):
            argument, code, control, plain = part.groups()
            if code:
                self._obey(code, argument)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._next_line()
            elif plain:
                for character in plain:
                    self._put(character)

    def _obey(self, code: str, argument: str) -> None:
        if code == "A":
            self._row = max(0, self._row - int(argument or 1))
        elif code == "H":
            self._row = self._column = 0
        elif code == "J":
            self._lines = [""] * (self._row + 1)
        elif code == "K":
            self._lines[self._row] = ""
        else:
            assert code in "mhl", f"the screen does not know {code}"

    def _put(self, character: str) -> None:
        if self._column >= self.columns:
            self._column = 0
            self._next_line()
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1

    def _next_line(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")
        self._scroll()

    def _scroll(self) -> None:
        excess = max(0, self._row + 1 - self.rows)
        self.gone += self._lines[:excess]
        self._lines = self._lines[excess : excess + self.rows]
        self._row -= excess
