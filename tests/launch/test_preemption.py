"""Preemption notices: the metadata services of three clouds, files and functions, and the watch."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metadata_server import KINDS, MACHINE, MetadataServer, serving

from elasticlib.clock import monotonic, parse_utc
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.metadata_services import (
    AwsSource,
    AzureSource,
    GcpSource,
    MetadataService,
    find_scheduled_event,
    find_service,
    read_instance_action,
    read_scheduled_event,
)
from elasticlib.launch.preemption import (
    PreemptionWatcher,
    describe,
    open_source,
    watch_for_preemption,
)
from elasticlib.launch.preemption_notice import (
    FileSource,
    FunctionSource,
    NoticeSource,
    PreemptionNotice,
    read_notice,
)
from elasticlib.testing.waiting import wait_until

SOURCES: dict[str, Callable[[tuple[str, int]], MetadataService]] = {
    "aws": AwsSource,
    "gcp": GcpSource,
    "azure": AzureSource,
}
REASONS = {
    "aws": "spot interruption (terminate)",
    "gcp": "spot preemption",
    "azure": "scheduled event Preempt",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_has_no_notice_at_first_and_then_one_with_its_time(kind: str) -> None:
    with serving(kind, time_left_s=30.0) as (server, address):
        source = SOURCES[kind](address)
        assert source.poll() is None
        server.send_notice()
        notice = source.poll()
    assert notice is not None
    assert notice.reason == REASONS[kind]
    assert notice.deadline_s == pytest.approx(30.0, abs=2.0)


def answer_without_http(listener: socket.socket) -> None:
    """Answer one request with a line that is no HTTP."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(b"hello\n\n")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failure", ["status", "body", "long", "late", "no http", "refused"])
def test_an_answer_that_no_service_gives_is_a_failure_and_not_a_notice(
    kind: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticlib.launch.metadata_services.REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr("elasticlib.launch.metadata_services.AZURE_TIMEOUT_S", 0.2)
    with serving(kind) as (server, address):
        server.send_notice()
        match failure:
            case "status":
                server.status = 503
            case "body" if kind == "gcp":
                pytest.skip("any other text of GCP means that there is no preemption")
            case "body":
                server.body = b"<html>"
            case "long":
                server.body = b"x" * 100_000
            case "late":
                server.delay_s = 1.0
            case "refused":
                address = ("127.0.0.1", 1)
        if failure == "no http":
            with socket.create_server(("127.0.0.1", 0)) as plain:
                thread = threading.Thread(target=answer_without_http, args=(plain,))
                thread.start()
                with pytest.raises(OSError, match=r"no HTTP answer"):
                    SOURCES[kind](plain.getsockname()).poll()
                thread.join()
            return
        with pytest.raises(OSError, match=r"."):
            SOURCES[kind](address).poll()


def test_an_expired_token_of_aws_is_replaced() -> None:
    with serving("aws") as (server, address):
        source = AwsSource(address)
        assert source.poll() is None
        server.token = "token-2"
        server.send_notice()
        assert source.poll() is not None
    assert [line for line in server.requests if line.startswith("PUT")] == [
        "PUT /latest/api/token"
    ] * 2


def test_a_rebalance_recommendation_counts_only_with_its_option() -> None:
    with serving("aws") as (server, address):
        server.has_rebalance_hint = True
        assert AwsSource(address).poll() is None
        notice = AwsSource(address, use_rebalance_hints=True).poll()
    assert notice == PreemptionNotice("rebalance recommendation", None)


def test_the_time_of_an_aws_notice_is_read_and_bounded() -> None:
    def left(**fields: object) -> float | None:
        return read_instance_action({"action": "stop", **fields}).deadline_s

    at = datetime.now(timezone.utc)
    assert left(time=(at + timedelta(seconds=60)).isoformat()) == pytest.approx(60, abs=2)
    assert left(time=(at - timedelta(seconds=60)).isoformat()) == 0
    assert left(time=(at + timedelta(days=1)).isoformat()) == 120
    assert left(time="soon") == 120
    assert left() == 120
    assert read_instance_action({"action": "hibernate"}).deadline_s == 0


def test_times_of_the_services_are_in_utc() -> None:
    at = datetime(2026, 1, 2, 12, 1, tzinfo=timezone.utc).timestamp()
    for text in ("2026-01-02T12:01:00Z", "2026-01-02T12:01:00", "Fri, 02 Jan 2026 12:01:00 GMT"):
        assert parse_utc(text) == at
    with pytest.raises(ValueError, match=r"."):
        parse_utc("soon")


def test_maintenance_of_a_gcp_machine_is_a_notice_of_an_hour() -> None:
    with serving("gcp") as (server, address):
        server.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
        assert GcpSource(address).poll() is None
        server.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
        notice = GcpSource(address).poll()
    assert notice == PreemptionNotice("host maintenance (terminate)", 3600.0)


def test_requests_to_gcp_wait_for_a_change() -> None:
    with serving("gcp") as (server, address):
        source = GcpSource(address)
        assert source.poll() is None
        notices: list[PreemptionNotice | None] = []
        thread = threading.Thread(target=lambda: notices.append(source.poll()))
        thread.start()
        wait_until("the waiting request", lambda: "wait_for_change" in server.requests[-1])
        server.send_notice()
        thread.join()
    assert notices == [PreemptionNotice("spot preemption", 30.0)]


@pytest.mark.parametrize("event_type", ["Freeze", "Preempt", "Terminate", "Reboot", "Redeploy"])
def test_only_azure_events_that_take_this_machine_away_count(event_type: str) -> None:
    with serving("azure") as (server, address):
        server.event_type = event_type
        server.machines = ["another"]
        server.send_notice()
        source = AzureSource(address)
        assert source.poll() is None
        server.machines = ["another", MACHINE]
        assert (source.poll() is None) == (event_type == "Freeze")


def test_an_azure_event_that_has_started_leaves_no_time() -> None:
    with serving("azure") as (server, address):
        server.has_started = True
        server.send_notice()
        assert AzureSource(address).poll() == PreemptionNotice("scheduled event Preempt", 0.0)


def test_an_azure_event_is_approved_only_with_its_option() -> None:
    with serving("azure") as (server, address):
        server.send_notice()
        for approve_early, bodies in ((False, []), (True, [b"event-1"])):
            source = AzureSource(address, approve_early=approve_early)
            assert source.poll() is not None
            source.on_left()
            assert [b"event-1" for body in server.bodies if b'"event-1"' in body] == bodies


def test_an_azure_event_of_several_machines_is_not_approved_for_the_others() -> None:
    with serving("azure") as (server, address):
        server.machines = ["another", MACHINE]
        server.send_notice()
        source = AzureSource(address, approve_early=True)
        assert source.poll() is not None
        source.on_left()
        assert not server.bodies


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(
                st.sampled_from(["EventType", "Resources", "NotBefore", "EventId"]),
                s | st.sampled_from(["Preempt", [MACHINE]]),
            )
        ),
    )
)
def test_no_document_of_azure_breaks_the_watch(events: object) -> None:
    event = find_scheduled_event(events, MACHINE)
    if event is not None:
        assert "Preempt" in read_scheduled_event(event).reason


