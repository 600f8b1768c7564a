"""Command line of elasticrun: valid options set the config, invalid ones are rejected by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from elasticlib import Command, LaunchConfig, Module, RendezvousOptions, Script
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_launch, parse_options
from elasticlib.launch.backends import ETCD_KEYS, EtcdConfig, etcd_of
from elasticlib.launch.command_line import build_parser
from elasticlib.launch.elasticrun import command
from elasticlib.launch.secret import read_secret
from elasticlib.launch.worker_setup import check_local_resources
from elasticlib.stores.file_store import FileStore


def test_each_option_of_several_words_has_a_spelling_with_underscores() -> None:
    options = set(build_parser()._option_string_actions)
    twins = {o for o in options if o.startswith("--") and "-" in o[2:]}
    assert {"--" + twin[2:].replace("-", "_") for twin in twins} <= options


def test_single_node_job_needs_no_options_and_gets_a_unique_run_id(script: str) -> None:
    options, entrypoint = parse_options([script, "--epochs", "3"])
    assert (options.job.min_nodes, options.job.max_nodes, options.rendezvous.is_single_node) == (
        1,
        1,
        True,
    )
    assert options.rendezvous.run_id != parse_options([script])[0].rendezvous.run_id
    assert entrypoint == Script(script, ("--epochs", "3"))


def test_options_after_the_script_are_passed_to_the_script(script: str) -> None:
    options, entrypoint = parse_options(["--nproc_per_node", "2", script, "--nproc-per-node", "9"])
    assert options.workers.count == 2
    assert entrypoint.args == ("--nproc-per-node", "9")


def test_options_of_an_elastic_job_set_the_config(script: str) -> None:
    flags = "--nnodes 1:4 --rdzv-endpoint [::1]:29401 --rdzv-id j --max-restarts 2 --node-rank 3"
    options, _ = parse_options(
        [*flags.split(), "--rdzv-conf", "join_timeout=9,last_call_timeout=0", script]
    )
    assert (options.job.min_nodes, options.job.max_nodes, options.job.max_restarts) == (1, 4, 2)
    assert (
        options.rendezvous.run_id,
        options.rendezvous.endpoint,
        options.rendezvous.node_rank,
    ) == ("j", "[::1]:29401", 3)
    assert (options.rendezvous.timeouts.join_timeout, options.job.last_call_timeout) == (9.0, 0.0)
    assert options.rendezvous.backend == "tcp"


def test_master_options_select_the_static_backend(script: str) -> None:
    options, _ = parse_options(
        ["--nnodes", "2", "--node_rank", "1", "--master_addr", "h", "--master_port", "7", script]
    )
    assert (
        options.rendezvous.backend,
        options.rendezvous.endpoint,
        options.rendezvous.node_rank,
    ) == ("static", "h:7", 1)


def test_module_and_program_options_select_the_entrypoint() -> None:
    assert parse_options(["-m", "pkg.train", "x"])[1] == Module("pkg.train", ("x",))
    assert parse_options(["--no-python", "echo", "x"])[1] == Command("echo", ("x",))


ETCD_V2 = "--rdzv-id j --rdzv-backend etcd-v2 --rdzv-endpoint h"
INVALID = [
    ("--nnodes x SCRIPT", "--nnodes must be N or MIN:MAX, got 'x'"),
    ("--nnodes 3:2 SCRIPT", "1 <= MIN <= MAX, got '3:2'"),
    ("--nnodes 2 SCRIPT", "--rdzv-endpoint must be HOST:PORT in a job with 2 nodes"),
    (
        "--nnodes 1:2 --master-addr h SCRIPT",
        "--nnodes must be a fixed number of nodes for the static backend",
    ),
    (
        "--nnodes 2 --node-rank 2 --master-addr h SCRIPT",
        "--node-rank must be from 0 to 1 in a job of 2 nodes, got 2",
    ),
    ("--rdzv-endpoint h:1 --master-port 2 SCRIPT", "--master-port applies only to the static"),
    ("--rdzv-backend static --rdzv-endpoint h:1 --master-addr g SCRIPT", "disagree: give only one"),
    (
        "--nnodes 2 --master-addr 0.0.0.0 SCRIPT",
        "--master-addr must be reachable from the other nodes",
    ),
    ("--nnodes 2 --master-port 0 SCRIPT", "--master-port must be a fixed free port"),
    ("--node-rank -1 SCRIPT", "--node-rank must be an integer of at least 0, got -1"),
    ("--standalone --nnodes 2 SCRIPT", "single-node job: remove --nnodes 2 or --standalone"),
    ("--standalone --rdzv-endpoint h:1 SCRIPT", "--rdzv-endpoint cannot be used with"),
    ("--standalone --rdzv-backend file SCRIPT", "own tcp store: remove --rdzv-backend file"),
    ("--rdzv-endpoint h:99999 SCRIPT", "HOST:PORT"),
    (
        "--nnodes 2 --rdzv-backend file --rdzv-endpoint folder --rdzv-id= SCRIPT",
        "--rdzv-id must be given and unique, because several jobs",
    ),
    ("--nproc-per-node 0 SCRIPT", "at least 1, got 0"),
    ("--nproc-per-node many SCRIPT", "a registered torch backend, got 'many'"),
    ("--nproc-per-node gpu SCRIPT", "finds no GPU on this machine (found: no accelerator, "),
    ("--max-restarts=-1 SCRIPT", "--max-restarts must be an integer of at least 0, got -1"),
    ("--monitor-interval 0 SCRIPT", "--monitor-interval must be seconds above 0"),
    (
        "--shutdown-timeout=-1 SCRIPT",
        "--shutdown-timeout must be seconds from 0 to 1e+06, got -1.0",
    ),
    (
        "--rdzv-conf close_timeout=1e10 SCRIPT",
        "close_timeout must be seconds above 0 and up to 1e+06, got 1000",
    ),
    ("--nnodes 1:3 SCRIPT", "--rdzv-endpoint must be HOST:PORT in a job with up to 3 nodes"),
    ("--nnodes 1:$(PET_NNODES) SCRIPT", "Kubernetes leaves $(NAME) as it is if the variable"),
    (
        "--rdzv-conf rank=1,colour=a,size=b SCRIPT",
        "--node-rank or the option node_rank; unknown --rdzv-conf key 'colour', 'size'",
    ),
    ("-t 5:3 SCRIPT", "--tee must name local ranks from 0 to 0 (1 per node), got [5]"),
    ("-t 0:1,0:2 SCRIPT", "--tee must be 0, 1, 2 or 3"),
    ("--rdzv-backend file SCRIPT", "--rdzv-endpoint must be given for the file backend, got ''"),
    (
        "--rdzv-backend file --rdzv-endpoint meet SCRIPT",
        "--rdzv-id must be given and unique, because several jobs",
    ),
    ("--rdzv-backend file --rdzv-endpoint m --rdzv-id j --rdzv-conf is_host=1 SCRIPT", "is_host"),
    (
        "--nnodes 2 --rdzv-endpoint localhost:0 SCRIPT",
        "--rdzv-endpoint must have a fixed port (a job of a single node",
    ),
    (
        "--nnodes 2 --rdzv-endpoint 0.0.0.0:1 SCRIPT",
        "--rdzv-endpoint must be reachable from the other nodes",
    ),
    ("-r 7 SCRIPT", "--redirects must be 0, 1, 2 or 3"),
    ("--rdzv-conf nonsense SCRIPT", "k=v,k=v"),
    ("--rdzv-conf read_timeout=1, SCRIPT", "k=v,k=v, got '' in 'read_timeout=1,'"),
    ("--rdzv-conf read_timeout=1,,close_timeout=2 SCRIPT", "k=v,k=v, got ''"),
    ("--rdzv-conf , SCRIPT", "k=v,k=v, got ''"),
    ("--rdzv-conf a=1,a=2 SCRIPT", "each key once"),
    (
        "--rdzv-conf colour=red SCRIPT",
        "unknown --rdzv-conf key 'colour'; valid keys: bad_node_failures",
    ),
    (
        "--rdzv-conf join_timeout=soon SCRIPT",
        "--rdzv-conf join_timeout must be a number, got 'soon'",
    ),
    ("--rdzv-conf keep_alive_max_attempt=1 SCRIPT", "an integer of at least 2"),
    ("--rdzv-conf is_host=maybe SCRIPT", "true or false, got 'maybe'"),
    ("--rdzv-conf heartbeat_timeout=5 SCRIPT", "keep_alive_interval"),
    ("--rdzv-conf store_type=file SCRIPT", "use the backend file for a store"),
    ("--rdzv-id j --rdzv-backend etcd --rdzv-endpoint h:99999 SCRIPT", "HOST:PORT"),
    (
        "--rdzv-id j --rdzv-backend etcd --rdzv-endpoint h --rdzv-conf protocol=ftp SCRIPT",
        "got 'ftp'",
    ),
    (
        "--rdzv-id j --rdzv-backend etcd --rdzv-endpoint h --rdzv-conf cert=c SCRIPT",
        "--rdzv-conf must have cert and key together, got 'c'",
    ),
    (
        "--rdzv-id j --rdzv-backend etcd --rdzv-endpoint h --rdzv-conf user=u SCRIPT",
        "must have user and password_file together",
    ),
    (
        f"{ETCD_V2} --rdzv-conf protocol=http,ca_cert=c SCRIPT",
        "must not have a CA or a client certificate with protocol=http",
    ),
    (
        f"{ETCD_V2} --rdzv-conf cacert=a,ca_cert=b SCRIPT",
        "must have cacert in one spelling, got 'ca_cert'",
    ),
    ("--rdzv-id \udcff SCRIPT", r"--rdzv-id must be text in UTF-8, got '\udcff'"),
    (
        "--nnodes 2 --node-rank 0 --master-addr h:1 SCRIPT",
        "--master-addr must be a name or an address",
    ),
    (
        "--nnodes 2 --rdzv-endpoint h:1 --local-addr 0.0.0.0 SCRIPT",
        "--local-addr must be reachable",
    ),
    ("--nnodes 2 --rdzv-endpoint h:1 --local-addr h:1 SCRIPT", "without a port, got 'h:1'"),
    (
        "--nnodes ² --node-rank 0 --rdzv-endpoint a:1 SCRIPT",
        "--nnodes must be N or MIN:MAX, got '²'",
    ),
    (f"--rdzv-conf keep_alive_max_attempt={'9' * 5000} SCRIPT", "an integer of at least 2"),
    (f"--observe-port {'9' * 5000} SCRIPT", "a port up to 65535"),
    ("-m --no-python x", "-m and --no-python are mutually exclusive"),
    ("-m --run-path x", "-m and --run-path are mutually exclusive"),
    ("no-such-script.py", "script 'no-such-script.py' not found in "),
    ("-", "cannot be standard input or another open file descriptor, got '-': save the script"),
    ("/dev/fd/63", "or another open file descriptor, got '/dev/fd/63': save the script"),
    (
        "/dev/null",
        "a script must be a regular file or a directory with a __main__.py, got '/dev/null'",
    ),
]


@pytest.mark.parametrize(("line", "message"), INVALID)
def test_invalid_command_line_is_rejected_with_a_message(
    line: str, message: str, script: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options([script if argument == "SCRIPT" else argument for argument in line.split()])
    assert message in str(error.value)


def test_missing_script_suggests_the_name_with_its_suffix(script: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {script}"):
        parse_options([script.removesuffix(".py")])


TWO_NODES = "--nnodes 2 --rdzv-endpoint"
STATIC = "--nnodes 2 --rdzv-backend static --node-rank 0 --rdzv-endpoint"
INVALID_FAULT_TOLERANCE = [
    ("--store-grace=-1", "--store-grace must be seconds from 0 to 1e+06, got -1.0"),
    (f"{TWO_NODES} h:1 --spares=-1", "--spares must be an integer of at least 0, got -1"),
    (
        "--spares 1",
        "--spares requires an elastic job of several nodes, and this job has a single node, got 1",
    ),
    (
        "--standalone --topology r",
        "--topology requires an elastic job of several nodes, and this job has a single node",
    ),
    (f"{STATIC} h:1 --spares 1", "static ranks are fixed, got 1"),
    (f"{STATIC} h:1,g:1", "--rdzv-endpoint must be a single one for static ranks, got 'h:1,g:1'"),
    (f"{TWO_NODES} h:1,g:1,h:1", "--rdzv-endpoint must name each endpoint once, got 'h:1,g:1,h:1'"),
    (
        f"{TWO_NODES} h:1,g:0",
        "--rdzv-endpoint must have a fixed port (a job of a single node needs no",
    ),
    (f"{TWO_NODES} h:1,0.0.0.0:1", "--rdzv-endpoint must be reachable from the other nodes"),
    (
        f"{TWO_NODES} h:1,g:1 --rdzv-conf is_host=true",
        "--rdzv-conf is_host requires a single endpoint, got True",
    ),
    (
        f"{TWO_NODES} h:1 --rdzv-conf quorum=any",
        "--rdzv-conf quorum requires a TCP store with several endpoints, got False",
    ),
    (
        f"{TWO_NODES} h:1,g:1 --rdzv-conf quorum=maybe",
        "quorum must be majority or any, got 'maybe'",
    ),
    (
        "--standalone --rdzv-conf quorum=any",
        "--rdzv-conf quorum requires a TCP store with several endpoints, got False",
    ),
    (
        "--rdzv-backend file --rdzv-endpoint m --rdzv-id j --rdzv-conf quorum=any",
        "--rdzv-conf quorum requires a TCP store with several endpoints, got False",
    ),
    (f"{TWO_NODES} h:1 --rdzv-id {'x' * 257}", "--rdzv-id must have 1 to 256 bytes"),
]


@pytest.mark.parametrize(("line", "message"), INVALID_FAULT_TOLERANCE)
def test_invalid_fault_tolerance_option_exits_with_code_2_and_one_line(
    line: str, message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # If the option were accepted, the launch would fail after this timeout.
    join_timeout = ("--rdzv-conf", "join_timeout=0.5")
    assert command([*line.split(), *join_timeout, script]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("elasticrun: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [(["--nnodes", "3:1", __file__], "ConfigError: --nnodes must be"), ([7], "TypeError: ")],
)
def test_error_of_the_launcher_is_written_to_its_error_file(
    argv: list[Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    inode = path.stat().st_ino
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with contextlib.suppress(TypeError):
        assert command(argv) == 2
    record = json.loads(path.read_text())["message"]
    assert record["message"].startswith(expected)
    assert expected.startswith("Config") or "Traceback" in record["extraInfo"]["py_callstack"]
    # The launcher overwrites the file instead of replacing it, because it may be a mount point.
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("line", ["--store-grace soon", "--spares some", "--spares 1.5"])
def test_value_that_is_no_number_exits_with_code_2_and_names_the_option(
    line: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([*line.split(), script]) == 2
    flag, text = line.split()
    assert f"elasticrun: error: {flag} must be a" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"got '{text}'"):
        parse_options([*line.split(), script])


def test_key_given_twice_is_rejected_despite_spaces(script: str) -> None:
    with pytest.raises(ConfigError, match="each key once"):
        parse_options(["--rdzv-endpoint", "h:1", "--rdzv-conf", "quorum=any, quorum =any", script])


def test_single_node_may_use_the_wildcard_address(script: str) -> None:
    flags = ["--nnodes", "1", "--node-rank", "0", "--master-port", "7", "--master-addr"]
    endpoints = {
        host: parse_options([*flags, host, script])[0].rendezvous.endpoint for host in ("0", "0::0")
    }
    assert endpoints == {"0": "127.0.0.1:7", "0::0": "[::1]:7"}
    assert parse_options(["--standalone", "--local-addr", "0.0.0.0", script])[
        0
    ].rendezvous.is_single_node


def test_fault_tolerance_options_set_the_config(script: str) -> None:
    flags = "--nnodes 1:4 --spares 2 --topology rack7 --store-grace 9 --rdzv-endpoint h,g:7"
    options, _ = parse_options([*flags.split(), "--rdzv-conf", "is_host=false", script])
    assert (options.job.spares, options.job.quorum) == (2, True)
    assert (options.rendezvous.topology, options.rendezvous.timeouts.store_grace) == ("rack7", 9.0)
    assert (options.rendezvous.endpoints, options.rendezvous.is_host) == (("h", "g:7"), False)


@pytest.mark.parametrize(
    ("endpoint", "conf", "is_required"),
    [
        ("h:1", "", False),
        ("h:1,g:1", "", True),
        ("h:1,g:1", "quorum=majority", True),
        ("h:1,g:1", "quorum=any", False),
    ],
)
def test_quorum_is_required_only_if_there_are_several_endpoints(
    endpoint: str, conf: str, is_required: bool, script: str
) -> None:
    options, _ = parse_options(
        ["--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", conf, script]
    )
    assert bool(options.job.quorum) is is_required


def test_an_unknown_backend_is_rejected() -> None:
    rule = "backend must be one of tcp, .*etcd-v2, or package.module:function .*, got 'zk'"
    with pytest.raises(ConfigError, match=rule):
        RendezvousOptions(backend="zk")


def test_etcd_options_are_accepted_in_all_spellings_of_torch(script: str) -> None:
    old = "protocol=https,ssl_cert=c,ssl_cert_key=k,ca_cert=a,etcd_prefix=/p"
    new = "cert=c,key=k,cacert=a,etcd_prefix=/p"
    for backend, conf in (("etcd-v2", old), ("etcd", new)):
        flags = ["--rdzv-backend", backend, "--rdzv-id", "j", "--rdzv-conf", conf]
        options, _ = parse_options([*flags, "--rdzv-endpoint", "h,[::1]:7", script])
        etcd = etcd_of(options.rendezvous)
        assert etcd is not None
        assert [attrs.astuple(m) for m in etcd.members] == [
            ("https", "h", 2379),
            ("https", "::1", 7),
        ]
        assert (etcd.cacert, etcd.cert, etcd.key, etcd.prefix) == ("a", "c", "k", "/p")


@pytest.mark.parametrize("key", sorted(ETCD_KEYS))
@pytest.mark.parametrize("backend", ["tcp", "file", "static"])
def test_etcd_key_is_rejected_with_another_backend(backend: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"conf must have keys of the {backend} backend only"):
        RendezvousOptions(
            run_id="job", backend=backend, endpoint="h:1", node_rank=0, conf={key: "x"}
        )


def test_missing_etcd_password_file_is_named(tmp_path: Path) -> None:
    etcd = EtcdConfig("h", user="u", password_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"password_file must be a file that can be read .*none"):
        etcd.open(1.0)


def test_join_timeout_takes_precedence_over_timeout(script: str) -> None:
    line = ["--rdzv-conf", "timeout=900,join_timeout=600", script]
    request = parse_launch(line, {})
    assert request.options.rendezvous.timeouts.join_timeout == 600
    (warning,) = request.warnings
    assert warning == "ignoring --rdzv-conf timeout=900: join_timeout=600 takes precedence"


def test_rdzv_config_values_may_be_numbers_or_text() -> None:
    conf = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": "4"}
    timeouts = LaunchConfig(rdzv_configs=conf).options().rendezvous.timeouts
    assert (timeouts.keep_alive_interval, timeouts.lease_ttl) == (0.5, 2.0)
    slow = LaunchConfig(rdzv_configs={"keep_alive_interval": 2}).options().rendezvous.timeouts
    assert slow.lease_ttl == 10.0


def test_workers_start_from_a_fork_server_by_default() -> None:
    options, _ = parse_options(["--preload", "json,os.path", __file__])
    assert (options.workers.start_method, options.workers.preload) == (
        "forkserver",
        ("json", "os.path"),
    )
    assert parse_options(["--start_method=spawn", __file__])[0].workers.start_method == "spawn"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--start-method=threads",), "--start-method must be one of forkserver, spawn, fork, got"),
        (
            ("--start-method=spawn", "--preload=json"),
            "--preload requires the start method forkserver",
        ),
        (
            ("--preload=a b",),
            "--preload must be a tuple of names of modules, as in a,b.c, got",
        ),
        (("--no-python", "--start-method=forkserver"), "requires Python: remove --no-python"),
        (("--no-python", "--start-method=fork"), "--start-method fork requires Python"),
    ],
)
def test_invalid_start_method_is_rejected(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options([*flags, __file__])


@pytest.mark.parametrize("text", ["1", "true", "T", "yes", "Y", "0", "False", "f", "NO", "n"])
def test_is_host_and_empty_pairs_are_read_as_torch_reads_them(text: str, script: str) -> None:
    flags = [*TWO_NODES.split(), "h:1", "--rdzv-conf"]
    options, _ = parse_options([*flags, f" is_host = {text} ", "--rdzv-conf", " ", script])
    conf = _parse_rendezvous_config(f" is_host = {text} ")
    expected = RendezvousParameters("c10d", "h:1", "j", 1, 2, **conf).get_as_bool("is_host")
    assert options.rendezvous.is_host is expected


def test_home_directory_is_expanded_in_paths(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "secret").write_text("a secret of sufficient length")
    flags = ["--log-dir=~/logs", "--preemption-notice=file:~/notice", script]
    options, script_path = parse_options(flags)
    check_local_resources(options, script_path, {})
    assert (tmp_path / "logs").is_dir()
    assert read_secret({}, "~/secret", "--secret-file") == b"a secret of sufficient length"
    with FileStore("~/store") as store:
        store.set("key", b"value")
    assert (tmp_path / "store").is_dir()
