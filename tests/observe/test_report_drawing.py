"""Where things stand in a drawing that has no width of its own."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from elasticlib.observe.report.drawing import (
    WIDTHS,
    Axis,
    Label,
    inside,
    inward,
    placed,
    thinned,
    time_ticks,
    value_ticks,
)
from elasticlib.observe.report.markup import element
from elasticlib.visible import visible

labels = st.lists(
    st.builds(
        Label,
        st.floats(0, 100),
        st.text("0123456789", min_size=1, max_size=12),
        st.sampled_from(["start", "middle", "end"]),
    ),
    max_size=12,
)


@given(labels, st.integers(0, 2000))
def test_labels_that_are_shown_never_cover_each_other_at_any_width(
    wanted: list[Label], wider: int
) -> None:
    for rung, least in enumerate(WIDTHS):
        width = least + wider
        shown = [label for label, first in placed(wanted) if int(first[1]) <= rung]
        ends = sorted(label.reach(width, 12) for label in shown)
        assert all(one[1] <= other[0] for one, other in pairwise(ends))


@given(labels)
def test_a_label_turned_inward_stays_within_the_narrowest_drawing(wanted: list[Label]) -> None:
    for label in wanted:
        left, right = inward(Label(label.at, label.words)).reach(WIDTHS[0], 12)
        assert left >= 0 or right <= WIDTHS[0]


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), max_size=100),
    st.integers(8, 60),
)
def test_thinning_keeps_the_ends_and_the_extremes(
    points: list[tuple[float, float]], most: int
) -> None:
    points = sorted(points)
    kept = thinned(points, most)
    assert len(kept) <= max(most, 4)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        for extreme in (min, max):
            assert extreme(y for _, y in kept) == extreme(y for _, y in points)


@given(st.floats(1e-3, 1e9))
def test_ticks_of_time_are_round_few_and_within(seconds: float) -> None:
    ticks = time_ticks(seconds)
    assert ticks[0] == (0.0, "0")
    assert len(ticks) <= 6
    assert all(at <= seconds * (1 + 1e-9) for at, _ in ticks)


@example(0.0, 1e-310)
@example(1e16, 2.0)
@example(-1.7e308, 1.7e308)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_of_values_are_few_and_within(low: float, more: float) -> None:
    high = low + more
    ticks = value_ticks(low, high)
    assert len(ticks) <= 5
    assert all(low - more * 1e-6 <= tick <= high + more * 1e-6 for tick in ticks)


@given(st.floats(allow_nan=False), st.floats(0, 1e9), st.floats(0, 1e9))
def test_every_value_has_a_place_within_the_drawing(
    value: float, first: float, more: float
) -> None:
    assert 0 <= Axis(first, first + more)(value) <= 100


def test_words_stand_in_a_bar_from_the_width_on_where_they_fit() -> None:
    assert [inside(share, "rendezvous") for share in (40, 20, 10, 5)] == ["w0", "w1", "w2", None]


def test_text_of_others_is_never_markup_and_hides_nothing() -> None:
    assert element("p", "<b>", class_='"x') == '<p class="&quot;x">&lt;b&gt;</p>'
    assert visible("a\x1b[31mb\x1b[0m\x07\u202ec\r\nd\ud800") == "ab\\x07\\u202ec\nd\\ud800"
