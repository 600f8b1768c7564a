"""Values that the template of the report shows, computed from the history of a run.

All functions are pure. Texts are plain: the template escapes them. Positions are percentages of the
width or height of a drawing, so a page needs no fixed width.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import Any, TypeVar

import attrs

from ...clock import format_utc
from ..event import TimelineEvent
from ..formatting import (
    DAY,
    HOUR,
    LOST_SNAPSHOT_TEXT,
    MINUTE,
    TERMINATED_TEXT,
    format_count,
    format_duration,
    format_list,
    format_number,
    format_percent,
    format_ranges,
    plural,
)
from ..history import (
    PHASES,
    Generation,
    GenerationTrigger,
    History,
    JobState,
    NodeHistory,
    NodeMembership,
    ProgressSample,
)

MAX_TEXT = 600  # characters of one reason
MAX_LISTED_SPANS = 6
MAX_LANES = 24  # nodes with a lane of their own
MIN_LANES = 6
MAX_BANDS = 2000  # of all lanes together
MAX_FAULT_LINES = 48
MIN_STARTUP_WIDTH = 0.25  # per cent of the width
MIN_LABEL_WIDTH = 2.0
ICON_DISTANCE = 1.6  # per cent; closer icons of one kind are shown as one
SAVE_ICON_DISTANCE = 2.6
MAX_INTERRUPTIONS = 12
MAX_CURVE_POINTS = 1200
LOG_SCALE_RATIO = 100.0  # a positive loss that varies by more than this gets a logarithmic scale
MAX_RECOVERIES = 16
MAX_FAILURES = 20  # listed one by one; more are grouped by reason
MAX_REASONS = 40
MAX_NODES = 40

SAVE_KINDS = {"checkpoint.saved": "Checkpoints", "snapshot.taken": "Snapshots in memory"}
NODE_ICONS = ("failure", "control.requested", "drain.requested", "events.dropped")
ICONS: Mapping[str, str] = {
    "failure": "failure",
    "vanished": "node lost",
    "control.requested": "request of an operator",
    "drain.requested": "drain requested",
    "events.dropped": "events dropped here",
    "checkpoint.saved": "checkpoint",
    "snapshot.taken": "snapshot in memory",
    "SUCCEEDED": "succeeded",
    "FAILED": "node failed",
    "DRAINED": "drained",
    "STOPPED": "stopped",
}
"""Meaning of each icon of the timeline."""
END_TEXTS = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.DRAINED: "drained",
    JobState.STOPPED: "stopped",
}

Points = list[tuple[float, float]]
Item = TypeVar("Item")


# -- positions and texts ---------------------------------------------------------------------------


@attrs.frozen
class Axis:
    """Maps values between `first` and `last` to 0 to 100 per cent."""

    first: float
    last: float

    def __call__(self, value: float) -> float:
        span = self.last - self.first
        return 100 * min(1.0, max(0.0, (value - self.first) / span)) if span > 0 else 0.0


@attrs.frozen
class Bar:
    """A rectangle of a drawing."""

    left: float
    width: float
    style: str  # CSS classes
    title: str = ""  # tooltip
    label: str = ""  # shown inside, if it fits
    height: float | None = None  # per cent from the bottom; None for the whole height


@attrs.frozen
class Icon:
    """An icon of the timeline."""

    kind: str  # key of ICONS
    left: float
    title: str


def seconds_text(seconds: float) -> str:
    """Format a duration so that no line break separates the number from its unit."""
    return format_duration(seconds).replace(" ", "\u00a0")


def truncate(text: str, limit: int) -> str:
    """Cut a text after `limit` characters and append how many are missing."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\u2026 ({len(text) - limit:,} more characters)"


def bar(axis: Axis, start: float, end: float, style: str, **more: Any) -> Bar:
    """Return a bar between two values of the axis."""
    left = axis(start)
    return Bar(left, max(axis(end) - left, 0.0), style, **more)


_TIME_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(MINUTE * many for many in (1, 2, 5, 10, 15, 30)),
    *(HOUR * many for many in (1, 2, 3, 6, 12)),
    *(DAY * many for many in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)


def time_ticks(seconds: float, max_ticks: int) -> list[tuple[float, str]]:
    """Choose at most about `max_ticks` round times up to `seconds`. Return each with its label."""
    step = next((one for one in _TIME_STEPS if seconds / one <= max_ticks), _TIME_STEPS[-1])
    units = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (1.0, "s"))
    unit, name = next((pair for pair in units if step >= pair[0]), units[-1])
    ticks = range(1, min(int(seconds / step), max_ticks) + 1)
    return [(0.0, "0")] + [(step * at, f"{step * at / unit:g} {name}") for at in ticks]


