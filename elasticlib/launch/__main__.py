"""`python -m elasticlib.launch` is `elasticrun`."""

import sys

from .elasticrun import main

sys.exit(main())
