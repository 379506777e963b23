"""`kdist`, also as `python -m kdist`."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code."""
    from kdist.app import cli

    cli.main(prog_name="kdist")


if __name__ == "__main__":
    main()
