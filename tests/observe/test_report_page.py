"""The page of a report, as text: whatever a history holds, it is one sound and harmless file that
says what was told, and what was left out."""

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
from told_runs import Agent, files

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

KNOWN = frozenset(
    (
        *("html", "head", "meta", "title", "style", "body", "article", "header", "section"),
        *("figure", "footer", "div", "span", "p", "h1", "h2", "h3", "b", "i", "code", "small"),
        *("dl", "dt", "dd", "ol", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"),
        *("svg", "path", "script", "details", "summary", "pre"),
    )
)
HARMLESS = frozenset(
    (
        *("charset", "name", "content", "http-equiv", "lang", "class", "role", "aria-hidden"),
        *("aria-label", "title", "style", "data-label", "data-icon", "d"),
        *("viewbox", "preserveaspectratio", "fill-rule"),
    )
)


class Page(HTMLParser):
    """Reads a page; an element that is not closed, or not expected, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.drawings: list[str] = []
        self.numbers: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, found: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN, tag
        values = {name: value or "" for name, value in found}
        assert values.keys() <= HARMLESS, values
        self.numbers += [values[name] for name in values if name in ("style", "d")]
        if values.get("role") == "img":
            self.drawings.append(values["aria-label"])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, found: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, found)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def read(history: History) -> Page:
    """The page as it stands in a file, where all text is fit to be written."""
    text = Report(history).html()
    assert text.encode().startswith(b"<!DOCTYPE html>\n<html")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    return Page(text)


def html_of(history: History) -> str:
    return Report(history).html()


def told(history: History) -> str:
    return " ".join(" ".join(read(history).text).replace("\u00a0", " ").split())


@pytest.mark.parametrize("name", ["uneventful", "waiting", "eventful"])
def test_page_is_well_formed_and_describes_each_drawing(name: str) -> None:
    found = read(getattr(histories, name)())
    assert found.drawings
    assert all(found.drawings)


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
names = st.sampled_from(["a", "b", "nobody"])
maybe_seconds = st.none() | st.floats(0, 1e6)
any_number = st.none() | st.floats(allow_nan=True, allow_infinity=True)
kinds = st.sampled_from(
    (
        "failure",
        "worker.exited",
        "checkpoint.saved",
        "snapshot.taken",
        "state.restored",
        "drain.requested",
        "events.dropped",
    )
)
ends = st.sampled_from([state for state in JobState if state.is_finished])
dicts = st.dictionaries(texts, texts, max_size=2)

made = st.builds(
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
stays = st.builds(
    NodeMembership,
    names,
    st.integers(1, 4),
    counts,
    st.tuples(counts, counts),
    times,
    st.none() | times,
)
marks = st.builds(TimelineEvent, times, kinds, names, texts, st.none() | counts, st.none() | counts)
paces = st.builds(
    ProgressSample,
    at=times,
    node=names,
    generation=st.integers(1, 4),
    step=counts,
    steps_per_second=any_number,
    loss=any_number,
    samples_per_second=any_number,
)
stories = st.builds(
    NodeHistory,
    node=names,
    host=texts,
    started_at=times,
    last_event_at=times,
    slots=counts,
    exit=st.none() | st.builds(NodeExit, times, ends, texts, st.integers(-9, 255)),
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
    nodes=st.lists(stories, max_size=3).map(tuple),
    memberships=st.lists(stays, max_size=4).map(tuple),
    generations=st.lists(made, max_size=4).map(tuple),
    timeline=st.lists(marks, max_size=6).map(tuple),
    progress=st.lists(paces, max_size=8).map(tuple),
    restarts=counts,
    max_restarts=st.none() | counts,
    reason=texts,
    root_cause=st.none() | dicts,
    invalid_lines=counts,
    omitted_events=counts,
)


@given(histories_of_any_kind)
def test_page_of_any_history_is_well_formed(history: History) -> None:
    for number in read(history).numbers:
        assert not re.search("nan|inf|e[+-]", number), number


def test_what_a_page_says_of_an_eventful_run() -> None:
    history = histories.eventful()
    words = told(history)
    assert "llm-pretrain-42 succeeded 40 min 7 s goodput 89.2 %" in words
    assert "Restarts 6 of 20" in words
    assert "Workers 8 \u2192 12 \u2192 8 \u2192 4 \u2192 8" in words
    assert "9 min 8 s 2 gpu-b 5 ValueError: <script>alert(" in words
    assert "& red \\x07\\x00 \\u202eevil\\u2069" in words
    assert "lost at 21 min 26 s" in words
    assert "drained after SIGTERM (exit code 75)" in words
    assert "(1,074 more characters)" in words


def test_a_page_of_many_folds_them_and_says_so() -> None:
    history = histories.vast(nodes=120, generations=70)
    text = told(history)
    assert "96 nodes not shown here; the most eventful nodes have a lane." in text
    assert "The 16 longest are shown; the other 54 took" in text
    assert "120 nodes; the 40 most eventful are listed. Of the others: " in text
    assert re.search(
        r"\d+ failures; failures whose reasons differ only in numbers are counted", text
    )
    left_out = attrs.evolve(history, omitted_events=12345, invalid_lines=2)
    assert "12,345 events not shown: evenly spaced events represent them." in told(left_out)
    assert "2 lines of the event files could not be read" in told(left_out)


def test_ranks_of_a_file_that_names_too_many_are_not_counted_one_by_one() -> None:
    stay = attrs.evolve(histories.eventful().memberships[0], ranks=(0, 10**15))
    assert "ranks 0-1000000000000000" in html_of(
        attrs.evolve(histories.eventful(), memberships=(stay,))
    )


def test_a_snapshot_of_agents_that_were_killed_is_said_to_be_lost() -> None:
    history = attrs.evolve(histories.eventful(), checkpoint_step=50, snapshot_step=89)
    killed = attrs.evolve(history, state=None)
    assert "Last snapshot step 89 lost with its agents" in told(killed)
    assert "lost with its agents" not in told(history)
    assert "lost with its agents" not in told(attrs.evolve(killed, checkpoint_step=89))


def test_where_no_steps_are_told_nobody_is_told_that_none_was_redone() -> None:
    agent = Agent("n1").launch(0.0).begin(1.0, 1, nodes=2).stop(9.0, 9.5)
    agent.begin(10.0, 2, cause="n2 left", why="loss").succeed(20.0)
    words = told(history_of(files(agent)))
    assert "Repeated steps \u2013 not reported" in words
    assert "Time lost 2.0 s and lost training" in words
    assert (
        "lost training time is unknown because no worker reported a step (context().step)" in words
    )


def test_a_node_that_was_requeued_is_counted_once() -> None:
    history = histories.eventful()
    again = tuple(attrs.evolve(node, node=f"{node.node} (2)") for node in history.nodes)
    twice = attrs.evolve(history, nodes=(*history.nodes, *again))
    (once,) = re.findall(r"Nodes \d+", told(history))
    assert once in told(twice)


def test_samples_are_those_of_all_nodes_and_steps_those_of_one() -> None:
    paces = [
        ProgressSample(10.0, "b", 1, 5, 1.0, None, 30.0),
        ProgressSample(10.0, "a", 1, 5, 1.0, None, 20.0),
        ProgressSample(20.0, "a", 1, 9, 1.0, None, 25.0),
        ProgressSample(20.0, "b", 1, 9, 1.0, None, 35.0),
        # After it was left by the other node.
        ProgressSample(30.0, "a", 2, 12, 1.0, None, 40.0),
    ]
    stays = (
        NodeMembership("a", 1, 0, (0, 0), 0.0, 25.0),
        NodeMembership("b", 1, 1, (1, 1), 0.0, 25.0),
        NodeMembership("a", 2, 0, (0, 0), 26.0),
    )
    history = History("job", 0.0, 40.0, JobState.RUNNING, memberships=stays, progress=tuple(paces))
    assert sample_rate(history).lines == [[(10.0, 50.0), (20.0, 60.0)], [(30.0, 40.0)]]


def test_curves_have_a_band_and_a_sentence_for_each_interruption() -> None:
    history = histories.eventful()
    found = interruptions(history)
    assert [gap.generation.number for gap in found] == list(range(2, 13))
    third = found[1]
    before, apply_event = history.generations[1:3]
    assert third.time == (before.finished_at, apply_event.first_step_at)
    assert third.steps == (
        apply_event.first_step,
        (apply_event.first_step or 0) + apply_event.cost.repeated_steps - 1,
    )
    cause = "6.8 s without a step, 99 steps repeated: rank 5 on gpu-b failed: ValueError"
    html = html_of(history).replace("\u00a0", " ")
    assert html.count(f"Generation 3 after a failure, {cause}") == 4, "the tooltip of each band"
    words = told(history)
    assert words.count(f"3 at 9 min 8 s, {cause}") == 1
    assert "labeled with the generation that starts there: 2 at 4 min 2 s" in words
    bands = re.findall(r'class="gap gap-(\w+)"', html)
    assert bands.count("loss") == 4
    assert set(bands) == {"failure", "loss", "resize"}


def test_only_the_longest_of_many_interruptions_are_shown() -> None:
    history = histories.vast(nodes=120, generations=70)
    assert html_of(history).count('class="gap ') == 4 * 12
    assert "starts there; the 12 longest of 69 are shown:" in told(history)


def test_recoveries_are_told_in_the_numbers_of_their_costs() -> None:
    history = histories.eventful()
    words = told(history)
    for made in history.generations:
        cost = format_duration(made.cost.seconds)
        assert f"Generation {made.number}, {made.trigger.phrase} {made.reason} {cost}" in words
        for name, seconds in made.cost.phases.items():
            redone = f"{plural(made.cost.repeated_steps, 'step')}, " if name == "repeated" else ""
            assert f"{name} {redone}{format_duration(seconds)}" in words


def test_all_time_without_a_step_that_counts_is_told_and_where_it_is_of_no_recovery() -> None:
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
    words = told(history)
    assert "Time lost 1 min 20 s" in words
    sentence = "1 min 20 s were not spent on productive steps: 1 startup and 0 recoveries, "
    assert f"{sentence}1 min 12 s other." in words


def test_a_failure_has_the_generation_and_the_ranks_that_others_tell_of() -> None:
    """An agent tells of its failure without a rank, after its workers' ends."""
    marks = (
        TimelineEvent(5.0, "worker.exited", "a", "code 1", rank=3),
        TimelineEvent(15.0, "worker.exited", "a", "code 1", rank=1),
        TimelineEvent(15.1, "worker.exited", "b", "code 1", rank=7),
        TimelineEvent(15.2, "failure", "a", "rank 1 ended"),
    )
    stays = (NodeMembership("a", 1, 0, (0, 3), 0.0, 6.0), NodeMembership("a", 2, 0, (0, 3), 10.0))
    history = History("job", 0.0, 40.0, JobState.RUNNING, memberships=stays, timeline=marks)
    (found,) = failures(history)
    assert (found.generation, found.ranks) == (2, "1")


def test_failure_shows_the_traceback_of_the_worker() -> None:
    trace = 'File "train.py", line 3\nValueError: <b>bad</b>'
    marks = (
        TimelineEvent(5.0, "worker.exited", "a", "exit code 1", rank=3, traceback=trace),
        TimelineEvent(5.1, "failure", "a", "rank 3 failed"),
    )
    history = History("job", 0.0, 40.0, JobState.RUNNING, timeline=marks)
    assert 'Traceback File "train.py", line 3 ValueError: <b>bad</b>' in told(history)


class Counted(float):
    """A time that counts how often times are compared."""

    count = 0

    def __lt__(self, other: float) -> bool:
        Counted.count += 1
        return float(self) < float(other)

    def __le__(self, other: float) -> bool:
        Counted.count += 1
        return float(self) <= float(other)

    def __gt__(self, other: float) -> bool:
        Counted.count += 1
        return float(self) > float(other)

    def __ge__(self, other: float) -> bool:
        Counted.count += 1
        return float(self) >= float(other)


def comparisons_of(generations: int) -> int:
    """Count the comparisons of times while the failures of so many generations are listed."""
    stays, timeline = [], []
    for number in range(1, generations + 1):
        began = Counted(10 * number)
        stays.append(
            NodeMembership(
                "n1", number, 0, (0, 1), started_at=began, finished_at=Counted(began + 9)
            )
        )
        for rank in (0, 1):
            at = Counted(began + 5 + rank)
            timeline.append(
                TimelineEvent(at, "worker.exited", "n1", "exited with code 1", rank=rank)
            )
        timeline.append(TimelineEvent(Counted(began + 8), "failure", "n1", "rank 0 exited"))
    Counted.count = 0
    history = History("job", 0.0, 10.0, None, memberships=tuple(stays), timeline=tuple(timeline))
    found = failures(history)
    assert [one.generation for one in found] == list(range(1, generations + 1))
    assert {one.workers for one in found} == {(0, 1)}
    return Counted.count


def test_time_to_list_failures_does_not_grow_with_the_square_of_the_generations() -> None:
    assert comparisons_of(800) < 3 * comparisons_of(400)
