"""What the tests of chart, rules and dashboards may ask for."""

from tests.cli.conftest import kdist

__all__ = ["kdist"]
