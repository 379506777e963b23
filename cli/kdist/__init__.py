"""The part of kdist that turns what the user types into a running training."""

__version__ = "0.1.0"
