"""The picture on the first page: a job of about 25 seconds that is disturbed four times.

`make picture` runs the job, keeps what it did in docs/pictures/survives.json and draws it; the
report of the same job becomes the example that the guide links to. The picture has a background of
its own, light or dark as its reader's system is, and moves unless its reader asks for less motion;
it needs no script.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import log
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
KEPT, PICTURE, REPORT = (
    DOCS / "pictures" / name for name in ("survives.json", "survives.svg", "report.html")
)
PATIENCE = 120.0
"""Seconds for the job to come as far as the next disturbance needs."""
POINTS = 400
"""Of the loss's curve, at most."""

COMMAND = "elasticrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 train.py"


@attrs.frozen
class Span:
    """The steps of one rank in one generation. begin, end: when the first and the last of them
    were done, in seconds since the job's first step."""

    node: str
    rank: int
    generation: int
    first: int
    last: int
    begin: float
    end: float


@attrs.frozen
class Story:
    """What one run of the job did. faults: time and words of each disturbance. loss: of rank 0's
    steps, for each generation time and loss."""

    faults: Sequence[tuple[float, str]]
    spans: Sequence[Span]
    loss: Sequence[Sequence[tuple[float, float]]]

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def steps(self) -> int:
        return max(span.last for span in self.spans)

    @property
    def redone(self) -> int:
        """Steps that rank 0 did again."""
        return sum(span.last - span.first + 1 for span in self.spans if span.rank == 0) - self.steps

    def pauses(self) -> list[tuple[float, float]]:
        """Between two generations: when it began, and how long nobody did a step."""
        numbers = sorted({span.generation for span in self.spans})
        ends = [max(s.end for s in self.spans if s.generation == n) for n in numbers]
        begins = [min(s.begin for s in self.spans if s.generation == n) for n in numbers]
        return [(end, begin - end) for end, begin in zip(ends, begins[1:], strict=False)]


# -- the run ----------------------------------------------------------------------------------


def read(folder: Path) -> dict[tuple[str, int], list[tuple[int, int, float, float]]]:
    """By node and rank: generation, step, time and loss of each step."""
    found = {}
    for path in folder.glob("node ?.[0-9]"):
        words = (line.split() for line in path.read_text().splitlines())
        steps = [(int(w[0]), int(w[1]), float(w[2]), float(w[3])) for w in words if len(w) == 4]
        found[path.stem, int(path.suffix[1:])] = steps
    return found


