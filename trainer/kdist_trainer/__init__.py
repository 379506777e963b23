"""The part of kdist that every pod runs."""

__version__ = "0.1.0"
