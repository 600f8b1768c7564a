"""The example, which takes its time over each step for as long as a file is there.

`paced_training.py FILE ...`: so that a job is still training when a test has started new nodes. The
file may say how many seconds.
"""

import contextlib
import sys
import time
from pathlib import Path

from elasticlib.examples import train_text

SECONDS = 0.15
pace = Path(sys.argv.pop(1))
finish_step = train_text.finish_step


def finish_slowly(*args, **more):
    with contextlib.suppress(FileNotFoundError):
        time.sleep(float(pace.read_text() or SECONDS))
    return finish_step(*args, **more)


train_text.finish_step = finish_slowly
train_text.main(train_text.parse())
