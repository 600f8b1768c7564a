"""Runs `python -m elasticlib.launch`, which is the same as `elasticrun`."""

import sys

from .entry import main

sys.exit(main())
