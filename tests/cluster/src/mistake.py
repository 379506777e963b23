"""A script that fails in the code of its user."""

raise ValueError("the answer is 41")
