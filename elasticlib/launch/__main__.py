"""`python -m elasticlib.launch` is `elasticrun`."""

import sys

from .elasticrun import command

sys.exit(command())
