"""The HTML page of a report: it is well-formed and safe for any history and describes the run."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import attrs
import histories
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import Agent, event_files

from elasticlib.observe.event import TimelineEvent
from elasticlib.observe.formatting import format_duration, plural
from elasticlib.observe.history import (
    Generation,
    GenerationTrigger,
    History,
    JobState,
    NodeExit,
    NodeHistory,
    NodeMembership,
    ProgressSample,
    RecoveryCost,
)
from elasticlib.observe.history_reader import history_of
from elasticlib.observe.report import Report
from elasticlib.observe.report.build import failures, interruptions, sample_rate

KNOWN_ELEMENTS = frozenset(
    (
        *("html", "head", "meta", "title", "style", "body", "article", "header", "section"),
        *("figure", "footer", "div", "span", "p", "h1", "h2", "h3", "b", "i", "code", "small"),
        *("dl", "dt", "dd", "ol", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"),
        *("svg", "path", "script", "details", "summary", "pre"),
    )
)
SAFE_ATTRIBUTES = frozenset(
    (
        *("charset", "name", "content", "http-equiv", "lang", "class", "role", "aria-hidden"),
        *("aria-label", "title", "style", "data-label", "data-icon", "d"),
        *("viewbox", "preserveaspectratio", "fill-rule"),
    )
)


class Page(HTMLParser):
    """Parses a page; an unclosed element and an unexpected element or attribute are errors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.drawings: list[str] = []
        self.numbers: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN_ELEMENTS, tag
        values = {name: value or "" for name, value in attributes}
        assert values.keys() <= SAFE_ATTRIBUTES, values
        self.numbers += [values[name] for name in values if name in ("style", "d")]
        if values.get("role") == "img":
            self.drawings.append(values["aria-label"])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def parse_page(history: History) -> Page:
    """Parse the page of a history, and check that it has no control characters."""
    text = Report(history).html()
    assert text.encode().startswith(b"<!DOCTYPE html>\n<html")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    return Page(text)


def html_of(history: History) -> str:
    return Report(history).html()


def text_of(history: History) -> str:
    return " ".join(" ".join(parse_page(history).text).replace("\u00a0", " ").split())


@pytest.mark.parametrize("name", ["uneventful", "waiting", "eventful"])
def test_page_is_well_formed_and_describes_each_drawing(name: str) -> None:
    page = parse_page(getattr(histories, name)())
    assert page.drawings
    assert all(page.drawings)


def test_page_loads_nothing_and_runs_no_script_but_its_own() -> None:
    text = Report(histories.eventful()).html()
    script = re.search("<script>(.*?)</script>", text, re.S)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    assert not re.search(r"url\(|@import|src=|href=|https?:", text.replace(histories.NASTY, ""))


texts = st.text(st.characters() | st.sampled_from("<>&\"'\x00\x1b\u202e\ud800\n")) | st.just(
    histories.NASTY
)
times = st.floats(-10, 1e9) | st.sampled_from([0.0, 1e300, 1e-300])
counts = st.integers(0, 3) | st.integers(0, 10**12)
names = st.sampled_from(["a", "b", "unknown"])
maybe_seconds = st.none() | st.floats(0, 1e6)
any_number = st.none() | st.floats(allow_nan=True, allow_infinity=True)
kinds = st.sampled_from(
    (
        "failure",
        "worker.exited",
        "checkpoint.saved",
        "snapshot.taken",
        "state.restored",
        "control.requested",
        "drain.requested",
        "events.dropped",
    )
)
final_states = st.sampled_from([state for state in JobState if state.is_finished])
dicts = st.dictionaries(texts, texts, max_size=2)