# -- auto -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_auto_finds_the_service_that_answers(kind: str) -> None:
    with serving(kind) as (_, address):
        source = find_service(address, timeout=30.0)
    assert type(source) is SOURCES[kind]


@pytest.mark.parametrize("answers_nothing", [False, True])
def test_auto_finds_nothing_where_no_service_answers_and_does_not_wait_long(
    answers_nothing: bool,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname() if answers_nothing else ("127.0.0.1", 1)
        begin = monotonic()
        assert find_service(address) is None
        assert monotonic() - begin < 20


# -- files and functions --------------------------------------------------------------------------


def test_a_file_is_a_notice_with_its_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = FileSource(str(path))
    assert source.poll() is None
    path.touch()
    assert source.poll() == PreemptionNotice(f"{path} exists")
    path.write_text("spot price\nrose\n")
    assert source.poll() == PreemptionNotice("spot price rose")
    path.write_text('{"reason": "maintenance", "deadline_s": 90}')
    assert source.poll() == PreemptionNotice("maintenance", 90)


@given(st.text())
def test_every_text_of_a_file_is_a_notice(text: str) -> None:
    assert (read_notice(text.strip()) is None) == (not text.strip())


def test_brackets_that_are_nested_too_deep_are_a_notice() -> None:
    text = "[" * 4096
    assert read_notice(text) == PreemptionNotice(text)


def test_a_wrong_deadline_in_a_file_is_reported_and_is_still_a_notice() -> None:
    for wrong in ('"soon"', "NaN", "1e999", "1" + 400 * "0", "true", "[]"):
        notice = read_notice(f'{{"reason": "r", "deadline_s": {wrong}}}')
        assert notice is not None
        assert notice.deadline_s is None
        assert "must be a number of seconds" in notice.reason


@pytest.mark.parametrize("past", ["-1", "-0.5", "-1e999", "-1" + 400 * "0"])
def test_a_deadline_in_the_past_means_now(past: str) -> None:
    notice = read_notice(f'{{"reason": "r", "deadline_s": {past}}}')
    assert notice == PreemptionNotice("r", 0.0)


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


def return_odd_notice() -> PreemptionNotice:
    return PreemptionNotice(RESULTS[0], 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (None, "no reason given"),
        ("", "no reason given"),
        (7, "7"),
        (Unprintable(), "no reason given"),
    ],
)
def test_the_notice_of_a_function_with_an_odd_reason_is_not_lost(
    reason: object, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_notices", sys.modules[__name__])
    RESULTS[:] = [reason]
    calls: list[tuple[str, float | None]] = []
    with watch_for_preemption("my_notices:return_odd_notice", lambda *call: calls.append(call)):
        wait_until("the notice", lambda: calls)
    source = "my_notices:return_odd_notice"
    assert calls == [(f"a preemption notice ({source}: {text}, 1 s left)", 1.0)]


RESULTS: list[object] = []


def next_notice() -> object:
    """Return the next result of the user's function."""
    result = RESULTS.pop(0)
    if isinstance(result, Exception):
        raise result
    return result


def test_a_function_returns_a_notice_a_text_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_notices", sys.modules[__name__])
    source = FunctionSource("my_notices:next_notice")
    RESULTS[:] = [None, "going", PreemptionNotice("going", 5.0), 7]
    assert source.poll() is None
    assert source.poll() == PreemptionNotice("going")
    assert source.poll() == PreemptionNotice("going", 5.0)
    with pytest.raises(TypeError, match="must return a PreemptionNotice, a text or None, got 7"):
        source.poll()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("amazon", "--preemption-notice must be one of auto, aws, .*, got 'amazon'"),
        ("file:", "--preemption-notice must be one of .* file:PATH"),
        ("aws:now", "--preemption-notice must be one of .*, got 'aws:now'"),
        ("", "--preemption-notice must be one of"),
    ],
)
def test_a_value_that_names_no_source_is_rejected(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options(["--standalone", f"--preemption-notice={value}", "-m", "json"])


def test_a_function_that_cannot_be_imported_is_found_at_the_start() -> None:
    parse_options(["--standalone", "--preemption-notice=no_such_module:function", "-m", "json"])
    with pytest.raises(ConfigError, match="can be imported"):
        open_source("no_such_module:function")


# -- the watch ------------------------------------------------------------------------------------


class ScriptedSource(NoticeSource):
    """Returns these results one after the other."""

    name = "script"
    poll_interval = 0.01

    def __init__(self, *results: object) -> None:
        self.results = list(results)
        self.has_left = False

    def poll(self) -> PreemptionNotice | None:
        result = self.results.pop(0) if self.results else None
        if isinstance(result, BaseException):
            raise result
        return result if isinstance(result, PreemptionNotice) else None

    def on_left(self) -> None:
        self.has_left = True


def watch(source: NoticeSource) -> tuple[PreemptionWatcher, list[PreemptionNotice]]:
    notices: list[PreemptionNotice] = []
    watcher = PreemptionWatcher(source, notices.append)
    watcher.start()
    return watcher, notices


def test_a_failing_source_is_reported_once_and_its_notice_still_arrives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    notice = PreemptionNotice("going", 30.0)
    source = ScriptedSource(OSError("no route"), ValueError("bad"), None, notice, notice)
    watcher, notices = watch(source)
    wait_until("the notice", lambda: notices)
    watcher.close()
    assert notices == [notice]
    assert source.results == [notice], "the watch ends with the notice"
    assert source.has_left
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "cannot ask for preemption notices (script): OSError: no route; trying again more slowly"
    ]
    assert "script answers again for preemption notices" in caplog.text


