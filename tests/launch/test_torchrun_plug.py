"""Our backends as stock torchrun sees them: what it may ask of them, and what they say to it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from distributions import install
from jobs import Job, until
from pages import blocks_of
from ports import free_port
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.run import config_from_args, parse_args
from torchruns import need_our_entry_points, torchrun

from elasticlib import TcpStore
from elasticlib.compat import TORCH_C10D
from elasticlib.compat.torchrun import (
    GenerationEnded,
    TorchrunHandler,
    open_for_torchrun,
    read_params,
)
from elasticlib.errors import ConfigError, StoreRefused
from elasticlib.launch.arguments import parse
from elasticlib.launch.backend_names import BACKENDS, OUR_BACKENDS, is_torchs
from elasticlib.launch.config import LaunchConfig
from elasticlib.launch.rendezvous_setup import open_meeting

QUICK = {
    "keep_alive_interval": "0.1",
    "last_call_timeout": "0",
    "close_timeout": "5",
    "launch": "1",
}
BOUND = 20.0
Make = Callable[..., TorchrunHandler]


def params(endpoint: object = "127.0.0.1:29400", backend: str = "el-tcp", **given: Any) -> Any:
    nodes = given.pop("nodes", (1, 1))
    run_id = given.pop("run_id", "job")
    # As torchrun's own LaunchConfig leaves it.
    conf = {"timeout": 900, **given}
    return RendezvousParameters(backend, str(endpoint), run_id, *nodes, "127.0.0.1", **conf)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes nodes of one job; they leave at the end of the test."""
    made: list[TorchrunHandler] = []

    def make(**given: Any) -> TorchrunHandler:
        asked = params(tmp_path / "meeting", "el-file", **{"nodes": (1, 2), **QUICK, **given})
        handler = open_for_torchrun("file", asked)
        assert isinstance(handler, TorchrunHandler)
        made.append(handler)
        return handler

    yield make
    for handler in made:
        handler.shutdown()


class Joining:
    """A node's next rendezvous, beside the test."""

    def __init__(self, handler: TorchrunHandler) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=self._join, args=(handler,), daemon=True)
        self._thread.start()

    def _join(self, handler: TorchrunHandler) -> None:
        try:
            self._found.append(handler.next_rendezvous())
        except Exception as error:
            self._found.append(error)

    def result(self) -> Any:
        self._thread.join(BOUND)
        (found,) = self._found
        return found


def restarted(handler: TorchrunHandler) -> None:
    """Waits until torch's agent would restart its workers."""
    assert handler._handler.wait_for_change(BOUND) is not None
    assert handler.num_nodes_waiting() > 0


def pair(make: Make) -> tuple[tuple[TorchrunHandler, Any], tuple[TorchrunHandler, Any]]:
    """Two nodes that have met, the one of rank 0 first."""
    handlers = [make(nodes=(2, 2)), make(nodes=(2, 2))]
    joining = [Joining(handler) for handler in handlers]
    found = [(h, j.result()) for h, j in zip(handlers, joining, strict=True)]
    first, second = sorted(found, key=lambda item: int(item[1].rank))
    return first, second


def test_torch_is_told_what_it_asks_a_handler_for(make: Make) -> None:
    handler = make()
    info = handler.next_rendezvous()
    assert (handler.get_backend(), handler.get_run_id()) == ("el-file", "job")
    assert (info.rank, info.world_size, handler.use_agent_store) == (0, 1, True)
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    assert not handler.is_closed()
    assert handler.num_nodes_waiting() == 0


def test_who_comes_and_who_goes_both_make_workers_start_anew_in_a_store_without_old_keys(
    make: Make,
) -> None:
    first, second = make(), make()
    alone = first.next_rendezvous()
    alone.store.set("key", "of the first")
    joining = Joining(second)
    restarted(first)
    together, other = first.next_rendezvous(), joining.result()
    assert {together.rank, other.rank} == {0, 1}
    assert together.world_size == other.world_size == 2
    assert not together.store.check(["key"])
    together.store.set("key", "of the second")
    assert other.store.get("key") == b"of the second"
    second._leave()
    restarted(first)
    again = first.next_rendezvous()
    assert (again.rank, again.world_size) == (0, 1)
    assert not again.store.check(["key"])


def test_an_agent_is_answered_when_the_node_that_it_waits_for_is_gone(make: Make) -> None:
    (first, info), (second, _) = pair(make)
    info.store.set("torchelastic/role_info/0", b'{"local_world_size": 2}')
    second._leave()
    keys = ["torchelastic/role_info/0", "torchelastic/role_info/1"]
    assert info.store.multi_get(keys) == [b'{"local_world_size": 2}'] * 2
    with pytest.raises(GenerationEnded, match="left"):
        info.store.wait(["torchelastic/agent/terminal_state/last_member"])
    assert first.num_nodes_waiting() > 0


