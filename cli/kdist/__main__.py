"""`kdist`, also as `python -m kdist`."""

from __future__ import annotations

import gc


def main() -> None:
    """Run the command line and exit with its code."""
    gc.set_threshold(100_000)  # start-up makes much and throws nothing away: looking for garbage takes a tenth of it
    from kdist.app import cli

    cli.main(prog_name="kdist")


if __name__ == "__main__":
    main()
