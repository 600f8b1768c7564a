"""What a node's template imports: all that its workers need, and then it waits to be let in.

A node that is started in advance stands at its gate, as no node joins before its template is
ready. The gate is a file, named by SOAK_GATE; `.ready` beside it says that the node is there.
"""

import os
import time
from pathlib import Path

import torch._dynamo  # noqa: F401  an optimizer would import it in every worker

import elasticlib.examples.train_text  # noqa: F401
import soak.board
import soak.campaign  # noqa: F401

if "SOAK_GATE" in os.environ:
    gate = Path(os.environ["SOAK_GATE"])
    gate.with_suffix(".ready").touch()
    while not gate.exists():
        time.sleep(0.01)
