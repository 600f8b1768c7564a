"""Pictures of real runs: where the training stood, and what each generation cost it.

They show what a run's history tells and judge nothing. They need matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from elasticlib.observe.history import Generation, GenerationTrigger, History

HUES = ("#4477aa", "#ee6677", "#228833", "#997700", "#aa3377", "#44aabb", "#ee8844", "#777777")
"""Of generations, in turn; told apart by colour-blind readers too, and numbered besides."""
LOST, QUIET = "#aa3311", "#777777"
BAND, PALE = 0.62, 0.13


def draw_steps(history: History) -> Figure:
    """A run from its first generation to its end: its nodes above, and below them its steps, with
    the generations as bands.
    """
    figure = _figure(4.2 + 0.4 * len(history.nodes))
    heights = [len(history.nodes), 6]
    nodes, steps = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    for axes in (nodes, steps):
        _draw_bands(axes, history)
    _draw_nodes(nodes, history)
    _name_bands(nodes, history)
    _draw_line(steps, history)
    # What came before is Python that starts, and would press the rest together.
    began = min((one.started_at for one in history.generations), default=0.0)
    steps.set_xlim(began - 0.02 * (history.duration_seconds - began), history.duration_seconds)
    steps.set_ylim(0)
    steps.set_ylabel("step")
    steps.set_xlabel("seconds since the job was started")
    return figure


def draw_crashes(histories: Mapping[str, History]) -> Figure:
    """Runs that were crashed alike, one below the other: the steps that were done again are red.

    histories: by what is said of each. Time begins with the first step of each.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = _figure(1.9 * len(histories))
    rows = figure.subplots(len(histories), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, history) in zip(rows, histories.items(), strict=True):
        started = history.generations[0].first_step_at or 0.0
        _draw_line(axes, history, started, HUES[0])
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold")
        axes.text(0.99, 0.08, cost_of(history), transform=axes.transAxes, ha="right", fontsize=11)
        axes.set_ylabel("step")
        axes.set_ylim(0)
    rows[-1].set_xlim(0)
    rows[-1].set_xlabel("seconds since the first step")
    return figure


def cost_of(history: History) -> str:
    """What all crashes and resizes of a run have cost it, in words."""
    later = [generation.cost for generation in history.generations[1:]]
    redone = sum(cost.repeated_steps for cost in later)
    steps = "no step" if not redone else f"{redone} step{'s' * (redone != 1)}"
    return f"{steps} done again, {sum(cost.seconds for cost in later):.1f} s lost"


def _figure(height: float) -> Figure:
    return Figure(figsize=(11, height), layout="constrained")


def _hue(generation: int) -> str:
    return HUES[(generation - 1) % len(HUES)]


def _plainly(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bands(axes: Axes, history: History) -> None:
    for one in history.generations:
        axes.axvspan(
            one.started_at, _end(one, history), color=_hue(one.number), alpha=PALE, lw=0, zorder=0
        )


def _name_bands(axes: Axes, history: History) -> None:
    """Above each: its number, why it was sought and how many workers it has."""
    for one in history.generations:
        words = f"{one.trigger.value}\n{one.world_size} worker{'s' * (one.world_size != 1)}"
        for text, up, weight in ((str(one.number), 30, "bold"), (words, 4, "normal")):
            axes.annotate(
                text,
                (one.started_at, 1),
                (0, up),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=_hue(one.number),
                fontweight=weight,
                fontsize=9,
                va="bottom",
            )


def _draw_nodes(axes: Axes, history: History) -> None:
    rows = {story.node: row for row, story in enumerate(history.nodes)}
    for story in history.nodes:
        end = story.last_event_at if story.exit is None else story.exit.at
        row = rows[story.node]
        axes.plot([story.started_at, end], [row, row], color=QUIET, lw=1.2, zorder=1)
    for stay in history.memberships:
        end = history.duration_seconds if stay.finished_at is None else stay.finished_at
        axes.barh(
            rows[stay.node],
            end - stay.started_at,
            left=stay.started_at,
            height=BAND,
            color=_hue(stay.generation),
            zorder=2,
        )
    axes.set_yticks(list(rows.values()), [f"node {row + 1}" for row in rows.values()])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(left=False, bottom=False)
    _plainly(axes)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_line(axes: Axes, history: History, zero: float = 0.0, hue: str = "") -> None:
    """Steps over time: red where they had been done before, dotted where there were none, and a
    cross where something was lost. hue: of all generations, by default each has its own."""
    before: tuple[float, int] | None = None
    for one in history.generations:
        if one.first_step_at is None or one.first_step is None or one.last_step is None:
            continue
        start, end = one.first_step_at - zero, _end(one, history) - zero
        first, last = one.first_step, one.last_step
        if before is not None:
            axes.plot([before[0], start], [before[1], first], ":", color=QUIET, lw=1.5, zorder=2)
        if before is not None and one.trigger in (
            GenerationTrigger.FAILURE,
            GenerationTrigger.NODE_LOSS,
        ):
            axes.plot(*before, "X", color=LOST, ms=10, mec="white", zorder=4)
        axes.plot([start, end], [first, last], color=hue or _hue(one.number), lw=2.5, zorder=3)
        if before is not None and first <= before[1] and last > first:
            known = min(before[1], last)
            there = start + (end - start) * (known - first) / (last - first)
            axes.plot([start, there], [first, known], color=LOST, lw=5, zorder=3)
        before = (end, last)
    _plainly(axes)


def _end(one: Generation, history: History) -> float:
    return history.duration_seconds if one.finished_at is None else one.finished_at
