"""Plots of real runs: nodes, generations and steps over time, and the cost of each generation.

They show the history of a run. They need matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from elasticlib.observe.history import Generation, GenerationTrigger, History

# The colors of generations, in turn. Color-blind readers can distinguish them.
COLORS = ("#4477aa", "#ee6677", "#228833", "#997700", "#aa3377", "#44aabb", "#ee8844", "#777777")
LOST_COLOR, NEUTRAL_COLOR = "#aa3311", "#777777"
BAR_HEIGHT, BAND_ALPHA = 0.62, 0.13


def plot_steps(history: History) -> Figure:
    """Plot a run from its first generation to its end.

    The upper axes show the nodes, the lower axes show the steps. The generations are bands.
    """
    figure = _figure(4.2 + 0.4 * len(history.nodes))
    heights = [len(history.nodes), 6]
    nodes, steps = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    for axes in (nodes, steps):
        _plot_bands(axes, history)
    _plot_nodes(nodes, history)
    _label_bands(nodes, history)
    _plot_line(steps, history)
    # The start of Python before the first generation is not shown.
    start = min((generation.started_at for generation in history.generations), default=0.0)
    steps.set_xlim(start - 0.02 * (history.duration_seconds - start), history.duration_seconds)
    steps.set_ylim(0)
    steps.set_ylabel("step")
    steps.set_xlabel("seconds since the job was started")
    return figure


def plot_crashes(histories: Mapping[str, History]) -> Figure:
    """Plot the steps of several runs with the same crash, one below the other.

    Repeated steps are red. The time starts with the first step of each run.

    Args:
        histories: The runs, by the title of their plot.
    """
    figure = _figure(1.9 * len(histories))
    rows = figure.subplots(len(histories), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (title, history) in zip(rows, histories.items(), strict=True):
        started = history.generations[0].first_step_at or 0.0
        _plot_line(axes, history, started, COLORS[0])
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        cost = format_cost(history)
        axes.text(0.99, 0.08, cost, transform=axes.transAxes, ha="right", fontsize=11)
        axes.set_ylabel("step")
        axes.set_ylim(0)
    rows[-1].set_xlim(0)
    rows[-1].set_xlabel("seconds since the first step")
    return figure


def plot_operations(operations: Mapping[str, Sequence[tuple[float, str, str]]]) -> Figure:
    """Plot the operations of stores over time: a row for each store, a mark for each operation.

    Args:
        operations: By the name of the store, its operations: the time in seconds, the kind and the
            key.
    """
    figure = _figure(1.0 + 0.9 * len(operations))
    axes = figure.subplots()
    first = min(time for recorded in operations.values() for time, _, _ in recorded)
    kinds = sorted({kind for recorded in operations.values() for _, kind, _ in recorded})
    for row, recorded in enumerate(operations.values()):
        for number, kind in enumerate(kinds):
            times = [time - first for time, other, _ in recorded if other == kind]
            height = row + 0.6 * ((number + 0.5) / len(kinds) - 0.5)
            heights, label = [height] * len(times), kind if row == 0 else None
            axes.plot(times, heights, "|", color=COLORS[number], ms=11, mew=1.5, label=label)
    axes.set_yticks(range(len(operations)), list(operations))
    axes.set_ylim(len(operations) - 0.5, -0.5)
    axes.set_xlabel("seconds since the first operation")
    figure.legend(loc="outside upper left", ncols=len(kinds), frameon=False)
    _hide_frame(axes)
    return figure


def format_cost(history: History) -> str:
    """Return the cost of all crashes and resizes of a run as text."""
    costs = [generation.cost for generation in history.generations[1:]]
    repeated = sum(cost.repeated_steps for cost in costs)
    steps = "no step" if not repeated else f"{repeated} step{'s' * (repeated != 1)}"
    return f"{steps} repeated, {sum(cost.seconds for cost in costs):.1f} s lost"


def _figure(height: float) -> Figure:
    return Figure(figsize=(11, height), layout="constrained")


def _color(generation: int) -> str:
    return COLORS[(generation - 1) % len(COLORS)]


def _hide_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _plot_bands(axes: Axes, history: History) -> None:
    for generation in history.generations:
        axes.axvspan(
            generation.started_at,
            _end(generation, history),
            color=_color(generation.number),
            alpha=BAND_ALPHA,
            lw=0,
            zorder=0,
        )


def _label_bands(axes: Axes, history: History) -> None:
    """Write the number, the trigger and the number of workers above each band."""
    for generation in history.generations:
        world = generation.world_size
        text = f"{generation.trigger.value}\n{world} worker{'s' * (world != 1)}"
        labels = ((str(generation.number), 30, "bold"), (text, 4, "normal"))
        for label, offset, weight in labels:
            axes.annotate(
                label,
                (generation.started_at, 1),
                (0, offset),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=_color(generation.number),
                fontweight=weight,
                fontsize=9,
                va="bottom",
            )


def _plot_nodes(axes: Axes, history: History) -> None:
    rows = {node.node: row for row, node in enumerate(history.nodes)}
    for node in history.nodes:
        end = node.last_event_at if node.exit is None else node.exit.at
        row = rows[node.node]
        axes.plot([node.started_at, end], [row, row], color=NEUTRAL_COLOR, lw=1.2, zorder=1)
    for membership in history.memberships:
        finished_at = membership.finished_at
        end = history.duration_seconds if finished_at is None else finished_at
        axes.barh(
            rows[membership.node],
            end - membership.started_at,
            left=membership.started_at,
            height=BAR_HEIGHT,
            color=_color(membership.generation),
            zorder=2,
        )
    axes.set_yticks(list(rows.values()), [f"node {row + 1}" for row in rows.values()])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(left=False, bottom=False)
    _hide_frame(axes)
    axes.spines[["left", "bottom"]].set_visible(False)


def _plot_line(axes: Axes, history: History, zero: float = 0.0, color: str = "") -> None:
    """Plot steps over time.

    Repeated steps are red, times without steps are dotted, and a failure has a cross.

    Args:
        axes: The axes of the plot.
        history: The run.
        zero: The time that is 0 on the x axis.
        color: The color of all generations. By default, each generation has its own.
    """
    before: tuple[float, int] | None = None
    for generation in history.generations:
        first, last = generation.first_step, generation.last_step
        if generation.first_step_at is None or first is None or last is None:
            continue
        start, end = generation.first_step_at - zero, _end(generation, history) - zero
        if before is not None:
            gap = ([before[0], start], [before[1], first])
            axes.plot(*gap, ":", color=NEUTRAL_COLOR, lw=1.5, zorder=2)
        if before is not None and generation.trigger in (
            GenerationTrigger.FAILURE,
            GenerationTrigger.NODE_LOSS,
        ):
            axes.plot(*before, "X", color=LOST_COLOR, ms=10, mec="white", zorder=4)
        line_color = color or _color(generation.number)
        axes.plot([start, end], [first, last], color=line_color, lw=2.5, zorder=3)
        if before is not None and first <= before[1] and last > first:
            repeated = min(before[1], last)
            repeated_until = start + (end - start) * (repeated - first) / (last - first)
            points = ([start, repeated_until], [first, repeated])
            axes.plot(*points, color=LOST_COLOR, lw=5, zorder=3)
        before = (end, last)
    _hide_frame(axes)


def _end(generation: Generation, history: History) -> float:
    finished_at = generation.finished_at
    return history.duration_seconds if finished_at is None else finished_at
