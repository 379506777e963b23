"""What the controller writes into the status of a TrainingJob."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

from kdist.crd.definition import ConditionType
from kdist_controller import status


def test_the_schema_knows_every_condition_that_is_written_and_no_other() -> None:
    calls = (
        node
        for node in ast.walk(ast.parse(Path(status.__file__).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Condition"
    )
    written = {ast.literal_eval(call.args[0]) for call in calls}
    assert written == set(get_args(ConditionType))
