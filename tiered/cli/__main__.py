"""`python -m tiered.cli`."""

import sys

from tiered.cli.app import main

sys.exit(main())