def value_ticks(low: float, high: float, max_ticks: int = 4) -> list[float]:
    """Choose round values between `low` and `high`."""
    rough = (high - low) / max_ticks
    if not max(1e-300, 1e-12 * max(abs(low), abs(high))) < rough < 1e300:
        return [low]  # the range is too small to distinguish other values
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(ten * many for many in (1, 2, 5, 10) if ten * many >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def downsample(points: Points, limit: int) -> Points:
    """Reduce a curve to `limit` points; the lowest and highest of each stretch are kept."""
    if len(points) <= limit:
        return points
    stretches = max(1, limit // 4)
    kept: Points = []
    for at in range(stretches):
        part = range(at * len(points) // stretches, (at + 1) * len(points) // stretches)
        lowest = min(part, key=lambda index: points[index][1])
        highest = max(part, key=lambda index: points[index][1])
        kept += [points[index] for index in sorted({part[0], lowest, highest, part[-1]})]
    return kept


def cluster(
    items: Iterable[Item], position: Callable[[Item], float], distance: float
) -> list[list[Item]]:
    """Group items, given in order, that are closer than `distance` to the first of their group."""
    groups: list[list[Item]] = []
    for item in items:
        if groups and position(item) - position(groups[-1][0]) < distance:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _node_name(story: NodeHistory) -> str:
    return story.host or story.node


# -- key figures -----------------------------------------------------------------------------------

UNKNOWN = ("\u2013", "not reported")


def state_text(history: History) -> str:
    """Return the state of the run, in lower case."""
    return TERMINATED_TEXT if history.state is None else history.state.value.lower()


def format_date(seconds: float) -> str:
    """Format a wall clock time; a file may contain any number, so the text may be empty."""
    try:
        return format_utc(seconds)
    except (OverflowError, OSError, ValueError):
        return ""


def key_figures(history: History) -> list[tuple[str, str, str]]:
    """Return name, value and remark of each key figure."""
    generations = history.generations
    has_no_steps = history.goodput is None
    repeated = sum(made.cost.repeated_steps for made in generations)
    lost = UNKNOWN
    if recoveries(history):
        parts = "and lost training" if has_no_steps else "startup, recoveries, stalls"
        lost = (seconds_text(lost_seconds(history)), parts)
    steps = [pace.step for pace in history.progress]
    worlds = [made.world_size for made in generations]
    sizes = len(set(worlds))
    budget = "" if history.max_restarts is None else f"of {format_count(history.max_restarts)}"
    return [
        ("Generations", format_count(len(generations)), ""),
        ("Restarts", format_count(history.restarts), budget),
        ("Failures", format_count(history.num_failures), "reported by nodes"),
        ("Nodes", *_node_counts(history)),
        ("Workers", _format_world_sizes(worlds), plural(sizes, "size") if sizes > 4 else ""),
        ("Last step", *((format_count(max(steps)), "") if steps else UNKNOWN)),
        ("Last checkpoint", *_step_figure(history.checkpoint_step)),
        ("Last snapshot", *_snapshot_figure(history)),
        ("Repeated steps", *(UNKNOWN if has_no_steps else (format_count(repeated), ""))),
        ("Time lost", *lost),
    ]


def _step_figure(step: int | None) -> tuple[str, str]:
    return UNKNOWN if step is None else (f"step {format_count(step)}", "")


def _snapshot_figure(history: History) -> tuple[str, str]:
    # Snapshots are in the memory of agents, and are lost if these were killed.
    is_newer = history.snapshot_step is not None and history.snapshot_step > (
        history.checkpoint_step or 0
    )
    if history.state is None and is_newer:
        return _step_figure(history.snapshot_step)[0], LOST_SNAPSHOT_TEXT
    return _step_figure(history.snapshot_step)


def _node_counts(history: History) -> tuple[str, str]:
    """Return the number of machines, or of agents where several share one, and how many at once."""
    sizes = {made.node_count for made in history.generations} or {len(history.nodes)}
    low, high = min(sizes), max(sizes)
    total = max(high, len({story.host for story in history.nodes}))
    if low == high == len(history.nodes):
        return format_count(total), ""
    return format_count(total), f"{low} at a time" if low == high else f"{low} to {high} at a time"


def _format_world_sizes(worlds: Sequence[int]) -> str:
    sizes = [world for world, _ in itertools.groupby(worlds)]
    if len(sizes) > 6:
        return f"{format_count(min(sizes))} to {format_count(max(sizes))}"
    return " \u2192 ".join(map(format_count, sizes)) or "none"


# -- timeline --------------------------------------------------------------------------------------


@attrs.frozen
class NodeView:
    """A node with what the page shows of it."""

    story: NodeHistory
    stays: tuple[NodeMembership, ...] = ()
    marks: tuple[TimelineEvent, ...] = ()

    @property
    def lost_at(self) -> float | None:
        """Time of the node's last event, or of the end of its last generation if that is later.

        None if the node was not lost.
        """
        if not self.story.is_lost:
            return None
        return max(
            [
                self.story.last_event_at,
                *(stay.finished_at for stay in self.stays if stay.finished_at is not None),
            ]
        )

    @property
    def icon_kinds(self) -> set[str]:
        kinds = {mark.kind for mark in self.marks}
        if self.story.exit is not None:
            kinds.add(self.story.exit.state.value)
        return kinds | ({"vanished"} if self.lost_at is not None else set())

    @property
    def importance(self) -> int:
        end = self.story.exit
        is_unsuccessful = end is None or end.state is not JobState.SUCCEEDED
        failures = sum(mark.kind == "failure" for mark in self.marks)
        return 4 * (self.lost_at is not None) + 3 * failures + 2 * len(self.marks) + is_unsuccessful

    def end_text(self, is_run_finished: bool) -> str:
        """Return how and when the node ended; empty if neither the node nor the run has ended."""
        if self.lost_at is not None:
            return f"lost at {seconds_text(self.lost_at)}"
        end = self.story.exit
        if end is None:
            return "exit status unknown" if is_run_finished else ""
        return f"{END_TEXTS.get(end.state, '')} at {seconds_text(end.at)}"


@attrs.frozen
class Lane:
    """A line of the timeline: a name, a remark at its right end, and a drawing."""

    kind: str  # CSS class
    name: str
    label: str  # for people who do not see the drawing
    end: str = ""
    title: str = ""  # tooltip of the name
    end_title: str = ""
    bars: Sequence[Bar] = ()
    icons: Sequence[Icon] = ()
    labels: Sequence[tuple[float, float, str]] = ()  # left and bottom in per cent, and the text


def node_views(history: History) -> list[NodeView]:
    """Return the nodes in the order of the history."""
    stays: dict[str, list[NodeMembership]] = {}
    for stay in history.memberships:
        stays.setdefault(stay.node, []).append(stay)
    marks: dict[str, list[TimelineEvent]] = {}
    for mark in history.timeline:
        if mark.kind in NODE_ICONS:
            marks.setdefault(mark.node, []).append(mark)
    return [
        NodeView(story, tuple(stays.get(story.node, ())), tuple(marks.get(story.node, ())))
        for story in history.nodes
    ]


def choose_lanes(history: History) -> list[NodeView]:
    """Return the nodes that have a lane of their own: all, or the most eventful ones."""
    views = node_views(history)
    limit = max(MIN_LANES, min(MAX_LANES, MAX_BANDS // max(1, len(history.generations))))
    by_importance = sorted(range(len(views)), key=lambda at: -views[at].importance)
    return [views[at] for at in sorted(by_importance[:limit])]


def timeline(history: History) -> dict[str, Any]:
    """Return the lanes of the timeline and what is drawn around them."""
    axis = Axis(0.0, max(history.duration_seconds, 1e-9))
    shown = choose_lanes(history)
    saves = _saves_by_kind(history.timeline)
    lanes = [_worker_lane(history, axis)]
    lanes += [_node_lane(view, history, axis) for view in shown]
    lanes += [_save_lane(kind, marks, history, axis) for kind, marks in saves.items()]
    faults = [axis(mark.at) for mark in history.timeline if mark.kind == "failure"]
    kinds = set(saves).union(*(view.icon_kinds for view in shown))
    return {
        "lanes": lanes,
        "progress": chart(progress_series(history), history, in_timeline=True),
        "faults": faults if len(faults) <= MAX_FAULT_LINES else [],
        "ticks": [(axis(at), text) for at, text in time_ticks(axis.last, 5)],
        "legend": [(kind, meaning) for kind, meaning in ICONS.items() if kind in kinds],
        "reports_steps": any(made.first_step_at is not None for made in history.generations),
        "hidden": len(history.nodes) - len(shown),
    }


def _end_time(part: Generation | NodeMembership, history: History) -> float:
    return history.duration_seconds if part.finished_at is None else part.finished_at


def _worker_lane(history: History, axis: Axis) -> Lane:
    generations = history.generations
    largest = max((made.world_size for made in generations), default=0) or 1
    bars, labels, shown = [], [], ""
    for made in generations:
        end, height = _end_time(made, history), 100 * made.world_size / largest
        lasted = seconds_text(max(0.0, end - made.started_at))
        title = (
            f"Generation {made.number}: {plural(made.world_size, 'worker')} on "
            f"{plural(made.node_count, 'node')} for {lasted}, from "
            f"{seconds_text(made.started_at)}. {truncate(made.reason, 300)}"
        )
        bars.append(bar(axis, made.started_at, end, "area", title=title, height=height))
        if shown != format_count(made.world_size):
            shown = format_count(made.world_size)
            labels.append((axis(made.started_at), height, shown))
    label = (
        f"Timeline of {plural(len(history.nodes), 'node')} and "
        f"{plural(len(generations), 'generation')} in {seconds_text(history.duration_seconds)}"
    )
    return Lane("workers", "Workers", label, bars=bars, labels=labels)


def _node_lane(view: NodeView, history: History, axis: Axis) -> Lane:
    story, name, lost_at = view.story, _node_name(view.story), view.lost_at
    title = f"{name} ({story.node}), {plural(story.slots, 'worker')}"
    title += f", logs in {story.log_dir}" if story.log_dir else ""
    end = history.duration_seconds
    if lost_at is not None:
        end = lost_at
    elif story.exit is not None:
        end = story.exit.at
    elif history.is_finished:
        end = story.last_event_at
    bars = [bar(axis, story.started_at, end, "life")]
    if lost_at is not None:
        bars.append(bar(axis, lost_at, history.duration_seconds, "lost"))
    end_text = view.end_text(history.is_finished)
    failures = max(story.num_failures, sum(mark.kind == "failure" for mark in view.marks))
    failed = f"{plural(failures, 'failure')}, " if failures else ""
    why = "" if story.exit is None else f"{story.exit.reason} (exit code {story.exit.exit_code})"
    return Lane(
        "node",
        name,
        f"{name}: {plural(len(view.stays), 'generation')}, {failed}{end_text or 'running'}",
        end=end_text,
        title=title,
        end_title=truncate(why, 300),
        bars=[*bars, *_generation_bars(view.stays, history, axis)],
        icons=_node_icons(view, axis),
    )


def _generation_bars(stays: Sequence[NodeMembership], history: History, axis: Axis) -> list[Bar]:
    generations = {made.number: made for made in history.generations}
    reports_steps = any(made.first_step_at is not None for made in history.generations)
    bars = []
    for stay in stays:
        start, end = stay.started_at, _end_time(stay, history)
        made = generations.get(stay.generation)
        title = _stay_title(stay, made, end)
        if reports_steps and made is not None:
            trained = end if made.first_step_at is None else made.first_step_at
            if axis(trained) - axis(start) > MIN_STARTUP_WIDTH:
                bars.append(bar(axis, start, trained, "band starting", title=title))
                start = trained
        shade = "band-b" if stay.generation % 2 == 0 else "band-a"
        if end > start:
            label = str(stay.generation) if axis(end) - axis(start) > MIN_LABEL_WIDTH else ""
            bars.append(bar(axis, start, end, f"band {shade}", title=title, label=label))
    return bars


def _stay_title(stay: NodeMembership, made: Generation | None, end: float) -> str:
    low, high = stay.ranks  # a file may name any range, so the ranks are not enumerated
    ranks = f"rank {low}" if low == high else f"ranks {low}-{high}"
    lasted = seconds_text(max(0.0, end - stay.started_at))
    title = f"generation {stay.generation}: node rank {stay.node_rank}, {ranks}, {lasted}"
    return title if made is None else f"{title}; {truncate(made.reason, 120)}"


def _node_icons(view: NodeView, axis: Axis) -> list[Icon]:
    icons = []
    for kind in sorted({mark.kind for mark in view.marks}):
        marks = [mark for mark in view.marks if mark.kind == kind]
        for group in cluster(marks, lambda mark: axis(mark.at), ICON_DISTANCE):
            first = group[0]
            rank = "" if first.rank is None else f", rank {first.rank}"
            title = f"{ICONS[kind]} at {seconds_text(first.at)}{rank}: {truncate(first.text, 300)}"
            title += f" (and {format_count(len(group) - 1)} more)" if len(group) > 1 else ""
            icons.append(Icon(kind, axis(first.at), title))
    end = view.story.exit
    if end is not None:
        title = f"{view.end_text(True)}: {truncate(end.reason, 300)}"
        icons.append(Icon(end.state.value, axis(end.at), title))
    if view.lost_at is not None:
        title = f"last contact at {seconds_text(view.lost_at)}"
        icons.append(Icon("vanished", axis(view.lost_at), title))
    return icons


def _saves_by_kind(marks: Iterable[TimelineEvent]) -> dict[str, list[TimelineEvent]]:
    """Return checkpoints and snapshots by kind, each step once although every node reports it."""
    found: dict[str, dict[int, TimelineEvent]] = {kind: {} for kind in SAVE_KINDS}
    for mark in marks:
        if mark.kind in found and mark.step is not None:
            found[mark.kind].setdefault(mark.step, mark)
    return {kind: list(steps.values()) for kind, steps in found.items() if steps}


def _save_lane(kind: str, marks: Sequence[TimelineEvent], history: History, axis: Axis) -> Lane:
    name = f"{SAVE_KINDS[kind]}: {format_count(history.save_counts.get(kind, len(marks)))}"
    icons = []
    for group in cluster(marks, lambda mark: axis(mark.at), SAVE_ICON_DISTANCE):
        steps = [format_count(mark.step or 0) for mark in group]
        title = f"step {steps[0]}" if len(group) == 1 else f"steps {steps[0]} to {steps[-1]}"
        at = group[0].at
        icons.append(Icon(kind, axis(at), f"{title}, at {seconds_text(at)}"))
    return Lane("saves", name, name, icons=icons)


# -- curves ----------------------------------------------------------------------------------------


@attrs.frozen
class Series:
    """A curve with one line per generation, so that repeated steps are visible."""

    name: str
    lines: Sequence[Points]
    over: str = "time"  # or "steps"
    not_finite: Points = attrs.field(factory=list)  # points that cannot be drawn

    @property
    def values(self) -> list[float]:
        return [y for line in self.lines for _, y in line]


@attrs.frozen
class Interruption:
    """The gap between two generations."""

    generation: Generation
    time: tuple[float, float]  # without a step
    steps: tuple[float, float] | None  # repeated steps; if none was, the first one twice
    text: str  # cost and cause


@attrs.frozen
class Chart:
    """A curve as the template draws it; positions in per cent, paths in a square of 1000."""

    name: str
    last: str = ""
    label: str = ""
    path: str = ""
    dots: str = ""
    rules: Sequence[tuple[float, str]] = ()
    ticks: Sequence[tuple[float, str]] = ()
    bands: Sequence[Bar] = ()
    notes: str = ""


def lead_paces(history: History) -> dict[int, list[ProgressSample]]:
    """Return, by generation, the progress samples of the lowest-ranked node that has any.

    Workers of a job advance together, so one node represents all of them.
    """
    node_rank = {(stay.node, stay.generation): stay.node_rank for stay in history.memberships}
    found: dict[int, dict[str, list[ProgressSample]]] = {}
    for pace in history.progress:
        found.setdefault(pace.generation, {}).setdefault(pace.node, []).append(pace)
    return {
        generation: by_node[min(by_node, key=lambda n: node_rank.get((n, generation), math.inf))]
        for generation, by_node in sorted(found.items())
    }


def progress_series(history: History) -> Series:
    """Return the steps over time; the curve drops where steps were lost."""
    generations = {made.number: made for made in history.generations}
    lines = []
    for number, paces in lead_paces(history).items():
        line = [(pace.at, float(pace.step)) for pace in paces]
        made = generations.get(number)
        if made is not None and made.first_step_at is not None and made.first_step is not None:
            later = [point for point in line if point[0] > made.first_step_at]
            line = [(made.first_step_at, float(made.first_step)), *later]
        lines.append(line)
    return _make_series("Steps done", lines)


def step_rate(history: History) -> Series:
    """Return the steps per second over time."""
    lines = lead_paces(history).values()
    rates = [
        [(p.at, p.steps_per_second) for p in line if p.steps_per_second is not None]
        for line in lines
    ]
    return _make_series("Steps per second", rates)


def loss_series(history: History) -> Series:
    """Return the loss over steps: in each generation, of the lowest-ranked node with a loss."""
    with_loss = attrs.evolve(
        history, progress=tuple(p for p in history.progress if p.loss is not None)
    )
    lines = [
        [(float(pace.step), pace.loss) for pace in paces if pace.loss is not None]
        for paces in lead_paces(with_loss).values()
    ]
    return _make_series("Loss", lines, over="steps")


def sample_rate(history: History) -> Series:
    """Return the samples per second over time: the sum of the last rates of all nodes."""
    paces = [p for p in history.progress if p.samples_per_second is not None]
    lead = lead_paces(attrs.evolve(history, progress=tuple(paces)))
    lead_node = {generation: line[0].node for generation, line in lead.items()}
    last: dict[int, dict[str, float]] = {}
    lines: dict[int, Points] = {}
    for pace in sorted(paces, key=lambda p: (p.at, p.node == lead_node[p.generation])):
        rates = last.setdefault(pace.generation, {})
        rates[pace.node] = pace.samples_per_second or 0.0
        if pace.node == lead_node[pace.generation]:
            lines.setdefault(pace.generation, []).append((pace.at, sum(rates.values())))
    return _make_series("Samples per second", list(lines.values()))


def _make_series(name: str, lines: Iterable[Points], over: str = "time") -> Series:
    lines = list(lines)
    not_finite = [(x, y) for line in lines for x, y in line if not math.isfinite(y)]
    finite = [[point for point in line if math.isfinite(point[1])] for line in lines]
    full = [line for line in finite if line]
    total = sum(map(len, full))
    kept = [downsample(line, max(8, MAX_CURVE_POINTS * len(line) // total)) for line in full]
    return Series(name, kept, over, not_finite)


def interruptions(history: History) -> list[Interruption]:
    """Return the gaps between generations; none if workers do not report steps."""
    found: list[Interruption] = []
    if all(made.first_step_at is None for made in history.generations):
        return found
    for before, made in itertools.pairwise(history.generations):
        if before.finished_at is None:
            continue
        resumed = _end_time(made, history) if made.first_step_at is None else made.first_step_at
        until = max(before.finished_at, resumed)
        text = f"{seconds_text(until - before.finished_at)} without a step"
        steps, repeated = None, made.cost.repeated_steps
        if made.first_step is not None:
            steps = (float(made.first_step), float(made.first_step + max(0, repeated - 1)))
        text += f", {plural(repeated, 'step')} repeated" if repeated else ""
        text += f": {truncate(made.reason, 160)}"
        found.append(Interruption(made, (before.finished_at, until), steps, text))
    return found


def longest_interruptions(found: Sequence[Interruption]) -> list[Interruption]:
    """Return the MAX_INTERRUPTIONS longest interruptions, in order of time."""
    by_length = sorted(range(len(found)), key=lambda at: found[at].time[0] - found[at].time[1])
    return [found[at] for at in sorted(by_length[:MAX_INTERRUPTIONS])]


def _shaded_bands(history: History, over: str, axis: Axis) -> list[Bar]:
    bands = []
    for gap in longest_interruptions(interruptions(history)):
        span = gap.time if over == "time" else gap.steps
        if span is not None:
            made = gap.generation
            title = f"Generation {made.number} {made.trigger.phrase}, {gap.text}"
            style = f"gap gap-{made.trigger.value}"
            bands.append(bar(axis, *span, style, title=title, label=str(made.number)))
    return bands


def _svg_path(line: Points, across: Axis, up: Axis) -> str:
    places = [f"{10 * across(x):.1f} {1000 - 10 * up(y):.1f}" for x, y in line]
    # A line without length is drawn as a dot, because its ends are round.
    return f"M{places[0]}h.01" if len(places) == 1 else f"M{'L'.join(places)}"


def chart(series: Series, history: History, *, in_timeline: bool = False) -> Chart | None:
    """Return the drawing of a curve, or None if there is nothing to show."""
    values = series.values
    if not values:
        # A loss that never was a number cannot be drawn, but must be mentioned.
        notes = _chart_notes(series, history, False) if series.not_finite else ""
        return Chart(series.name, notes=notes) if notes else None
    text: Callable[[float], str] = format_count if in_timeline else format_number
    is_log = (
        series.name == "Loss" and min(values) > 0 and max(values) > LOG_SCALE_RATIO * min(values)
    )
    lines = series.lines
    if is_log:
        lines = [[(x, math.log10(y)) for x, y in line] for line in lines]
    heights = [y for line in lines for _, y in line]
    low, high = min(heights), max(heights)
    if low > 0 and not is_log and (series.over == "time" or low < high / 2):
        low = 0.0  # heights can be compared
    up = Axis(low, high if high > low else low + 1.0)
    axis, ticks = (
        Axis(0.0, max(history.duration_seconds, 1e-9)),
        time_ticks(history.duration_seconds, 4),
    )
    if series.over == "steps":
        steps = [x for line in lines for x, _ in line]
        axis = Axis(min(0.0, min(steps)), max(steps))
        ticks = [(at, format_count(at)) for at in value_ticks(axis.first, axis.last)]
    return Chart(
        series.name,
        last=text(values[-1]),
        label=_chart_label(series),
        path="".join(_svg_path(line, axis, up) for line in lines if len(line) != 1),
        dots="".join(_svg_path(line, axis, up) for line in lines if len(line) == 1),
        rules=[
            (100 - up(value), text(10.0**value if is_log else value))
            for value in value_ticks(up.first, up.last)
        ],
        ticks=[] if in_timeline else [(axis(at), words) for at, words in ticks],
        bands=_shaded_bands(history, series.over, axis),
        notes=_chart_notes(series, history, is_log),
    )


def _chart_label(series: Series) -> str:
    values = series.values
    points = (values[0], values[-1], min(values), max(values))
    first, last, low, high = map(format_number, points)
    name = f"{series.name} over {series.over}"
    return f"{name}, from {first} to {last}; lowest {low}, highest {high}"


def _chart_notes(series: Series, history: History, is_log: bool) -> str:
    notes = []
    if series.over == "steps":
        notes.append("Over steps.")
        if any(made.cost.repeated_steps for made in history.generations):
            notes.append("Repeated steps have two lines.")
    if is_log:
        notes.append("The scale is logarithmic.")
    if series.not_finite:
        (at, value), many = series.not_finite[0], len(series.not_finite)
        where = seconds_text(at) if series.over == "time" else f"step {format_count(at)}"
        are = plural(many, "value is", "values are")
        notes.append(f"{are} not finite and not shown; the first is {value} at {where}.")
    return " ".join(notes)


# -- recoveries ------------------------------------------------------------------------------------


def recoveries(history: History) -> list[Generation]:
    """Return the generations whose cost is known, at least in part."""
    return [made for made in history.generations if made.cost.phases]


def lost_seconds(history: History) -> float:
    """Return all time not spent on productive steps; without reported steps, the known part."""
    known = sum(made.cost.seconds for made in history.generations)
    return known if history.lost_seconds is None else max(known, history.lost_seconds)


def recovery_section(history: History) -> dict[str, Any] | None:
    """Return the costs of recoveries, or None if no cost is known."""
    every = recoveries(history)
    if not every:
        return None
    by_cost = sorted(range(len(every)), key=lambda at: -every[at].cost.seconds)
    shown = [every[at] for at in sorted(by_cost[:MAX_RECOVERIES])]
    largest = max(made.cost.seconds for made in shown) or 1.0
    known, total = sum(made.cost.seconds for made in every), lost_seconds(history)
    startups = sum(made.trigger is GenerationTrigger.START for made in every)
    return {
        "total": total,
        "other": total - known if total - known > 0.005 else 0.0,
        "startups": startups,
        "recoveries": len(every) - startups,
        "stalled": sum(made.cost.stalled or 0.0 for made in every),
        "has_no_steps": history.goodput is None,
        "hidden": len(every) - len(shown),
        "hidden_seconds": known - sum(made.cost.seconds for made in shown),
        "phases": [
            (name, meaning, (sum(values), median(values), max(values)))
            for name, meaning in PHASES.items()
            if (values := [x.cost.phases[name] for x in every if name in x.cost.phases])
        ],
        "bars": [_recovery_bar(made, largest) for made in shown],
    }


def _recovery_bar(made: Generation, largest: float) -> dict[str, Any]:
    texts = {name: f"{name} {seconds_text(value)}" for name, value in made.cost.phases.items()}
    if "repeated" in texts:
        repeated = plural(made.cost.repeated_steps, "step")
        texts["repeated"] = f"repeated {repeated}, {seconds_text(made.cost.phases['repeated'])}"
    bars, left = [], 0.0
    for name, seconds in made.cost.phases.items():
        width = 100 * seconds / largest
        bars.append(Bar(left, width, f"phase p-{name}", title=texts[name], label=name))
        left += width
    return {
        "title": f"Generation {made.number}, {made.trigger.phrase}",
        "total": made.cost.seconds,
        "cause": made.reason if len(made.reason) <= 160 else f"{made.reason[:159]}\u2026",
        "bars": bars,
        "phases": texts,
    }


# -- failures, nodes, settings ---------------------------------------------------------------------

_DIGITS = re.compile(r"\d+")


@attrs.frozen
class FailureRow:
    """A failure with what the page shows of it."""

    mark: TimelineEvent
    generation: int | None  # None if it is not known
    name: str  # of the node
    workers: tuple[int, ...] = ()  # ranks that failed
    traceback: str = ""  # of the first worker that failed

    @property
    def ranks(self) -> str:
        return format_ranges(self.workers, MAX_LISTED_SPANS)


def failures(history: History) -> list[FailureRow]:
    """Return the failures in order of time, each with its generation and the ranks that failed.

    An agent reports a failure without a rank, after the exits of its workers. The ranks are
    therefore those of the workers that exited since the node's generation started.
    """
    names = {story.node: _node_name(story) for story in history.nodes}
    coming: dict[str, list[NodeMembership]] = {}  # generations of each node, the next one last
    for stay in sorted(
        history.memberships, key=attrgetter("started_at", "generation"), reverse=True
    ):
        coming.setdefault(stay.node, []).append(stay)
    rows, generations, exited = [], dict[str, int](), dict[str, dict[int, str]]()
    for mark in history.timeline:
        stays = coming.get(mark.node, [])
        while stays and stays[-1].started_at <= mark.at:
            generations[mark.node] = stays.pop().generation
            exited.pop(mark.node, None)
        if mark.kind == "worker.exited" and mark.rank is not None:
            exited.setdefault(mark.node, {})[mark.rank] = mark.traceback
        elif mark.kind == "failure":
            tracebacks = exited.get(mark.node, {})
            ranks = tuple(sorted(tracebacks)) if mark.rank is None else (mark.rank,)
            traceback = next((tracebacks[rank] for rank in ranks if tracebacks.get(rank)), "")
            name = names.get(mark.node, mark.node)
            rows.append(FailureRow(mark, generations.get(mark.node), name, ranks, traceback))
    return rows


def failure_section(history: History) -> dict[str, Any] | None:
    """Return the failures, grouped by reason if there are many; None if there are none."""
    rows = failures(history)
    if not rows:
        return None
    if len(rows) <= MAX_FAILURES:
        return {"rows": rows, "groups": None}
    by_reason: dict[str, list[FailureRow]] = {}
    for row in rows:
        by_reason.setdefault(_DIGITS.sub("#", row.mark.text), []).append(row)
    groups = sorted(by_reason.values(), key=lambda group: -len(group))
    return {
        "rows": [],
        "groups": [_failure_group(group) for group in groups[:MAX_REASONS]],
        "total": history.num_failures,
        "sampled": len(rows) if history.num_failures > len(rows) else None,
        "unlisted": sum(map(len, groups[MAX_REASONS:])),
        "unlisted_reasons": max(0, len(groups) - MAX_REASONS),
    }


def _failure_group(group: Sequence[FailureRow]) -> dict[str, Any]:
    first, last = seconds_text(group[0].mark.at), seconds_text(group[-1].mark.at)
    numbers = (row.generation for row in group if row.generation is not None)
    return {
        "count": format_count(len(group)),
        "times": first if len(group) == 1 else f"{first}, {last}",
        "generations": format_ranges(numbers, MAX_LISTED_SPANS),
        "nodes": format_list(list(dict.fromkeys(row.name for row in group))),
        "ranks": format_ranges((rank for row in group for rank in row.workers), MAX_LISTED_SPANS),
        "reason": truncate(group[0].mark.text, MAX_TEXT),
    }


def node_section(history: History) -> dict[str, Any]:
    """Return the MAX_NODES most eventful nodes, and how the other nodes ended."""
    views = node_views(history)
    by_importance = sorted(range(len(views)), key=lambda at: -views[at].importance)
    ends: dict[str, int] = {}
    for at in by_importance[MAX_NODES:]:
        end, lost_at = views[at].story.exit, views[at].lost_at
        text = "exit status unknown" if end is None else END_TEXTS.get(end.state, "")
        text = "lost" if lost_at is not None else text
        ends[text] = ends.get(text, 0) + 1
    return {
        "total": len(views),
        "views": [views[at] for at in sorted(by_importance[:MAX_NODES])],
        "hidden": ", ".join(f"{format_count(many)} {text}" for text, many in ends.items()),
        "dropped": sum(story.dropped_events for story in history.nodes),
    }


def common_values(every: Iterable[tuple[NodeHistory, Mapping[str, str]]]) -> dict[str, str]:
    """Return the value of each name; if nodes differ, each value with the nodes that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for story, values in every:
        for name, value in values.items():
            found.setdefault(name, {}).setdefault(str(value), []).append(_node_name(story))
    return {
        name: next(iter(values))
        if len(values) == 1
        else "; ".join(f"{value} on {format_list(hosts)}" for value, hosts in values.items())
        for name, values in found.items()
    }


def template_values(history: History) -> dict[str, Any]:
    """Return everything that the template shows of a run."""
    gaps = interruptions(history)
    curves = [chart(make(history), history) for make in (loss_series, step_rate, sample_rate)]
    cause = history.root_cause or {}
    cause_text = ", ".join(f"{name} {value}" for name, value in cause.items() if value is not None)
    is_finished = history.state is None or history.state.is_finished
    return {
        "history": history,
        "state": state_text(history),
        "goodput": None if history.goodput is None else format_percent(history.goodput),
        "started": format_date(history.start_timestamp),
        "last_event": ""
        if history.is_finished and history.state
        else format_date(history.start_timestamp + history.duration_seconds),
        "is_finished": is_finished,
        "reason": truncate(history.reason, MAX_TEXT),
        "cause": truncate(cause_text, MAX_TEXT),
        "figures": key_figures(history),
        "timeline": timeline(history),
        "charts": [one for one in curves if one is not None],
        "has_loss": curves[0] is not None,
        "interruptions": longest_interruptions(gaps),
        "num_interruptions": len(gaps),
        "recoveries": recovery_section(history),
        "failures": failure_section(history),
        "nodes": node_section(history),
        "settings": common_values(
            (
                story,
                {**story.settings, "command": story.command} if story.command else story.settings,
            )
            for story in history.nodes
        ),
        "versions": common_values((story, story.versions) for story in history.nodes),
    }