def test_the_watch_goes_on_after_a_function_that_exits() -> None:
    notice = PreemptionNotice("going", 30.0)
    watcher, notices = watch(ScriptedSource(SystemExit(3), KeyboardInterrupt(), notice))
    wait_until("the notice", lambda: notices)
    watcher.close()
    assert notices == [notice]


def test_a_notice_with_a_deadline_follows_one_without() -> None:
    early, late = PreemptionNotice("rebalance recommendation"), PreemptionNotice("interruption", 9)
    source = ScriptedSource(early, early, None, OSError("no route"), late, late)
    watcher, notices = watch(source)
    wait_until("both notices", lambda: len(notices) == 2)
    watcher.close()
    assert notices == [early, late]
    assert source.results == [late], "the watch ends with the deadline"


def test_a_watcher_without_a_notice_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with watch_for_preemption(f"file:{tmp_path / 'notice'}", lambda *_: None):
        pass
    wait_until("the thread to end", lambda: set(threading.enumerate()) <= before)


def test_a_notice_is_described_with_its_source_and_time(tmp_path: Path) -> None:
    (tmp_path / "notice").write_text('{"reason": "maintenance", "deadline_s": 90}')
    calls: list[tuple[str, float | None]] = []
    with watch_for_preemption(f"file:{tmp_path / 'notice'}", lambda *call: calls.append(call)):
        wait_until("the notice", lambda: calls)
    assert calls == [("a preemption notice (file: maintenance, 90 s left)", 90)]


def test_a_long_reason_of_several_lines_is_described_in_one_short_line() -> None:
    text = describe(ScriptedSource(), PreemptionNotice("maintenance\nof rack 7 " + 999 * "x"))
    assert text.startswith(r"a preemption notice (script: maintenance\x0aof rack 7 xxx")
    assert len(text) < 300
    assert text.isprintable()


def test_the_server_of_these_tests_rejects_what_the_services_reject() -> None:
    with serving("aws") as (server, _):
        assert isinstance(server, MetadataServer)
        assert server.answer("GET", "/latest/meta-data/spot/instance-action", {})[0] == 401
        assert server.answer("PUT", "/latest/api/token", {})[0] == 400
    assert MetadataServer("gcp", 1).answer("GET", "/x", {})[0] == 403
    assert MetadataServer("azure", 1).answer("GET", "/metadata/scheduledevents", {})[0] == 400