def test_an_agent_is_answered_when_the_node_that_serves_the_store_is_gone(make: Make) -> None:
    (first, _), (second, info) = pair(make)
    info.store.set("torchelastic/role_info/1", b'{"local_world_size": 2}')
    first._leave()
    assert info.store.get("torchelastic/assigned_ranks/1") == b"[2, 6, 2, 6]"
    info.store.set("torchelastic/role_info/1", b"again")
    with pytest.raises(GenerationEnded):
        info.store.get("key")
    assert second.num_nodes_waiting() > 0


def test_a_job_that_is_closed_is_over_for_torchs_agents_in_torchs_words(make: Make) -> None:
    (first, _), (second, _) = pair(make)
    first.set_closed()
    assert second._handler.wait_for_change(BOUND) is not None
    with pytest.raises(RendezvousClosedError, match="closed"):
        second.num_nodes_waiting()
    with pytest.raises(RendezvousClosedError, match="closed"):
        second.next_rendezvous()
    assert second.is_closed()


def test_who_waits_for_too_long_is_told_in_torchs_words(make: Make) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"0\.3 s"):
        make(nodes=(2, 2), join_timeout="0.3").next_rendezvous()


def test_nodes_with_the_secret_meet_and_no_other_gets_in_nor_one_of_elasticrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    asked = params(f"127.0.0.1:{port}", nodes=(2, 2), join_timeout="9", **QUICK)
    monkeypatch.setenv("ELASTICLIB_SECRET", "the secret of the job")
    handlers = [open_for_torchrun("tcp", asked) for _ in range(2)]
    joining = [Joining(handler) for handler in handlers]
    assert sorted(j.result().rank for j in joining) == [0, 1]
    with (
        TcpStore("127.0.0.1", port, job="job", secret=b"the secret of the job") as elasticruns,
        pytest.raises(StoreRefused, match="job@torchrun"),
    ):
        elasticruns.get("key")
    monkeypatch.delenv("ELASTICLIB_SECRET")
    stranger = open_for_torchrun("tcp", asked)
    with pytest.raises(RendezvousConnectionError, match="secret"):
        stranger.next_rendezvous()
    for handler in (stranger, handlers[1], handlers[0]):
        handler._leave()


def test_nodes_that_end_well_end_the_job_well_and_a_long_wait_for_others_is_said(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    (first, _), (second, _) = pair(make)
    leaving = threading.Thread(target=first.shutdown, daemon=True)
    leaving.start()
    until("the wait to be said", lambda: "the other nodes are waited for" in caplog.text, BOUND)
    assert second.shutdown()
    leaving.join(BOUND)
    assert not leaving.is_alive()
    with pytest.raises(RendezvousClosedError, match="no workers ran on this node"):
        make(nodes=(2, 2)).next_rendezvous()


def test_the_join_timeout_is_torchruns_own_unless_another_is_given() -> None:
    assert read_params("tcp", params(), {}).options.join_timeout == 900.0
    assert read_params("tcp", params(join_timeout="7"), {}).options.join_timeout == 7.0
    assert read_params("tcp", params(timeout="8"), {}).options.join_timeout == 8.0
    both = params(join_timeout="7", timeout="8")
    assert read_params("tcp", both, {}).options.join_timeout == 7.0


def test_torchs_older_server_is_what_use_libuv_asks_for() -> None:
    for said, asked in (({}, True), ({"USE_LIBUV": "1"}, True), ({"USE_LIBUV": "0"}, False)):
        assert read_params("tcp", params(), said).torchrun.use_libuv is asked


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"colour": "red"}, "el-tcp: --rdzv-conf has no key 'colour'"),
    ({"store_type": "file"}, "store_type cannot be set"),
    ({"nodes": (1, 2), "endpoint": ""}, "a job of up to 2 nodes needs"),
    ({"run_id": "none", "backend": "el-file"}, "name each job with its own --rdzv-id"),
    ({"cacert": "x"}, "cacert belongs to --rdzv-backend etcd"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[s for _, s in REFUSED])
def test_what_cannot_work_is_refused_by_name(given: dict[str, Any], sentence: str) -> None:
    asked = params(**given)
    with pytest.raises(ConfigError, match=sentence):
        open_for_torchrun(asked.backend.removeprefix("el-"), asked)


def test_torchruns_start_imports_nothing_of_ours_but_names() -> None:
    code = (
        "import sys, elasticlib.compat.torchrun_handlers as h; h.el_tcp(); h.el_file(); "
        "h.el_etcd(); sys.exit('attrs' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


@pytest.mark.faults
def test_stock_torchrun_finds_our_backends_and_two_nodes_of_it_meet_in_a_folder(
    job: Job, tmp_path: Path
) -> None:
    need_our_entry_points()
    place = ("--rdzv-endpoint", str(tmp_path / "meeting"), "--rdzv-id", "job", "--nnodes", "2")
    flags = ("--rdzv-backend", "el-file", *place, "--no-python")
    script = f'echo "$WORLD_SIZE $TORCHELASTIC_RUN_ID" > {tmp_path}/rank."$RANK"'
    nodes = [torchrun(job, name, *flags, worker=("sh", "-c", script)) for name in "ab"]
    assert [node.exit_code() for node in nodes] == [0, 0], "".join(n.text for n in nodes)
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in "01"] == ["2 job\n"] * 2


