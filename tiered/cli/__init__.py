"""The command line: `tiered COMMAND`, also `python -m tiered.cli COMMAND`."""

from tiered.cli.app import main

__all__ = ["main"]