generations = st.builds(
    Generation,
    number=st.integers(1, 4),
    trigger=st.sampled_from(GenerationTrigger),
    reason=texts,
    started_at=times,
    finished_at=st.none() | times,
    node_count=counts,
    world_size=counts,
    restarts=counts,
    first_step_at=st.none() | times,
    first_step=st.none() | counts,
    last_step=st.none() | counts,
    cost=st.builds(
        RecoveryCost,
        *[maybe_seconds] * 5,
        repeated_steps=counts,
        repeated=st.floats(0, 1e6),
    ),
)
memberships = st.builds(
    NodeMembership,
    names,
    st.integers(1, 4),
    counts,
    st.tuples(counts, counts),
    times,
    st.none() | times,
)
timeline_events = st.builds(
    TimelineEvent, times, kinds, names, texts, st.none() | counts, st.none() | counts
)
progress_samples = st.builds(
    ProgressSample,
    at=times,
    node=names,
    generation=st.integers(1, 4),
    step=counts,
    steps_per_second=any_number,
    loss=any_number,
    samples_per_second=any_number,
)
node_histories = st.builds(
    NodeHistory,
    node=names,
    host=texts,
    started_at=times,
    last_event_at=times,
    slots=counts,
    exit=st.none() | st.builds(NodeExit, times, final_states, texts, st.integers(-9, 255)),
    pid=st.none() | counts,
    log_dir=texts,
    settings=dicts,
    versions=dicts,
    dropped_events=counts,
    is_lost=st.booleans(),
)
histories_of_any_kind = st.builds(
    History,
    run=texts,
    start_timestamp=times,
    duration_seconds=st.floats(0, 1e9),
    state=st.sampled_from(JobState),
    nodes=st.lists(node_histories, max_size=3).map(tuple),
    memberships=st.lists(memberships, max_size=4).map(tuple),
    generations=st.lists(generations, max_size=4).map(tuple),
    timeline=st.lists(timeline_events, max_size=6).map(tuple),
    progress=st.lists(progress_samples, max_size=8).map(tuple),
    restarts=counts,
    max_restarts=st.none() | counts,
    reason=texts,
    root_cause=st.none() | dicts,
    invalid_lines=counts,
    omitted_events=counts,
)


@given(histories_of_any_kind)
def test_page_of_any_history_is_well_formed(history: History) -> None:
    for number in parse_page(history).numbers:
        assert not re.search("nan|inf|e[+-]", number), number


def test_page_describes_an_eventful_run() -> None:
    history = histories.eventful()
    text = text_of(history)
    assert "llm-pretrain-42 succeeded 40 min 7 s goodput 89.2 %" in text
    assert "Restarts 6 of 20" in text
    assert "Workers 8 \u2192 12 \u2192 8 \u2192 4 \u2192 8" in text
    assert "9 min 8 s 2 gpu-b 5 ValueError: <script>alert(" in text
    assert "& red \\x07\\x00 \\u202eevil\\u2069" in text
    assert "lost at 21 min 26 s" in text
    assert "drained after SIGTERM (exit code 75)" in text
    assert "(1,074 more characters)" in text


def test_page_of_many_nodes_and_generations_mentions_what_it_omits() -> None:
    history = histories.vast(nodes=120, generations=70)
    text = text_of(history)
    assert "96 nodes not shown here; the most eventful nodes have a lane." in text
    assert "The 16 longest are shown; the other 54 took" in text
    assert "120 nodes; the 40 most eventful are listed. Of the others: " in text
    assert re.search(
        r"\d+ failures; failures whose reasons differ only in numbers are counted", text
    )
    left_out = attrs.evolve(history, omitted_events=12345, invalid_lines=2)
    assert "12,345 events not shown: evenly spaced events represent them." in text_of(left_out)
    assert "2 lines of the event files could not be read" in text_of(left_out)


def test_huge_range_of_ranks_is_not_expanded() -> None:
    membership = attrs.evolve(histories.eventful().memberships[0], ranks=(0, 10**15))
    assert "ranks 0-1000000000000000" in html_of(
        attrs.evolve(histories.eventful(), memberships=(membership,))
    )


def test_page_marks_snapshots_of_killed_agents_as_lost() -> None:
    history = attrs.evolve(histories.eventful(), checkpoint_step=50, snapshot_step=89)
    killed = attrs.evolve(history, state=None)
    assert "Last snapshot step 89 lost with its agents" in text_of(killed)
    assert "lost with its agents" not in text_of(history)
    assert "lost with its agents" not in text_of(attrs.evolve(killed, checkpoint_step=89))


