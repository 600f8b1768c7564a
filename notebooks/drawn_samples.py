"""Pictures of who trained on which sample: a cell for each sample, coloured by rank.

They draw what they are given and judge nothing: a sample that nobody trained on is an empty cell,
and one that was trained on more often has a frame. They need matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

HUES = ("#4477aa", "#ee6677", "#228833", "#997700", "#aa3377", "#44aabb", "#ee8844", "#777777")
"""Of ranks, in turn; told apart by colour-blind readers too."""
GAP = 0.08
COLUMNS = 24


@attrs.frozen
class Use:
    """A rank of a generation trained on a sample, in the generation's `turn`, counted from 0."""

    sample: int
    generation: int
    rank: int
    turn: int


def draw_turns(uses: Iterable[Use]) -> Figure:
    """As they were dealt: a row a rank, a column a turn, and in each cell the sample's number."""
    uses = list(uses)
    ranks, offsets = 1 + max(use.rank for use in uses), _offsets(uses)
    width = max(offsets[use.generation] + use.turn + 1 for use in uses)
    figure, axes = _figure(width, ranks)
    for use in uses:
        _cell(axes, offsets[use.generation] + use.turn, use.rank, use.rank, str(use.sample))
    for generation, offset in offsets.items():
        world = len({use.rank for use in uses if use.generation == generation})
        words = f"generation {generation}: {world} rank{'s' * (world != 1)}"
        axes.text(offset - 0.5, -0.75, words, fontsize=10, va="bottom")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    return figure


def draw_samples(uses: Iterable[Use], length: int) -> Figure:
    """The data set: each of its samples in the colour of the rank that trained on it, and in it the
    number of the generation.
    """
    of: dict[int, list[Use]] = {sample: [] for sample in range(length)}
    for use in uses:
        of[use.sample].append(use)
    figure, axes = _figure(COLUMNS, -(-length // COLUMNS))
    for sample, found in of.items():
        row, column = divmod(sample, COLUMNS)
        words = "+".join(str(use.generation) for use in found)
        _cell(axes, column, row, found[-1].rank if found else None, words, frame=len(found) > 1)
    for rank in sorted({use.rank for found in of.values() for use in found}):
        _cell(axes, 3 * rank, -1.1, rank, "")
        axes.text(3 * rank + 0.6, -1.1, f"rank {rank}", fontsize=10, va="center")
    counts = [len(found) for found in of.values()]
    never, again = counts.count(0), sum(count > 1 for count in counts)
    words = f"of {length} samples {never} never, {again} more than once"
    axes.text(COLUMNS - 0.5, -1.1, words, fontsize=10, ha="right", va="center")
    axes.set_yticks([])
    return figure


def _offsets(uses: Sequence[Use]) -> dict[int, float]:
    """Where each generation's first turn stands, with half a cell between two."""
    found: dict[int, float] = {}
    at = 0.0
    for generation in sorted({use.generation for use in uses}):
        found[generation] = at
        at += 1.5 + max(use.turn for use in uses if use.generation == generation)
    return found


def _figure(columns: float, rows: int) -> tuple[Figure, Axes]:
    """Of square cells, with room for a line of words above."""
    figure = Figure(figsize=(11, 0.3 + 10.5 * (rows + 1.5) / columns), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(rows - 0.4, -1.7)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    return figure, axes


def _cell(
    axes: Axes, column: float, row: float, rank: int | None, words: str, *, frame: bool = False
) -> None:
    side = 1 - 2 * GAP
    hue = "none" if rank is None else HUES[rank % len(HUES)]
    edge = "black" if frame else "#999999" if rank is None else hue
    corner = (column - side / 2, row - side / 2)
    axes.add_patch(Rectangle(corner, side, side, fc=hue, ec=edge, lw=2.5 if frame else 0.8))
    axes.text(column, row, words, color="white", fontsize=8.5, ha="center", va="center")
