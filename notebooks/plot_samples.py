"""Plots of which rank trained on which sample: one cell per sample, in the color of its rank.

A sample that no rank trained on is an empty cell. A sample that was used more than once has a
frame. The plots need matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# The colors of ranks, in turn. Color-blind readers can distinguish them.
COLORS = ("#4477aa", "#ee6677", "#228833", "#997700", "#aa3377", "#44aabb", "#ee8844", "#777777")
GAP = 0.08
COLUMNS = 24


@attrs.frozen
class SampleUse:
    """The use of a sample by a rank."""

    sample: int
    generation: int
    rank: int
    turn: int  # how many samples the rank had drawn before in this generation


def plot_turns(uses: Iterable[SampleUse]) -> Figure:
    """Plot the samples in the order of time: one row per rank, one column per turn."""
    uses = list(uses)
    ranks, offsets = 1 + max(use.rank for use in uses), _offsets(uses)
    width = max(offsets[use.generation] + use.turn + 1 for use in uses)
    figure, axes = _figure(width, ranks)
    for use in uses:
        _plot_cell(axes, offsets[use.generation] + use.turn, use.rank, use.rank, str(use.sample))
    for generation, offset in offsets.items():
        world = len({use.rank for use in uses if use.generation == generation})
        text = f"generation {generation}: {world} rank{'s' * (world != 1)}"
        axes.text(offset - 0.5, -0.75, text, fontsize=10, va="bottom")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    return figure


def plot_samples(uses: Iterable[SampleUse], length: int) -> Figure:
    """Plot the dataset: each sample in the color of its rank, with the number of the generation.

    Args:
        uses: All uses of samples.
        length: The number of samples of the dataset.
    """
    by_sample: dict[int, list[SampleUse]] = {sample: [] for sample in range(length)}
    for use in uses:
        by_sample[use.sample].append(use)
    figure, axes = _figure(COLUMNS, -(-length // COLUMNS))
    for sample, of_sample in by_sample.items():
        row, column = divmod(sample, COLUMNS)
        text = "+".join(str(use.generation) for use in of_sample)
        rank = of_sample[-1].rank if of_sample else None
        _plot_cell(axes, column, row, rank, text, has_frame=len(of_sample) > 1)
    for rank in sorted({use.rank for of_sample in by_sample.values() for use in of_sample}):
        _plot_cell(axes, 3 * rank, -1.1, rank, "")
        axes.text(3 * rank + 0.6, -1.1, f"rank {rank}", fontsize=10, va="center")
    counts = [len(of_sample) for of_sample in by_sample.values()]
    unused, repeated = counts.count(0), sum(count > 1 for count in counts)
    text = f"{length} samples: {unused} unused, {repeated} used more than once"
    axes.text(COLUMNS - 0.5, -1.1, text, fontsize=10, ha="right", va="center")
    axes.set_yticks([])
    return figure


def _offsets(uses: Sequence[SampleUse]) -> dict[int, float]:
    """Return the column of the first turn of each generation, with half a cell in between."""
    offsets: dict[int, float] = {}
    column = 0.0
    for generation in sorted({use.generation for use in uses}):
        offsets[generation] = column
        column += 1.5 + max(use.turn for use in uses if use.generation == generation)
    return offsets


def _figure(columns: float, rows: int) -> tuple[Figure, Axes]:
    """Return axes for square cells, with space for a line of text above them."""
    figure = Figure(figsize=(11, 0.3 + 10.5 * (rows + 1.5) / columns), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(rows - 0.4, -1.7)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    return figure, axes


def _plot_cell(
    axes: Axes, column: float, row: float, rank: int | None, text: str, *, has_frame: bool = False
) -> None:
    side = 1 - 2 * GAP
    color = "none" if rank is None else COLORS[rank % len(COLORS)]
    edge = "black" if has_frame else "#999999" if rank is None else color
    corner = (column - side / 2, row - side / 2)
    line_width = 2.5 if has_frame else 0.8
    axes.add_patch(Rectangle(corner, side, side, fc=color, ec=edge, lw=line_width))
    axes.text(column, row, text, color="white", fontsize=8.5, ha="center", va="center")
