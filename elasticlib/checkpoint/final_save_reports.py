"""Reports of the agents of a final save, as files of a scratch directory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..clock import monotonic
from ..errors import CheckpointError
from ..untrusted import decompress, read_object
from .boxes import TensorShard, read_shards
from .final_save_plan import AgentReport, count_nodes, decode_report, encode_report
from .storage import CHECKSUM_BYTES, MAX_SMALL_FILE_BYTES, CheckpointStorage

log = logging.getLogger("elasticlib.checkpoint")


class ReportExchange:
    """The reports of the agents of a generation, as files of a scratch directory.

    `publish` may be called by any thread, the other methods by one thread. If there is no other
    agent, nothing is written.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        directory: str,
        agent: str,
        num_agents: int,
        node: int = 0,
    ) -> None:
        self.mine = AgentReport(node=node)  # the report of this agent
        self.num_agents = num_agents
        self._storage, self._directory, self._agent = storage, directory, agent
        self._lock = threading.Lock()  # guards the version
        self._version = 0  # of the last report that was published
        self._seen: dict[str, tuple[int, float]] = {}  # version of each report, and when it changed
        self._reports: dict[str, AgentReport] = {}  # of the other agents
        self._chunks: dict[str, Mapping[str, Sequence[TensorShard]]] = {}  # by agent, then by share
        self._unread: set[str] = set()  # agents whose chunks could not be read, which was logged

    def publish(self, **changes: Any) -> None:
        """Change this agent's report and publish it. Raise OSError if the disk fails."""
        with self._lock:
            self.mine = attrs.evolve(self.mine, **changes)
            if self.num_agents > 1:
                # Each version has a name of its own, because NFS clients cache what they have read.
                # After an error a file may exist, so its name is not used again.
                self._version += 1
                data = memoryview(encode_report(self.mine))
                self._storage.write(self._path(f"{self._agent}.{self._version}"), data)
                self._storage.remove(self._path(f"{self._agent}.{self._version - 1}"))

    def publish_chunks(self, chunks: Mapping[str, Sequence[TensorShard]]) -> None:
        """Publish the tensor shards of this agent's parts. Raise OSError if the disk fails."""
        self._chunks[self._agent] = chunks
        if self.num_agents > 1 and chunks:
            rows = {
                share: [chunk.to_row() for chunk in of_share] for share, of_share in chunks.items()
            }
            data = memoryview(zlib.compress(json.dumps(rows).encode()))
            self._storage.write(self._path(f"{self._agent}.chunks"), data)

    def read(self, lost_s: float = math.inf) -> dict[str, AgentReport]:
        """Read the newest reports, and return them and this agent's report by agent id.

        Args:
            lost_s: a report that its agent has not renewed for so long is returned with
                `can_write=False`, unless that agent has finished.
        """
        now = monotonic()
        for name in self._storage.list_files(self._directory) if self.num_agents > 1 else ():
            agent, _, version = name.partition(".")
            last_version, _ = self._seen.get(agent, (0, now))
            if agent != self._agent and version.isdecimal() and int(version) > last_version:
                report = decode_report(self._read(name) or b"")
                if report is not None:
                    self._seen[agent], self._reports[agent] = (int(version), now), report
        found = {self._agent: self.mine}
        for agent, report in self._reports.items():
            is_lost = now - self._seen[agent][1] > lost_s and not report.is_finished
            if is_lost:
                problem = report.problem or "an agent stopped responding"
                report = attrs.evolve(report, can_write=False, task=None, problem=problem)
            found[agent] = report
        return found

    def load_chunks(self, share: str) -> Sequence[TensorShard] | None:
        """Return the tensor shards of a share that an agent has published, or None if none has."""
        for agent, report in self.read().items():
            if all(offer.share != share for offer in report.offers):
                continue
            if agent not in self._chunks:
                self._read_chunks(agent)
            if share in self._chunks.get(agent, {}):
                return self._chunks[agent][share]
        return None

    def _read_chunks(self, agent: str) -> None:
        """Read the tensor shards that an agent has published. Log once if they are damaged.

        They are read again at the next call, because the agent may still be writing them.
        """
        try:
            if data := self._storage.read(self._path(f"{agent}.chunks")):
                rows = read_object(decompress(data, MAX_SMALL_FILE_BYTES))
                self._chunks[agent] = {s: read_shards({"shards": r}) for s, r in rows.items()}
        except (OSError, ValueError, CheckpointError) as error:
            if agent not in self._unread:
                self._unread.add(agent)
                log.warning(
                    "the list of tensor shards of agent %s is ignored until it can be read: %s; a "
                    "state that lacks parts is not completed by its parts",
                    *(agent, error),
                )

    def finish(self, problem: str, *, is_withdrawn: bool = False) -> None:
        """Publish that this agent has finished. The last agent deletes the scratch directory.

        Nothing is published if no agent has published a report. Errors of the disk are ignored.

        Args:
            problem: why the snapshots were not written, or an empty string.
            is_withdrawn: this report does not count for its node, which may publish another one.
        """
        with contextlib.suppress(OSError):
            if self._version == 0 and len(self.read()) == 1:
                return  # no agent has published a report
            self.publish(
                can_write=False,
                is_finished=True,
                task=None,
                problem=problem,
                is_withdrawn=is_withdrawn,
            )
            reports = self.read().values()
            if count_nodes(reports) >= self.num_agents > 1 and all(r.is_finished for r in reports):
                for name in self._storage.list_files(self._directory):
                    self._storage.remove(self._path(name))
                self._storage.remove_folder(self._directory)

    def _read(self, name: str) -> bytes | None:
        data = self._storage.read(self._path(name))
        return data and data[:-CHECKSUM_BYTES]  # `write` has added a checksum.

    def _path(self, name: str) -> str:
        return f"{self._directory}/{name}"
