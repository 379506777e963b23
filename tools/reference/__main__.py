"""`python -m tools.reference` writes the generated pages."""

from __future__ import annotations

from tools.reference.pages import write

if __name__ == "__main__":
    write()