def play(folder: Path) -> Story:
    """Run the job and disturb it."""
    port = free_port()
    nodes: dict[str, subprocess.Popen[bytes]] = {}
    faults: list[tuple[float, str]] = []

    def start(name: str, workers: int) -> None:
        endpoint = ("--rdzv-id", "picture", "--rdzv-endpoint", f"127.0.0.1:{port}")
        flags = ("--nnodes", "1:2", "--nproc-per-node", str(workers), "--max-restarts", "3")
        quick = ("--rdzv-conf", "last_call_timeout=0.3")
        program = (str(HERE / "training.py"), str(folder))
        with (folder / f"{name}.log").open("wb") as log:
            nodes[name] = subprocess.Popen(
                [sys.executable, "-m", "elasticlib.launch", *endpoint, *flags, *quick, *program],
                env={**os.environ, "NODE": name, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
                stdout=log,
                stderr=log,
            )

    def until(look: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not look():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
                raise TimeoutError(f"the job does not go on: {logs}")
            time.sleep(0.01)

    def trains(name: str, rank: int, generation: int, seconds: float) -> None:
        """Waits until this rank has trained for so long in a generation that is as late as this."""

        def look() -> bool:
            steps = [s for s in read(folder).get((name, rank), []) if s[0] >= generation]
            return bool(steps) and steps[-1][2] - steps[0][2] > seconds

        until(look)

    def kill(words: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        faults.append((time.monotonic(), words))

    try:
        start("node A", 2)
        trains("node A", 1, 1, 5.0)
        kill("kill -9 worker", workers_of(nodes["node A"].pid)[1])
        trains("node A", 1, 2, 2.0)
        start("node B", 1)
        trains("node B", 2, 3, 5.0)
        kill("kill -9 node B", nodes["node B"].pid)
        trains("node A", 0, 4, 4.0)
        kill("kill -9 worker", workers_of(nodes["node A"].pid)[0])
        trains("node A", 0, 5, 4.0)
        (folder / "finish").touch()
        if nodes["node A"].wait(PATIENCE):
            raise TimeoutError("node A failed")
    finally:
        for node in nodes.values():
            node.kill()
            node.wait()
    return story_of(read(folder), faults)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(agent: int) -> list[int]:
    """Return the workers in the order of their ranks, in which the fork server forks them."""
    servers = [pid for child in children(agent) for pid in children(child) if is_fork_server(pid)]
    return forked_by(servers[0])


def is_fork_server(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text() == "fork-server\n"


def forked_by(server: int) -> list[int]:
    """Return the workers of a fork server, and of the second one that it has forked."""
    found = []
    for pid in children(server):
        found += forked_by(pid) if is_fork_server(pid) else [pid]
    return found


def story_of(
    read: Mapping[tuple[str, int], Sequence[tuple[int, int, float, float]]],
    faults: Iterable[tuple[float, str]],
) -> Story:
    """What the ranks wrote, with times since the first step."""
    zero = min(steps[0][2] for steps in read.values())
    spans = []
    for (node, rank), steps in sorted(read.items()):
        for generation in sorted({step[0] for step in steps}):
            own = [step for step in steps if step[0] == generation]
            begin, end = (round(own[at][2] - zero, 3) for at in (0, -1))
            spans.append(Span(node, rank, generation, own[0][1], own[-1][1], begin, end))
    joined = next(span.begin for span in spans if span.node == "node B")
    told = sorted([*((at - zero, words) for at, words in faults), (joined, "node B joins")])
    own = read["node A", 0]
    kept = own[:: max(1, -(-len(own) // POINTS))]
    loss = [
        [(round(at - zero, 2), value) for of, _, at, value in kept if of == generation]
        for generation in sorted({step[0] for step in own})
    ]
    return Story([(round(at, 3), words) for at, words in told], spans, loss)


def from_plain(plain: Mapping[str, Any]) -> Story:
    faults = [(at, words) for at, words in plain["faults"]]
    loss = [[(at, value) for at, value in part] for part in plain["loss"]]
    return Story(faults, [Span(**span) for span in plain["spans"]], loss)


# -- the picture ------------------------------------------------------------------------------

WIDE, HIGH = 880.0, 372.0
LEFT, RIGHT = 116.0, 860.0
LANES, LANE, BAR = 108.0, 30.0, 18.0
CURVE = (214.0, 312.0)
"""From the top of the loss's curve to its bottom."""
REST, PLAYED = 5.0, 9.0
"""Seconds for which the picture is shown whole, as in a still of it, and in which it then plays."""
BEGINS = 100 * REST / (REST + PLAYED)
STYLE = f"""
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; }}
.small {{ font-size: 12px; fill: #59636e; }}
.fault {{ font-weight: 600; fill: #b3261e; }}
.join {{ font-weight: 600; fill: #1a7f37; }}
.ground, .cover {{ fill: #ffffff; }}
.frame {{ fill: none; stroke: #d1d9e0; }}
.bar {{ fill: #3b78c4; }}
.later {{ fill: #6aa1e0; }}
.mark {{ stroke: #b3261e; stroke-width: 1.5; stroke-dasharray: 4 3; }}
.joined {{ stroke: #1a7f37; }}
.loss {{ fill: none; stroke: #8250df; stroke-width: 1.8; stroke-linejoin: round; }}
.cover {{ transform: translateX({WIDE:g}px); animation: play {REST + PLAYED:g}s linear infinite; }}
@keyframes play {{
  0%, {BEGINS:.2f}% {{ transform: translateX({WIDE:g}px); }}
  {BEGINS + 0.01:.2f}% {{ transform: translateX(0); }}
  to {{ transform: translateX({RIGHT - LEFT + 20:g}px); }}
}}
@media (prefers-reduced-motion: reduce) {{ .cover {{ animation: none; }} }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3; }}
  .small {{ fill: #9198a1; }}
  .fault {{ fill: #ff8b82; }}
  .join {{ fill: #56d364; }}
  .ground, .cover {{ fill: #0d1117; }}
  .frame {{ stroke: #3d444d; }}
  .bar {{ fill: #4c8fe0; }}
  .later {{ fill: #2f66a8; }}
  .mark {{ stroke: #ff8b82; }}
  .joined {{ stroke: #56d364; }}
  .loss {{ stroke: #bc8cff; }}
}}
"""


def draw(story: Story) -> str:
    """The SVG's text."""

    def x(at: float) -> float:
        return LEFT + (RIGHT - LEFT) * at / story.seconds

    title = f"A training job that goes on through {len(story.faults)} disturbances"
    size = f'width="{WIDE:g}" height="{HIGH:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE:g} {HIGH:g}" {size} '
        'role="img">',
        f"<title>{title}</title>",
        f"<desc>{escape(summary(story))}</desc>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" {size} rx="8"/>',
    ]
    lines += [*_lanes(story, x), *_curve(story, x), *_faults(story, x)]
    # It hides what has not been played yet, and lies outside where nothing moves.
    cover = f'x="{LEFT - 4:g}" y="40" width="{WIDE:g}" height="{CURVE[1] - 36:g}"'
    lines.append(f'<rect class="cover" {cover}/>')
    lines += _words(story)
    corner = f'x="0.5" y="0.5" width="{WIDE - 1:g}" height="{HIGH - 1:g}"'
    return "\n".join([*lines, f'<rect class="frame" {corner} rx="8"/>', "</svg>", ""])


def summary(story: Story) -> str:
    """The picture's last line."""
    paused = sum(pause for _, pause in story.pauses())
    return (
        f"{story.steps} steps in {story.seconds:.0f} s: {story.redone} of them done twice, "
        f"{paused:.1f} s without a step"
    )


def _lanes(story: Story, x: Callable[[float], float]) -> list[str]:
    """A bar for each rank in each generation."""
    bars = []
    for span in story.spans:
        kind = "bar" if span.generation % 2 else "bar later"
        top = LANES + LANE * span.rank
        place = f'x="{x(span.begin):.1f}" y="{top:g}" height="{BAR:g}" rx="2"'
        bars.append(f'<rect class="{kind}" {place} width="{x(span.end) - x(span.begin):.1f}"/>')
    return bars


def _curve(story: Story, x: Callable[[float], float]) -> list[str]:
    """The loss's logarithm, with a gap wherever nobody trained."""
    top, bottom = CURVE
    values = [log(value) for part in story.loss for _, value in part]
    high = (bottom - top) / (max(values) - min(values))
    drawn = []
    for part in story.loss:
        points = (f"{x(at):.1f},{top + high * (max(values) - log(v)):.1f}" for at, v in part)
        drawn.append(f'<polyline class="loss" points="{" ".join(points)}"/>')
    return drawn


def _faults(story: Story, x: Callable[[float], float]) -> list[str]:
    """A line and words for each disturbance, and how long nobody trained."""
    drawn = []
    pauses = story.pauses()
    for (at, words), (begin, pause) in zip(story.faults, pauses, strict=True):
        joins = "joins" in words
        middle, line = x(begin if joins else at), "mark joined" if joins else "mark"
        drawn += [
            f'<line class="{line}" x1="{middle:.1f}" x2="{middle:.1f}" y1="84" y2="{CURVE[1]:g}"/>',
            f'<text class="{"join" if joins else "fault"}" x="{middle - 6:.1f}" y="60">'
            f"{escape(words)}</text>",
            f'<text class="small" x="{middle - 6:.1f}" y="78">back in {pause:.1f} s</text>',
        ]
    return drawn


def _words(story: Story) -> list[str]:
    """What is there from the beginning."""
    places = [
        ("", 16.0, 26.0, f"$ {COMMAND}"),
        *(
            ("", 16.0, LANES + LANE * rank + 14, f"rank {rank} on {node[-1]}")
            for node, rank in sorted({(span.node, span.rank) for span in story.spans})
            if (node == "node B") == (rank == 2)
        ),
        ("", 16.0, CURVE[0] + 14, "loss"),
        ("", 16.0, HIGH - 20, summary(story)),
    ]
    return [f'<text x="{x:g}" y="{y:g}">{escape(words)}</text>' for _, x, y, words in places]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="picture-") as folder:
        story = play(Path(folder))
        report = (sys.executable, "-m", "elasticlib.launch.cli", "report", "picture")
        where = {**os.environ, "TMPDIR": folder}
        subprocess.run([*report, "--output", str(REPORT)], env=where, check=True)
    KEPT.write_text(json.dumps(attrs.asdict(story)) + "\n")
    PICTURE.write_text(draw(story))
    print(f"{summary(story)}: {PICTURE.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
