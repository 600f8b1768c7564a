"""Module that the fork server of a node imports: it imports what workers need, and then waits.

A node that is started in advance waits in this import until the soak admits it, because no node
joins before its fork server is ready. The gate is a file, whose path is in SOAK_GATE. The file with
the suffix `.ready` shows that the node waits.
"""

import os
import time
from pathlib import Path

import torch._dynamo  # noqa: F401  the optimizer would import it in every worker

import elasticlib.examples.train_text  # noqa: F401
import soak.campaign
import soak.shared_page  # noqa: F401

if "SOAK_GATE" in os.environ:
    gate = Path(os.environ["SOAK_GATE"])
    gate.with_suffix(".ready").touch()
    while not gate.exists():
        time.sleep(0.01)
