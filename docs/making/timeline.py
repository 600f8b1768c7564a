"""Timelines of the same faults under two launchers, as an SVG: the README's picture.

The SVG contains no script and loads nothing. It has a light and a dark background, like the system
of its reader, and is animated unless the reader's system prefers reduced motion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import attrs

Worker = tuple[str, int]  # the node and the local rank
MIN_PAUSE_S = 0.1  # shorter times without a step are not pauses: a step takes less


@attrs.frozen
class Span:
    """The steps of one worker in one generation. Times are in seconds since the first step."""

    node: str
    local_rank: int
    generation: int
    first_step: int
    last_step: int
    start_s: float
    end_s: float


@attrs.frozen
class Fault:
    """An action that disturbs the job."""

    at_s: float  # seconds since the first step
    label: str
    is_missed: bool = False  # there was no process to kill


@attrs.frozen
class Run:
    """The record of a job under one launcher."""

    launcher: str
    duration_s: float
    load: float  # the load average of the machine before the run
    faults: Sequence[Fault]
    spans: Sequence[Span]

    def workers(self) -> set[Worker]:
        """Return the workers that have completed a step."""
        return {(span.node, span.local_rank) for span in self.spans}

    def generations(self) -> list[list[Span]]:
        """Return the spans of each generation, in the order of the generations."""
        numbers = sorted({span.generation for span in self.spans})
        return [[span for span in self.spans if span.generation == n] for n in numbers]

    def pauses(self) -> list[tuple[float, float]]:
        """Return start and end of each time without a step."""
        busy = sorted((span.start_s, span.end_s) for span in self.spans)
        pauses, end = [], 0.0
        for start, stop in [*busy, (self.duration_s, self.duration_s)]:
            if start - end > MIN_PAUSE_S:
                pauses.append((end, start))
            end = max(end, stop)
        return pauses

    @property
    def last_step(self) -> int:
        """The step that the training has reached at the end of the run."""
        return max(span.last_step for span in self.generations()[-1])

    @property
    def num_repeated_steps(self) -> int:
        """Number of steps that were computed more than once, because they were not saved."""
        computed = [
            (min(s.first_step for s in spans), max(s.last_step for s in spans))
            for spans in self.generations()
        ]
        return sum(last - first + 1 for first, last in computed) - self.last_step

    def summary(self) -> str:
        paused = sum(end - start for start, end in self.pauses())
        return (
            f"{self.last_step:,} steps in {self.duration_s:.0f} s, "
            f"{self.num_repeated_steps} repeated, {paused:.1f} s without a step"
        )


def runs_to_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [attrs.asdict(run) for run in runs]


def runs_from_json(plain: Sequence[Mapping[str, Any]]) -> list[Run]:
    return [
        Run(
            run["launcher"],
            run["duration_s"],
            run["load"],
            [Fault(**fault) for fault in run["faults"]],
            [Span(**span) for span in run["spans"]],
        )
        for run in plain
    ]


# -- Layout, in pixels ---------------------------------------------------------------------------

WIDTH, HEIGHT = 880.0, 536.0
LEFT, RIGHT = 132.0, 856.0  # of the time axis
TITLE_Y, LEGEND_Y, LABELS_Y = 28.0, 52.0, 80.0
MARKS_TOP = 86.0  # the upper end of the lines of the faults
PANELS_Y = (112.0, 234.0)  # the headings of the two launchers
LANES_BELOW, LANE, BAR = 10.0, 24.0, 16.0  # from the heading to the bars, their distance and height
PAUSES_BELOW = 96.0  # from the heading to the lengths of the pauses
CHART_TOP, CHART_BOTTOM = 358.0, 462.0
TICK_S = 5
STILL_S, PLAY_S = 6.0, 10.0  # how long the picture is shown complete, and how long it then plays
STILL_PERCENT = 100 * STILL_S / (STILL_S + PLAY_S)
STYLE = f"""
text {{ font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }}
.title {{ font-size: 15px; font-weight: 600; }}
.small {{ font-size: 12px; fill: #59636e; }}
.end {{ text-anchor: end; }}
.middle {{ text-anchor: middle; }}
.pause {{ font-size: 12px; font-weight: 600; fill: #59636e; }}
.fault {{ font-weight: 600; fill: #b3261e; }}
.join {{ font-weight: 600; fill: #1a7f37; }}
.ground, .cover {{ fill: #ffffff; }}
.frame {{ fill: none; stroke: #d1d9e0; }}
.axis {{ stroke: #59636e; }}
.grid {{ stroke: #d1d9e0; stroke-width: 0.7; }}
.bar {{ fill: #3b78c4; }}
.later {{ fill: #8fbaea; }}
.mark {{ stroke: #b3261e; stroke-width: 1.5; stroke-dasharray: 4 3; }}
.joined {{ stroke: #1a7f37; }}
.curve {{ fill: none; stroke: #8250df; stroke-width: 2.2; stroke-linejoin: round; }}
.torchrun {{ stroke: #bc4c00; }}
.cover {{
  transform: translateX({WIDTH:g}px);
  animation: play {STILL_S + PLAY_S:g}s linear infinite;
}}
@keyframes play {{
  0%, {STILL_PERCENT:.2f}% {{ transform: translateX({WIDTH:g}px); }}
  {STILL_PERCENT + 0.01:.2f}% {{ transform: translateX(0); }}
  to {{ transform: translateX({RIGHT - LEFT + 20:g}px); }}
}}
@media (prefers-reduced-motion: reduce) {{ .cover {{ animation: none; }} }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3; }}
  .small, .pause {{ fill: #9198a1; }}
  .fault {{ fill: #ff8b82; }}
  .join {{ fill: #56d364; }}
  .ground, .cover {{ fill: #0d1117; }}
  .frame, .grid {{ stroke: #3d444d; }}
  .axis {{ stroke: #9198a1; }}
  .bar {{ fill: #4c8fe0; }}
  .later {{ fill: #2a5a94; }}
  .mark {{ stroke: #ff8b82; }}
  .joined {{ stroke: #56d364; }}
  .curve {{ stroke: #bc8cff; }}
  .torchrun {{ stroke: #f0883e; }}
}}
"""

Scale = Callable[[float], float]


def draw(runs: Sequence[Run]) -> str:
    """Return the SVG of two runs with the same faults."""
    duration, max_step = runs[0].duration_s, _round_up(max(run.last_step for run in runs))

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / duration

    def y(step: float) -> float:
        return CHART_BOTTOM - (CHART_BOTTOM - CHART_TOP) * step / max_step

    size = f'width="{WIDTH:g}" height="{HEIGHT:g}"'
    box = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" {size} role="img"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        "<title>Timelines of a training job with the same faults under two launchers</title>",
        f"<desc>{escape('; '.join(f'{run.launcher}: {run.summary()}' for run in runs))}</desc>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" {size} rx="8"/>',
        *_axes(x, y, duration, max_step),
    ]
    workers = sorted({worker for run in runs for worker in run.workers()})
    for run, top in zip(runs, PANELS_Y, strict=True):
        lines += [*_bars(run, workers, x, top), *_curve(run, x, y), *_pauses(run, x, top)]
    lines += _marks(runs[0], x)
    # It covers what has not been played yet, and is outside the picture at other times.
    cover = f'x="{LEFT - 1:g}" y="{MARKS_TOP:g}" width="{WIDTH:g}"'
    lines.append(f'<rect class="cover" {cover} height="{CHART_BOTTOM - MARKS_TOP:g}"/>')
    for run, top in zip(runs, PANELS_Y, strict=True):
        lines += _panel_texts(run, workers, top)
    lines += [*_legend(), *_axis_texts(x, y, duration, max_step), *_curve_names(runs, y)]
    corner = f'x="0.5" y="0.5" width="{WIDTH - 1:g}" height="{HEIGHT - 1:g}"'
    return "\n".join([*lines, f'<rect class="frame" {corner} rx="8"/>', "</svg>", ""])


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:.1f}" y="{y:g}">{escape(words)}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(kind: str, x: float, y: float, width: float, height: float = BAR) -> str:
    place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
    return f'<rect class="{kind}" {place} rx="2"/>'


def _round_up(step: int) -> int:
    """Return the next even multiple of 100, so that half of it is a round number, too."""
    return -(-step // 200) * 200


def _axes(x: Scale, y: Scale, duration: float, max_step: int) -> Iterator[str]:
    for step in (max_step / 2, max_step):
        yield _line("grid", LEFT, y(step), RIGHT, y(step))
    yield _line("axis", LEFT, CHART_BOTTOM, RIGHT, CHART_BOTTOM)
    yield _line("axis", LEFT, CHART_TOP, LEFT, CHART_BOTTOM)
    for seconds in range(0, int(duration) + 1, TICK_S):
        yield _line("axis", x(seconds), CHART_BOTTOM, x(seconds), CHART_BOTTOM + 5)


def _axis_texts(x: Scale, y: Scale, duration: float, max_step: int) -> Iterator[str]:
    for step in (0, max_step // 2, max_step):
        yield _text(LEFT - 8, y(step) + 4, f"{step:,}", "small end")
    yield _text(16, (CHART_TOP + CHART_BOTTOM) / 2 - 4, "training")
    yield _text(16, (CHART_TOP + CHART_BOTTOM) / 2 + 12, "step")
    for seconds in range(0, int(duration) + 1, TICK_S):
        yield _text(x(seconds), CHART_BOTTOM + 20, f"{seconds}", "small middle")
    yield _text((LEFT + RIGHT) / 2, CHART_BOTTOM + 38, "seconds since the first step", "middle")
    note = "Two nodes on one machine, CPU, gloo. elasticrun: a snapshot after each step."
    note += " torchrun: a checkpoint every 4 steps."
    yield _text(16, HEIGHT - 14, note, "small")


def _legend() -> Iterator[str]:
    yield _text(16, TITLE_Y, "The same faults under elasticrun and torchrun", "title")
    top = LEGEND_Y - 12
    yield _rect("sample bar", 16, top, 14, 14)
    yield _rect("sample bar later", 32, top, 14, 14)
    yield _text(52, LEGEND_Y, "steps of a worker, one shade per generation")
    yield _line("sample mark", 432, LEGEND_Y - 5, 456, LEGEND_Y - 5)
    yield _text(462, LEGEND_Y, "SIGKILL")
    yield _line("sample mark joined", 532, LEGEND_Y - 5, 556, LEGEND_Y - 5)
    yield _text(562, LEGEND_Y, "node B starts")
    yield _text(664, LEGEND_Y, "1.0 s", "pause")
    yield _text(702, LEGEND_Y, "time without a step")


def _panel_texts(run: Run, workers: Sequence[Worker], top: float) -> Iterator[str]:
    yield _text(16, top, run.launcher, "title")
    yield _text(LEFT, top, run.summary(), "small")
    for lane, (node, local_rank) in enumerate(workers):
        y = top + LANES_BELOW + LANE * lane + BAR - 3
        yield _text(16, y, f"{node}, worker {local_rank}", "small")


def _bars(run: Run, workers: Sequence[Worker], x: Scale, top: float) -> Iterator[str]:
    """Yield a bar for each worker in each generation."""
    for number, spans in enumerate(run.generations()):
        for span in spans:
            lane = workers.index((span.node, span.local_rank))
            width = max(1.5, x(span.end_s) - x(span.start_s))
            kind = "bar later" if number % 2 else "bar"
            yield _rect(kind, x(span.start_s), top + LANES_BELOW + LANE * lane, width)


def _pauses(run: Run, x: Scale, top: float) -> Iterator[str]:
    """Yield the length of each pause, and a note for each kill that found no process."""
    for start, end in run.pauses():
        yield _text(
            x((start + end) / 2), top + PAUSES_BELOW, f"{end - start:.1f} s", "pause middle"
        )
    for fault in run.faults:
        if fault.is_missed:
            yield _text(x(fault.at_s) + 6, top + LANES_BELOW + 2 * LANE, "nothing to kill", "small")


def _curve(run: Run, x: Scale, y: Scale) -> Iterator[str]:
    """Yield the steps of each generation as a line."""
    for spans in run.generations():
        first, last = min(s.first_step for s in spans), max(s.last_step for s in spans)
        start, end = min(s.start_s for s in spans), max(s.end_s for s in spans)
        points = f"{x(start):.1f},{y(first):.1f} {x(end):.1f},{y(last):.1f}"
        yield f'<polyline class="curve {run.launcher}" points="{points}"/>'


def _curve_names(runs: Sequence[Run], y: Scale) -> Iterator[str]:
    for run in runs:
        above = run.last_step == max(other.last_step for other in runs)
        middle = y(run.last_step) + (-8 if above else 32)
        yield _text(RIGHT - 4, middle, f"{run.launcher}: step {run.last_step:,}", "end")


def _marks(run: Run, x: Scale) -> Iterator[str]:
    """Yield a vertical line and a label for each fault."""
    for fault in run.faults:
        is_join = fault.label.startswith("start")
        kind = "mark joined" if is_join else "mark"
        yield _line(kind, x(fault.at_s), MARKS_TOP, x(fault.at_s), CHART_BOTTOM)
        label = "join middle" if is_join else "fault middle"
        yield _text(x(fault.at_s), LABELS_Y, fault.label, label)
