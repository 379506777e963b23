"""Makes what says who may do what, of the table in kdist.rbac: `python -m
tests.charts.rights_files`; tests compare.
"""

from __future__ import annotations

from tests.house.tree import ROOT
from tools.reference import rights

TEMPLATE = ROOT / "charts" / "kdist" / "templates" / "_rules.tpl"
CONTROLLER = TEMPLATE.with_name("_controller.tpl")
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
_BEGIN, _END = "<!-- made from kdist.rbac -->\n", "<!-- end -->\n"


def page() -> str:
    """Text of the page, with the table as it has to be."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    return f"{before}{_BEGIN}{rights.table()}\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    TEMPLATE.write_text(rights.roles_template())
    CONTROLLER.write_text(rights.controller_template())
    PAGE.write_text(page())
