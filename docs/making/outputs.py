"""Writes what docs/guide/output.md shows: the output of commands, from real runs.

`python docs/making/outputs.py` runs two jobs of about 30 seconds together, and rewrites the blocks
of the page. With Chromium it also takes the picture of the report. A test compares the help text,
and another one runs the jobs and compares the lines, except for numbers and names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))

from elasticlib.observe.formatting import format_table  # noqa: E402

PAGE = DOCS / "guide" / "output.md"
PICTURE = DOCS / "pictures" / "report.png"
PICTURE_SIZE = (1000, 790)  # up to the end of the timeline
TIMEOUT_S = 120.0

FAILING_SCRIPT = """\
import os
import time

from elasticlib import context


def train(step):
    time.sleep(0.05)
    if step == 20 and os.environ["RANK"] == "1":
        raise ValueError("label 10 is not in the range 0 to 9")


for step in range(1, 1000):
    train(step)
    context().step(step)
"""


def play(directory: Path) -> dict[str, str]:
    """Run the commands in an empty directory.

    Returns:
        The output of the commands by the name of the block. The report is in `report.html`.
    """
    (directory / "broken.py").write_text(FAILING_SCRIPT)
    (directory / "train.py").write_text(_start_script())
    texts = {
        "help": _run(directory, "elasticrun", "--help"),
        "failure": _play_failure(directory),
        "events": _last_lines(_run(directory, "elasticlib", "events"), 9),
    }
    status, texts["recovery"] = _play_recovery(directory)
    report = directory / "report.html"
    _run(directory, "elasticlib", "report", "-o", str(report))
    report.write_text(_neutral(report.read_text(), directory))
    texts = {name: _neutral(text, directory) for name, text in texts.items()}
    return {**texts, "status": _align(_neutral(status, directory))}


def _play_failure(directory: Path) -> str:
    flags = ("--nproc-per-node", "2", "--log-dir", "logs")
    return _summary(_run(directory, "elasticrun", *flags, "broken.py", exit_code=1))


def _play_recovery(directory: Path) -> tuple[str, str]:
    """Return what `elasticlib status` prints after a worker was killed, and the exit summary."""
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    with (directory / "job.log").open("wb") as log:
        job = subprocess.Popen(
            [*_command("elasticrun"), *flags, "train.py", "200"],
            cwd=directory,
            env=_environment(directory),
            stdout=log,
            stderr=log,
        )

    def wait_for(generation: int, step: int) -> str:
        """Wait until the job has reached this step, and return the status."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            text = _run(directory, "elasticlib", "status", "--json", exit_code=None)
            status = json.loads(text or "{}")
            nodes = status.get("nodes") or [{}]
            steps = [worker.get("step") or 0 for worker in nodes[0].get("workers", ())]
            if status.get("generation") == generation and steps and min(steps) >= step:
                return _run(directory, "elasticlib", "status", exit_code=None)
            time.sleep(0.2)
        raise TimeoutError((directory / "job.log").read_text())

    try:
        wait_for(1, 50)
        os.kill(int((directory / "rank1.pid").read_text()), signal.SIGKILL)
        status = wait_for(2, 100)
        if job.wait(TIMEOUT_S):
            raise RuntimeError((directory / "job.log").read_text())
    finally:
        job.kill()
        job.wait()
    return status, _summary((directory / "job.log").read_text())


def _start_script() -> str:
    """Return the training script of the first page."""
    text = (DOCS / "quickstart.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    if found is None:
        raise LookupError("quickstart.md has no script")
    return found[1]


def _command(name: str) -> list[str]:
    """Return a command line under which the program has its short name."""
    module = {"elasticrun": "elasticlib.launch.entry", "elasticlib": "elasticlib.launch.cli"}[name]
    code = f"import sys; sys.argv[0] = {name!r}; from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code]


def _environment(directory: Path) -> dict[str, str]:
    paths = (str(DOCS.parent), os.environ.get("PYTHONPATH", ""))
    own = {"TMPDIR": str(directory), "COLUMNS": "96", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run(directory: Path, name: str, *args: str, exit_code: int | None = 0) -> str:
    done = subprocess.run(
        [*_command(name), *args],
        cwd=directory,
        env=_environment(directory),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if exit_code not in (None, done.returncode):
        raise RuntimeError(f"{name} {' '.join(args)} ended with {done.returncode}: {done.stderr}")
    return done.stdout or ("" if exit_code is None else done.stderr)


def _summary(text: str) -> str:
    """Return the exit summary at the end of a run's output."""
    lines = text.splitlines()
    (start,) = (i for i, line in enumerate(lines) if re.match(r"\S+ (min .*)?s? ?in \d+ gen", line))
    return "\n".join(lines[start:]) + "\n"


def _last_lines(text: str, count: int) -> str:
    return "\n".join(text.splitlines()[-count:]) + "\n"


def _neutral(text: str, directory: Path) -> str:
    """Replace the names of this machine and of the directory."""
    text = text.replace(str(directory), "/home/you")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "gpu-a", text)


def _align(text: str) -> str:
    """Align the columns of the tables, which follow the first paragraph, again."""
    head, *tables = text.rstrip("\n").split("\n\n")
    paragraphs = [head]
    for table in tables:
        rows = [re.split("  +", line) for line in table.splitlines()]
        paragraphs.append("\n".join(format_table(rows[0], rows[1:])))
    return "\n\n".join(paragraphs) + "\n"


def with_blocks(page: str, texts: Mapping[str, str]) -> str:
    """Return the page with these texts in the blocks of their names.

    Raises:
        LookupError: the page has no such block.
    """
    for name, text in texts.items():
        start, end = f"<!-- output of {name} -->\n```text\n", "```\n<!-- end -->\n"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise LookupError(f"{PAGE.name} has no block for {name}")
        page = f"{before}{start}{text}{end}{after}"
    return page


def block_of(page: str, name: str) -> str:
    """Return the text of a block."""
    rest = page.partition(f"<!-- output of {name} -->\n```text\n")[2]
    return rest.partition("```\n<!-- end -->\n")[0]


def take_picture(chromium: str, report: Path, directory: Path, picture: Path = PICTURE) -> None:
    """Save the upper part of a report as a picture.

    Args:
        chromium: the browser's program.
        report: the report.
        directory: an existing directory for the files of the browser.
        picture: the PNG file to write.
    """
    sys.path.insert(0, str(DOCS.parent / "tests" / "integrations"))
    from base64 import b64decode

    from chromium import start_browser  # type: ignore[import-not-found]

    width, height = PICTURE_SIZE
    with start_browser(chromium, directory) as browser:
        browser.open(report, width)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = browser.call("Page.captureScreenshot", format="png", clip=clip)
    picture.write_bytes(b64decode(found["data"]))


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "job"
        directory.mkdir()
        PAGE.write_text(with_blocks(PAGE.read_text(), play(directory)))
        chromium = shutil.which("chromium")
        if chromium is None:
            print("chromium is not installed: the picture of the report is left as it is")
            return
        take_picture(chromium, directory / "report.html", Path(temporary))


if __name__ == "__main__":
    main()