def test_repeated_steps_are_unknown_without_reported_steps() -> None:
    agent = Agent("n1").launch(0.0).join(1.0, 1, nodes=2).stop(9.0, 9.5)
    agent.join(10.0, 2, reason="n2 left", trigger="loss").succeed(20.0)
    text = text_of(history_of(event_files(agent)))
    assert "Repeated steps \u2013 not reported" in text
    assert "Time lost 2.0 s and lost training" in text
    assert (
        "lost training time is unknown because no worker reported a step (context().step)" in text
    )


def test_requeued_node_is_counted_once() -> None:
    history = histories.eventful()
    requeued = tuple(attrs.evolve(node, node=f"{node.node} (2)") for node in history.nodes)
    (count,) = re.findall(r"Nodes \d+", text_of(history))
    assert count in text_of(attrs.evolve(history, nodes=(*history.nodes, *requeued)))


def test_sample_rate_is_the_sum_over_all_nodes() -> None:
    progress_samples = [
        ProgressSample(10.0, "b", 1, 5, 1.0, None, 30.0),
        ProgressSample(10.0, "a", 1, 5, 1.0, None, 20.0),
        ProgressSample(20.0, "a", 1, 9, 1.0, None, 25.0),
        ProgressSample(20.0, "b", 1, 9, 1.0, None, 35.0),
        # The other node has left before this sample.
        ProgressSample(30.0, "a", 2, 12, 1.0, None, 40.0),
    ]
    memberships = (
        NodeMembership("a", 1, 0, (0, 0), 0.0, 25.0),
        NodeMembership("b", 1, 1, (1, 1), 0.0, 25.0),
        NodeMembership("a", 2, 0, (0, 0), 26.0),
    )
    history = History(
        "job",
        0.0,
        40.0,
        JobState.RUNNING,
        memberships=memberships,
        progress=tuple(progress_samples),
    )
    assert sample_rate(history).lines == [[(10.0, 50.0), (20.0, 60.0)], [(30.0, 40.0)]]


def test_each_interruption_has_a_band_in_each_curve_and_a_line_of_text() -> None:
    history = histories.eventful()
    gaps = interruptions(history)
    assert [gap.generation.number for gap in gaps] == list(range(2, 13))
    gap = gaps[1]
    before, after = history.generations[1:3]
    assert gap.time == (before.finished_at, after.first_step_at)
    assert gap.steps == (
        after.first_step,
        (after.first_step or 0) + after.cost.repeated_steps - 1,
    )
    reason = "6.8 s without a step, 99 steps repeated: rank 5 on gpu-b failed: ValueError"
    html = html_of(history).replace("\u00a0", " ")
    # Each of the four curves has a band with a tooltip.
    assert html.count(f"Generation 3 after a failure, {reason}") == 4
    text = text_of(history)
    assert text.count(f"3 at 9 min 8 s, {reason}") == 1
    assert "labeled with the generation that starts there: 2 at 4 min 2 s" in text
    bands = re.findall(r'class="gap gap-(\w+)"', html)
    assert bands.count("loss") == 4
    assert set(bands) == {"failure", "loss", "resize"}


def test_only_the_longest_interruptions_are_shown() -> None:
    history = histories.vast(nodes=120, generations=70)
    assert html_of(history).count('class="gap ') == 4 * 12
    assert "starts there; the 12 longest of 69 are shown:" in text_of(history)


def test_page_lists_each_recovery_with_its_cost_and_phases() -> None:
    history = histories.eventful()
    text = text_of(history)
    for generation in history.generations:
        cost, phrase = generation.cost, generation.trigger.phrase
        heading = f"Generation {generation.number}, {phrase} {generation.reason}"
        assert f"{heading} {format_duration(cost.seconds)}" in text
        for name, seconds in cost.phases.items():
            steps = f"{plural(cost.repeated_steps, 'step')}, " if name == "repeated" else ""
            assert f"{name} {steps}{format_duration(seconds)}" in text


