"""Time that several spans cover counts once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kdist_trainer.instrumentation.step_timer import union_length


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 20)).map(
            lambda span: (span[0], span[0] + span[1])
        )
    )
)
def test_time_covered_twice_counts_once(spans: list[tuple[int, int]]) -> None:
    assert union_length(spans) == len(
        {moment for start, end in spans for moment in range(start, end)}
    )
