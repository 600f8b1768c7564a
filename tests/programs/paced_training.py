"""Run examples/train_text.py slowly, so that it is still training when a test starts new nodes.

Usage: paced_training.py FILE ARGUMENTS. While FILE exists, each step takes longer, by as many
seconds as FILE contains, or by 0.15 s if it is empty.
"""

import contextlib
import sys
import time
from pathlib import Path

from elasticlib.examples import train_text

SECONDS = 0.15
pace = Path(sys.argv.pop(1))
end_step = train_text.end_step


def end_step_slowly(*args, **kwargs):
    with contextlib.suppress(FileNotFoundError):
        time.sleep(float(pace.read_text() or SECONDS))
    return end_step(*args, **kwargs)


train_text.end_step = end_step_slowly
train_text.main(train_text.parse_args())
