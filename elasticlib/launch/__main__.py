"""`python -m elasticlib.launch` is `elasticrun`."""

import sys

from .start import elasticrun

sys.exit(elasticrun())
