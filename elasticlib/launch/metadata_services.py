"""Preemption notices of the metadata services of AWS, GCP and Azure.

Each service answers over plain HTTP at one link-local address, which only its machine can reach.
Nothing here resolves a name, follows a redirect or uses a proxy. Sources:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html,
https://cloud.google.com/compute/docs/instances/create-use-preemptible,
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any

import attrs

from ..clock import monotonic, parse_utc, wall
from ..threads import daemon_thread, start_thread
from .preemption_notice import NoticeSource, PreemptionNotice

ADDRESS = ("169.254.169.254", 80)
REQUEST_TIMEOUT_S = 2.0
FIND_TIMEOUT_S = 0.5  # in which a service must answer to be found
MAX_ANSWER_BYTES = 1 << 16
OK, UNAUTHORIZED, NOT_FOUND = 200, 401, 404

AWS_TOKEN_LIFETIME_S = 3600
AWS_NOTICE_S = 120.0  # AWS announces an interruption so long before
GCP_PREEMPTION_S = 30.0  # GCP stops a machine so long after the value changes
GCP_MAINTENANCE_S = 3600.0  # for machines with GPUs
GCP_WAIT_S = 5.0  # a request for a change is answered after this time at the latest
AZURE_TIMEOUT_S = 10.0  # the first request of a machine enables the service, which takes longer
AZURE_EVENT_TYPES = ("Preempt", "Terminate", "Reboot", "Redeploy")


@attrs.frozen
class Answer:
    """The answer of a metadata service."""

    status: int
    text: str
    headers: Mapping[str, str]  # with lower-case names


class UnexpectedAnswerError(OSError):
    """The service answered something that its documentation does not allow."""


def request(
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    body: bytes | None = None,
    timeout: float = REQUEST_TIMEOUT_S,
    address: tuple[str, int] = ADDRESS,
) -> Answer:
    """Send one request to a metadata service.

    Raises:
        OSError: the service cannot be reached, or its answer is no HTTP or too long.
    """
    connection = HTTPConnection(*address, timeout=timeout)
    try:
        connection.request(method, path, body=body, headers=dict(headers))
        response = connection.getresponse()
        data = response.read(MAX_ANSWER_BYTES + 1)
        if len(data) > MAX_ANSWER_BYTES:
            raise UnexpectedAnswerError(f"{method} {path}: the answer is too long")
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, data.decode(errors="replace").strip(), fields)
    except HTTPException as error:
        raise UnexpectedAnswerError(
            f"{method} {path}: no HTTP answer ({type(error).__name__})"
        ) from error
    finally:
        connection.close()


def _unexpected(path: str, answer: Answer) -> UnexpectedAnswerError:
    return UnexpectedAnswerError(f"{path}: status {answer.status}, {answer.text[:80]!r}")


def _read_json(path: str, answer: Answer) -> Mapping[str, Any]:
    try:
        fields = json.loads(answer.text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise _unexpected(path, answer)
    return fields


def seconds_until(text: str) -> float:
    """Return the seconds from now to a time, at least 0.

    Raises:
        ValueError: the text is no time.
    """
    return max(0.0, parse_utc(text) - wall())


class MetadataService(NoticeSource):
    """A source that asks a metadata service.

    Args:
        address: host and port of the service.
    """

    def __init__(self, address: tuple[str, int] = ADDRESS) -> None:
        self._address = address

    def answers(self, timeout: float) -> bool:
        """Return True if this machine has the service."""
        try:
            return self._probe(timeout)
        except OSError:
            return False

    def _probe(self, timeout: float) -> bool:
        raise NotImplementedError

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        timeout: float = REQUEST_TIMEOUT_S,
    ) -> Answer:
        return request(method, path, headers, body=body, timeout=timeout, address=self._address)


class AwsSource(MetadataService):
    """Interruptions of EC2 Spot Instances, from version 2 of the instance metadata service.

    Args:
        address: host and port of the service.
        use_rebalance_hints: take a rebalance recommendation for a notice. It may come long before
            an interruption, and without one.
    """

    name = "AWS"
    poll_interval = 5.0

    _TOKEN_PATH = "/latest/api/token"
    _ACTION_PATH = "/latest/meta-data/spot/instance-action"
    _REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"

    def __init__(
        self, address: tuple[str, int] = ADDRESS, *, use_rebalance_hints: bool = False
    ) -> None:
        super().__init__(address)
        self._use_rebalance_hints = use_rebalance_hints
        self._token = ""

    def poll(self) -> PreemptionNotice | None:
        answer = self._get(self._ACTION_PATH)
        if answer is not None:
            return read_instance_action(_read_json(self._ACTION_PATH, answer))
        if self._use_rebalance_hints and self._get(self._REBALANCE_PATH) is not None:
            return PreemptionNotice("rebalance recommendation")
        return None

    def _probe(self, timeout: float) -> bool:
        self._token = self._request_token(timeout)
        return True

    def _get(self, path: str) -> Answer | None:
        """Return the answer, or None if the path does not exist."""
        answer = self._get_with_token(path)
        if answer.status == UNAUTHORIZED:  # the token has expired
            self._token = ""
            answer = self._get_with_token(path)
        if answer.status == NOT_FOUND:
            return None
        if answer.status != OK:
            raise _unexpected(path, answer)
        return answer

    def _get_with_token(self, path: str) -> Answer:
        self._token = self._token or self._request_token(REQUEST_TIMEOUT_S)
        return self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _request_token(self, timeout: float) -> str:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_LIFETIME_S)}
        answer = self._request("PUT", self._TOKEN_PATH, lifetime, timeout=timeout)
        if answer.status != OK or not answer.text or not answer.text.isprintable():
            raise _unexpected(self._TOKEN_PATH, answer)
        return answer.text


def read_instance_action(fields: Mapping[str, Any]) -> PreemptionNotice:
    """Return the notice of an EC2 instance action: JSON with `action` and `time`.

    A hibernation begins at once. The deadline is the documented two minutes if the time is missing,
    invalid or later.
    """
    action = str(fields.get("action", "unknown action"))
    if action == "hibernate":
        return PreemptionNotice("spot interruption (hibernate)", 0.0)
    try:
        left_s = min(AWS_NOTICE_S, seconds_until(str(fields["time"])))
    except (KeyError, ValueError):
        left_s = AWS_NOTICE_S
    return PreemptionNotice(f"spot interruption ({action})", left_s)


class GcpSource(MetadataService):
    """Preemption of Spot VMs and maintenance of machines with GPUs, on Google Cloud."""

    name = "GCP"
    poll_interval = 0.1  # the service itself waits for a change

    _PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
    _MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"
    _HEADERS = {"Metadata-Flavor": "Google"}  # noqa: RUF012 - never changed

    def __init__(self, address: tuple[str, int] = ADDRESS) -> None:
        super().__init__(address)
        self._etag = ""  # of the last answer; empty: ask for the value without waiting

    def poll(self) -> PreemptionNotice | None:
        if self._get(self._MAINTENANCE_PATH).text == "TERMINATE_ON_HOST_MAINTENANCE":
            return PreemptionNotice("host maintenance (terminate)", GCP_MAINTENANCE_S)
        answer = self._get(self._PREEMPTED_PATH, self._etag)
        self._etag = answer.headers.get("etag", "")
        if answer.text == "TRUE":
            return PreemptionNotice("spot preemption", GCP_PREEMPTION_S)
        return None

    def _probe(self, timeout: float) -> bool:
        answer = self._request("GET", self._PREEMPTED_PATH, self._HEADERS, timeout=timeout)
        return answer.headers.get("metadata-flavor") == "Google"

    def _get(self, path: str, etag: str = "") -> Answer:
        query, timeout = "", REQUEST_TIMEOUT_S
        if etag:
            query = f"?wait_for_change=true&timeout_sec={GCP_WAIT_S:.0f}&last_etag={etag}"
            timeout += GCP_WAIT_S
        answer = self._request("GET", f"{path}{query}", self._HEADERS, timeout=timeout)
        if answer.status != OK:
            self._etag = ""
            raise _unexpected(path, answer)
        return answer


class AzureSource(MetadataService):
    """Scheduled events of virtual machines on Azure.

    The service shows the events of all machines of a scale set, so that the name of this machine
    is needed to find its own.

    Args:
        address: host and port of the service.
        approve_early: approve the event once the node has left the job, so that Azure need not wait
            until its time. An event of several machines is not approved, because an approval is for
            all of them, and the others may still have to save.
    """

    name = "Azure"
    poll_interval = 1.0

    _EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    _HEADERS = {"Metadata": "true"}  # noqa: RUF012 - never changed

    def __init__(self, address: tuple[str, int] = ADDRESS, *, approve_early: bool = False) -> None:
        super().__init__(address)
        self._approve_early = approve_early
        self._machine = ""  # name of this virtual machine, empty until it is known
        self._event_id = ""  # of the event to approve, empty if there is none

    def poll(self) -> PreemptionNotice | None:
        self._machine = self._machine or self._get(self._NAME_PATH).text
        fields = _read_json(self._EVENTS_PATH, self._get(self._EVENTS_PATH))
        event = find_scheduled_event(fields.get("Events"), self._machine)
        if event is None:
            return None
        is_only_machine = event["Resources"] == [self._machine]
        self._event_id = str(event.get("EventId", "")) if is_only_machine else ""
        return read_scheduled_event(event)

    def on_left(self) -> None:
        if self._approve_early and self._event_id:
            body = json.dumps({"StartRequests": [{"EventId": self._event_id}]}).encode()
            headers = {**self._HEADERS, "Content-Type": "application/json"}
            answer = self._request("POST", self._EVENTS_PATH, headers, body)
            if answer.status != OK:
                raise _unexpected(self._EVENTS_PATH, answer)

    def _probe(self, timeout: float) -> bool:
        answer = self._request("GET", self._NAME_PATH, self._HEADERS, timeout=timeout)
        self._machine = answer.text if answer.status == OK else ""
        return bool(self._machine)

    def _get(self, path: str) -> Answer:
        answer = self._request("GET", path, self._HEADERS, timeout=AZURE_TIMEOUT_S)
        if answer.status != OK:
            raise _unexpected(path, answer)
        return answer


def find_scheduled_event(events: object, machine: str) -> Mapping[str, Any] | None:
    """Return the first event that takes this machine away, or None.

    Args:
        events: the events of an answer; a value of another form has none.
        machine: the name of this virtual machine.
    """
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, dict) or event.get("EventType") not in AZURE_EVENT_TYPES:
            continue
        resources = event.get("Resources")
        if isinstance(resources, list) and machine in resources:
            return event
    return None


def read_scheduled_event(event: Mapping[str, Any]) -> PreemptionNotice:
    """Return the notice of an event.

    The deadline is 0 without a time in `NotBefore`, because the event has started, and None if the
    time is invalid.
    """
    reason = f"scheduled event {event['EventType']}"
    text = str(event.get("NotBefore") or "")
    if not text:
        return PreemptionNotice(reason, 0.0)
    try:
        return PreemptionNotice(reason, seconds_until(text))
    except ValueError:
        return PreemptionNotice(reason)


def find_service(
    address: tuple[str, int] = ADDRESS, timeout: float = FIND_TIMEOUT_S
) -> NoticeSource | None:
    """Ask all services at once, and return the first that answers within the timeout, or None."""
    found: queue.SimpleQueue[MetadataService | None] = queue.SimpleQueue()
    services = [AwsSource(address), GcpSource(address), AzureSource(address)]

    def ask(service: MetadataService) -> None:
        found.put(service if service.answers(timeout) else None)

    for service in services:
        ask_service = partial(ask, service)
        start_thread(daemon_thread(ask_service, "metadata-service", lambda _: found.put(None)))
    return _first_found(found, len(services), timeout)


def _first_found(
    found: queue.SimpleQueue[MetadataService | None], num_services: int, timeout: float
) -> NoticeSource | None:
    deadline = monotonic() + timeout
    for _ in range(num_services):
        try:
            service = found.get(timeout=max(0.0, deadline - monotonic()))
        except queue.Empty:
            return None
        if service is not None:
            return service
    return None