# torch's handlers under elasticrun.


def torchs(**given: Any) -> LaunchConfig:
    place = {"rdzv_backend": TORCH_C10D, "rdzv_endpoint": "127.0.0.1:29400", "run_id": "job"}
    return LaunchConfig(**{"max_nodes": 2, **place, **given})


BESIDE_TORCHS: list[tuple[dict[str, Any], str]] = [
    ({"topology": "rack"}, "topology: torch-c10d, a handler of torch's kind, cannot"),
    ({"spares": 0}, "spares"),
    ({"node_rank": 1}, "node_rank"),
    ({"store_grace": 5.0}, "store_grace"),
    ({"rdzv_endpoint": ""}, "torch-c10d needs an rdzv_endpoint"),
    ({"rdzv_configs": {"timeout": "5"}}, "timeout: torch's c10d handler would ignore that"),
]


@pytest.mark.parametrize(("given", "sentence"), BESIDE_TORCHS, ids=[s for _, s in BESIDE_TORCHS])
def test_what_torchs_handlers_cannot_do_is_refused_beside_them(
    given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        torchs(**given)


def test_restarts_that_only_our_rendezvous_can_hold_back_are_refused_beside_torchs() -> None:
    supervision = attrs.evolve(torchs().supervision, restart_window=5.0)
    with pytest.raises(ConfigError, match="restart_window"):
        torchs(supervision=supervision)


def test_who_changes_from_torchrun_to_elasticrun_may_leave_the_backends_name() -> None:
    assert LaunchConfig(rdzv_backend="el-tcp").rdzv_backend == "tcp"
    assert torchs(rdzv_backend="el-etcd").rdzv_backend == "etcd"


def test_a_name_registered_for_torchrun_is_taken_where_nobody_registered_it_with_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"mycorp": "no_such_module:get", "both": "no_such_module:get", "tcp": "no:get"}
    folder = install(tmp_path / "site", "corp", "", "torchrun.handlers", **points)
    install(folder, "other", "", both="no_such_module:open")
    monkeypatch.syspath_prepend(folder)
    assert [is_torchs(name) for name in ("mycorp", "both", "tcp")] == [True, False, False]
    assert [name for name in BACKENDS if name not in OUR_BACKENDS][-3:] == [
        "both",
        "torch-c10d",
        "mycorp",
    ]
    assert torchs(rdzv_backend="mycorp", rdzv_endpoint="", rdzv_configs={"any": 1}).of_torch
    config = torchs(rdzv_backend="mycorp", rdzv_configs={"join_timeout": "soon"})
    assert config.foreign_options == {"join_timeout": "soon"}
    with pytest.raises(ConfigError, match=r"mycorp = no_such_module:get \(corp\) failed: ValueErr"):
        open_meeting(config)


# The page.

TEXT, BLOCKS = blocks_of("plugs.md")
COMMANDS = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("torchrun")])
def test_the_pages_torchrun_commands_say_what_they_seem_to(line: str) -> None:
    config, _, _ = config_from_args(parse_args(shlex.split(line)[1:]))
    asked = RendezvousParameters(
        config.rdzv_backend,
        config.rdzv_endpoint,
        config.run_id,
        config.min_nodes,
        config.max_nodes,
        config.local_addr,
        **config.rdzv_configs,
    )
    read = read_params(config.rdzv_backend.removeprefix("el-"), asked, {})
    assert (read.min_nodes, read.max_nodes, read.run_id) == (1, 4, "job7")


def test_the_pages_elasticrun_commands_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    lines = [c for c in COMMANDS if c.startswith("elasticrun")]
    assert len(lines) == 2
    (own,) = [line for line in lines if "mycorp" not in line]
    config, _ = parse(shlex.split(own)[1:])
    assert config.of_torch


def test_the_page_names_every_flag_that_is_refused() -> None:
    named = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert named >= {"--topology", "--spares", "--node-rank", "--store-grace", "--restart-window"}
    assert named >= {"--restart-window", "--snapshot-replicas"}


def test_our_handlers_are_in_torchs_registry_where_elasticlib_is_installed(tmp_path: Path) -> None:
    need_our_entry_points()
    handler = get_rendezvous_handler(params(tmp_path, "el-file", **QUICK))
    assert isinstance(handler, TorchrunHandler)
    handler.shutdown()