def test_lost_time_includes_time_outside_of_recoveries() -> None:
    first = Generation(
        1,
        GenerationTrigger.START,
        "",
        2.0,
        30.0,
        1,
        1,
        0,
        first_step_at=10.0,
        cost=RecoveryCost(startup=8.0),
    )
    history = History("job", 0.0, 100.0, JobState.FAILED, generations=(first,))
    text = text_of(history)
    assert "Time lost 1 min 20 s" in text
    total = "1 min 20 s were not spent on productive steps: 1 startup and 0 recoveries, "
    assert f"{total}1 min 12 s other." in text


def test_failure_has_the_generation_and_the_ranks_of_the_workers_that_exited() -> None:
    # An agent records its failure without a rank, after the exits of its workers.
    timeline_events = (
        TimelineEvent(5.0, "worker.exited", "a", "code 1", rank=3),
        TimelineEvent(15.0, "worker.exited", "a", "code 1", rank=1),
        TimelineEvent(15.1, "worker.exited", "b", "code 1", rank=7),
        TimelineEvent(15.2, "failure", "a", "rank 1 ended"),
    )
    memberships = (
        NodeMembership("a", 1, 0, (0, 3), 0.0, 6.0),
        NodeMembership("a", 2, 0, (0, 3), 10.0),
    )
    history = History(
        "job", 0.0, 40.0, JobState.RUNNING, memberships=memberships, timeline=timeline_events
    )
    (failure,) = failures(history)
    assert (failure.generation, failure.ranks) == (2, "1")


def test_failure_shows_the_traceback_of_the_worker() -> None:
    trace = 'File "train.py", line 3\nValueError: <b>bad</b>'
    timeline_events = (
        TimelineEvent(5.0, "worker.exited", "a", "exit code 1", rank=3, traceback=trace),
        TimelineEvent(5.1, "failure", "a", "rank 3 failed"),
    )
    history = History("job", 0.0, 40.0, JobState.RUNNING, timeline=timeline_events)
    assert 'Traceback File "train.py", line 3 ValueError: <b>bad</b>' in text_of(history)


class ComparisonCounter(float):
    """A time that counts the comparisons of all times."""

    count = 0

    def __lt__(self, other: float) -> bool:
        ComparisonCounter.count += 1
        return float(self) < float(other)

    def __le__(self, other: float) -> bool:
        ComparisonCounter.count += 1
        return float(self) <= float(other)

    def __gt__(self, other: float) -> bool:
        ComparisonCounter.count += 1
        return float(self) > float(other)

    def __ge__(self, other: float) -> bool:
        ComparisonCounter.count += 1
        return float(self) >= float(other)


def count_comparisons(generations: int) -> int:
    """Count the comparisons of times while the failures of this many generations are listed."""
    memberships, timeline = [], []
    for number in range(1, generations + 1):
        start = ComparisonCounter(10 * number)
        memberships.append(
            NodeMembership(
                "n1", number, 0, (0, 1), started_at=start, finished_at=ComparisonCounter(start + 9)
            )
        )
        for rank in (0, 1):
            at = ComparisonCounter(start + 5 + rank)
            timeline.append(
                TimelineEvent(at, "worker.exited", "n1", "exited with code 1", rank=rank)
            )
        timeline.append(
            TimelineEvent(ComparisonCounter(start + 8), "failure", "n1", "rank 0 exited")
        )
    ComparisonCounter.count = 0
    history = History(
        "job", 0.0, 10.0, None, memberships=tuple(memberships), timeline=tuple(timeline)
    )
    listed = failures(history)
    assert [failure.generation for failure in listed] == list(range(1, generations + 1))
    assert {failure.workers for failure in listed} == {(0, 1)}
    return ComparisonCounter.count


def test_time_to_list_failures_does_not_grow_with_the_square_of_the_generations() -> None:
    assert count_comparisons(800) < 3 * count_comparisons(400)
