"""A picture of a simulated run: one row a node, simulator time to the right.

It shows what the story of the run tells and judges nothing. matplotlib (the extra `plot`) is
imported when a picture is asked for, so that the simulator itself needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ..errors import ConfigError
from ..rendezvous.document import Phase
from .simulation import Mark, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HUES = ("#4477aa", "#ee6677", "#228833", "#997700", "#aa3377", "#44aabb", "#ee8844", "#777777")
"""Of generations, in turn; told apart by colour-blind readers too, and numbered besides."""

BAND, EDGE = 0.56, 0.28
SIGNS = {
    # The sign, its place above the row's middle, its size, and what it says.
    Mark.ARRIVES: (">", 0.0, 8, "arrives"),
    Mark.FAILS: ("v", 0.0, 8, "its workers fail"),
    Mark.CRASHES: ("X", 0.0, 9, "crashes: falls silent"),
    Mark.LEAVES: ("s", 0.0, 7, "leaves: says so"),
    Mark.WRITES: ("D", EDGE, 5, "writes the document"),
}


@attrs.frozen
class Reign:
    """One generation, from the document that settled it to the one that ended it.

    charged: whether a restart was counted for it.
    """

    generation: int
    start: float
    end: float
    nodes: int
    cause: str
    charged: bool


def reigns(simulation: Simulation) -> list[Reign]:
    """The generations of a run, in order, each with the reason why it was sought."""
    found: list[Reign] = []
    restarts = 0
    for at, written in enumerate(simulation.written):
        document = written.document
        if document.phase is not Phase.SETTLED:
            continue
        later = simulation.written[at + 1 :]
        found.append(
            Reign(
                document.generation,
                written.time,
                later[0].time if later else simulation.now,
                len(document.members),
                document.cause,
                document.restarts > restarts,
            )
        )
        restarts = document.restarts
    return found


def draw(simulation: Simulation) -> Figure:
    """The whole of a run that has been played.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'elasticlib[plot]'") from error
    rows = {node.name: row for row, node in enumerate(simulation.nodes, 1)}
    figure = Figure(figsize=(11, 1.7 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    _draw_job(axes, simulation)
    _draw_lives(axes, simulation, rows)
    _draw_shifts(axes, simulation, rows)
    _draw_marks(axes, simulation, rows)
    axes.set_yticks([0, *rows.values()], ["the document", *rows])
    axes.set_ylim(len(rows) + 0.6, -0.9)
    axes.set_xlim(-0.5, simulation.now + 0.5)
    axes.set_xlabel("seconds of the simulator's time")
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    return figure


def _hue(generation: int) -> str:
    return HUES[(generation - 1) % len(HUES)]


def _band(axes: Axes, row: int, span: tuple[float, float], generation: int) -> None:
    start, end = span
    axes.barh(row, end - start, left=start, height=BAND, color=_hue(generation), zorder=2)
    # At its left end, so that no mark stands on it; a number that does not fit is left out.
    if end - start > 0.5:
        axes.annotate(
            str(generation),
            (start, row),
            (3, 0),
            textcoords="offset points",
            color="white",
            fontweight="bold",
            fontsize=9,
            va="center",
            zorder=3,
        )


def _draw_job(axes: Axes, simulation: Simulation) -> None:
    """The row of the document, and a line down from each moment at which it settles."""
    label: str | None = "a charged restart"
    for reign in reigns(simulation):
        _band(axes, 0, (reign.start, reign.end), reign.generation)
        axes.axvline(reign.start, color=_hue(reign.generation), lw=0.8, ls=":", zorder=1)
        if reign.charged:
            axes.plot(
                reign.start, -0.55, "*", color="#aa3311", ms=11, ls="", label=label, clip_on=False
            )
            label = None


def _draw_lives(axes: Axes, simulation: Simulation, rows: dict[str, int]) -> None:
    """A thin line while a node is there, and a hatched edge while it stands still."""
    ends = dict.fromkeys(rows, simulation.now)
    ends |= {m.node: m.time for m in simulation.story if m.mark in (Mark.CRASHES, Mark.LEAVES)}
    label: str | None = "stands still"
    for moment in simulation.story:
        row, end = rows[moment.node], ends[moment.node]
        if moment.mark is Mark.ARRIVES:
            axes.plot([moment.time, end], [row, row], color="#999999", lw=1.2, zorder=1)
        elif moment.mark is Mark.STALLS:
            axes.barh(
                row + EDGE + 0.07,
                min(moment.until, end) - moment.time,
                left=moment.time,
                height=0.1,
                color="black",
                label=label,
                zorder=2,
            )
            label = None


def _draw_shifts(axes: Axes, simulation: Simulation, rows: dict[str, int]) -> None:
    for shift in simulation.shifts:
        _band(axes, rows[shift.node], (shift.start, shift.end), shift.generation)


def _draw_marks(axes: Axes, simulation: Simulation, rows: dict[str, int]) -> None:
    for mark, (sign, above, size, label) in SIGNS.items():
        found = [m for m in simulation.story if m.mark is mark]
        axes.plot(
            [m.time for m in found],
            [rows[m.node] - above for m in found],
            sign,
            ls="",
            ms=size,
            mfc="black",
            mec="white",
            mew=0.8,
            label=label,
            zorder=4,
        )
