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

from elasticlib import Command, Module, Script
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse, parse_launch
from elasticlib.launch.backends import ETCD_KEYS, EtcdConfig
from elasticlib.launch.command_line import build_parser
from elasticlib.launch.elasticrun import command
from elasticlib.launch.endpoints import read_secret
from elasticlib.launch.launch_config import LaunchConfig
from elasticlib.stores.file_store import FileStore


def test_each_option_of_several_words_has_a_spelling_with_underscores() -> None:
    options = set(build_parser()._option_string_actions)
    twins = {o for o in options if o.startswith("--") and "-" in o[2:]}
    assert {"--" + twin[2:].replace("-", "_") for twin in twins} <= options


def test_single_node_job_needs_no_options_and_gets_a_unique_run_id(script: str) -> None:
    config, entrypoint = parse([script, "--epochs", "3"])
    assert (config.min_nodes, config.max_nodes, config.is_single_node) == (1, 1, True)
    assert config.run_id != parse([script])[0].run_id
    assert entrypoint == Script(script, ("--epochs", "3"))


def test_options_after_the_script_are_passed_to_the_script(script: str) -> None:
    config, entrypoint = parse(["--nproc_per_node", "2", script, "--nproc-per-node", "9"])
    assert config.nproc_per_node == 2
    assert entrypoint.args == ("--nproc-per-node", "9")


def test_options_of_an_elastic_job_set_the_config(script: str) -> None:
    flags = "--nnodes 1:4 --rdzv-endpoint [::1]:29401 --rdzv-id j --max-restarts 2 --node-rank 3"
    config, _ = parse([*flags.split(), "--rdzv-conf", "join_timeout=9,last_call_timeout=0", script])
    assert (config.min_nodes, config.max_nodes, config.max_restarts) == (1, 4, 2)
    assert (config.run_id, config.rdzv_endpoint, config.node_rank) == ("j", "[::1]:29401", 3)
    assert (config.options.join_timeout, config.rendezvous_settings.last_call_timeout) == (9.0, 0.0)
    assert config.rdzv_backend == "tcp"


def test_master_options_select_the_static_backend(script: str) -> None:
    config, _ = parse(
        ["--nnodes", "2", "--node_rank", "1", "--master_addr", "h", "--master_port", "7", script]
    )
    assert (config.rdzv_backend, config.rdzv_endpoint, config.node_rank) == ("static", "h:7", 1)


def test_module_and_program_options_select_the_entrypoint() -> None:
    assert parse(["-m", "pkg.train", "x"])[1] == Module("pkg.train", ("x",))
    assert parse(["--no-python", "echo", "x"])[1] == Command("echo", ("x",))


INVALID = [
    ("--nnodes x SCRIPT", "--nnodes must be N or MIN:MAX, got 'x'"),
    ("--nnodes 3:2 SCRIPT", "1 <= MIN <= MAX, got '3:2'"),
    ("--nnodes 2 SCRIPT", "a job with 2 nodes requires --rdzv-endpoint"),
    ("--nnodes 1:2 --master-addr h SCRIPT", "fixed number of nodes, got 1:2"),
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
    ("--node-rank -1 SCRIPT", "--node-rank must be from 0 to 0 in a job of 1 nodes, got -1"),
    ("--standalone --nnodes 2 SCRIPT", "single-node job: remove --nnodes 2 or --standalone"),
    ("--standalone --rdzv-endpoint h:1 SCRIPT", "--rdzv-endpoint cannot be used with"),
    ("--standalone --rdzv-backend file SCRIPT", "own tcp store: remove --rdzv-backend file"),
    ("--rdzv-endpoint h:99999 SCRIPT", "HOST:PORT"),
    (
        "--nnodes 2 --rdzv-backend file --rdzv-endpoint folder --rdzv-id= SCRIPT",
        "give each job a unique --rdzv-id",
    ),
    ("--nproc-per-node 0 SCRIPT", "at least 1, got 0"),
    ("--nproc-per-node many SCRIPT", "a registered torch backend, got 'many'"),
    ("--nproc-per-node gpu SCRIPT", "finds no GPU on this machine (found: no accelerator, "),
    ("--max-restarts=-1 SCRIPT", "max_restarts must be at least 0, got -1"),
    ("--monitor-interval 0 SCRIPT", "--monitor-interval must be seconds above 0"),
    (
        "--shutdown-timeout=-1 SCRIPT",
        "--shutdown-timeout must be seconds from 0 to 1e+06, got -1.0",
    ),
    ("--rdzv-conf close_timeout=1e10 SCRIPT", "up to 1e+06, got '1e10'"),
    ("--nnodes 1:3 SCRIPT", "a job with up to 3 nodes requires --rdzv-endpoint HOST:PORT"),
    ("--nnodes 1:$(PET_NNODES) SCRIPT", "Kubernetes leaves $(NAME) as it is if the variable"),
    (
        "--rdzv-conf rank=1,colour=a,size=b SCRIPT",
        "--node-rank; unknown --rdzv-conf key 'colour', 'size'",
    ),
    ("-t 5:3 SCRIPT", "--tee: local rank 5 does not exist (1 worker per node)"),
    ("-t 0:1,0:2 SCRIPT", "--tee must be 0, 1, 2 or 3"),
    ("--rdzv-backend file SCRIPT", "--rdzv-backend file requires --rdzv-endpoint"),
    (
        "--rdzv-backend file --rdzv-endpoint meet SCRIPT",
        "give each job a unique --rdzv-id",
    ),
    ("--rdzv-backend file --rdzv-endpoint m --rdzv-id j --rdzv-conf is_host=1 SCRIPT", "is_host"),
    (
        "--nnodes 2 --rdzv-endpoint localhost:0 SCRIPT",
        "--rdzv-endpoint must have a fixed port, got 'localhost:0'",
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
    ("--rdzv-conf join_timeout=soon SCRIPT", "number of seconds up to 1e+06, got 'soon'"),
    ("--rdzv-conf keep_alive_max_attempt=1 SCRIPT", "an integer of at least 2"),
    ("--rdzv-conf is_host=maybe SCRIPT", "true or false, got 'maybe'"),
    ("--rdzv-conf heartbeat_timeout=5 SCRIPT", "keep_alive_interval"),
    ("--rdzv-conf store_type=file SCRIPT", "use --rdzv-backend file"),
    ("--rdzv-backend etcd --rdzv-endpoint h:99999 SCRIPT", "HOST:PORT"),
    ("--rdzv-backend etcd --rdzv-endpoint h --rdzv-conf protocol=ftp SCRIPT", "got 'ftp'"),
    (
        "--rdzv-backend etcd --rdzv-endpoint h --rdzv-conf cert=c SCRIPT",
        "cert and key must be given together",
    ),
    ("--rdzv-backend etcd --rdzv-endpoint h --rdzv-conf user=u SCRIPT", "user and password_file"),
    (
        "--rdzv-backend etcd-v2 --rdzv-endpoint h --rdzv-conf protocol=http,ca_cert=c SCRIPT",
        "protocol=http cannot be used",
    ),
    (
        "--rdzv-backend etcd-v2 --rdzv-endpoint h --rdzv-conf cacert=a,ca_cert=b SCRIPT",
        "ca_cert in two spellings",
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
        parse([script if argument == "SCRIPT" else argument for argument in line.split()])
    assert message in str(error.value)


def test_missing_script_suggests_the_name_with_its_suffix(script: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {script}"):
        parse([script.removesuffix(".py")])


TWO_NODES = "--nnodes 2 --rdzv-endpoint"
STATIC = "--nnodes 2 --rdzv-backend static --node-rank 0 --rdzv-endpoint"
INVALID_FAULT_TOLERANCE = [
    ("--store-grace 0", "--store-grace must be seconds above 0 and up to 1e+06, got 0.0"),
    (f"{TWO_NODES} h:1 --spares=-1", "spares must be at least 0, got -1"),
    (
        "--spares 1",
        "--spares requires an elastic multi-node job; this job has a single node, got 1",
    ),
    (
        "--standalone --topology r",
        "--topology requires an elastic multi-node job; this job has a single node, got 'r'",
    ),
    (f"{STATIC} h:1 --spares 1", "static ranks are fixed, got 1"),
    (f"{STATIC} h:1,g:1", "the static backend requires a single --rdzv-endpoint, got a list"),
    (f"{TWO_NODES} h:1,g:1,h:1", "--rdzv-endpoint names one endpoint twice: h:1,g:1,h:1"),
    (f"{TWO_NODES} h:1,g:0", "--rdzv-endpoint must have a fixed port, got 'g:0'"),
    (f"{TWO_NODES} h:1,0.0.0.0:1", "--rdzv-endpoint must be reachable from the other nodes"),
    (
        f"{TWO_NODES} h:1,g:1 --rdzv-conf is_host=true",
        "is_host=true requires a single endpoint, got several",
    ),
    (
        f"{TWO_NODES} h:1 --rdzv-conf quorum=any",
        "--rdzv-conf quorum requires several endpoints, got one",
    ),
    (
        f"{TWO_NODES} h:1,g:1 --rdzv-conf quorum=maybe",
        "quorum must be majority or any, got 'maybe'",
    ),
    (
        "--standalone --rdzv-conf quorum=any",
        "quorum applies only to the TCP store and requires --rdzv-endpoint",
    ),
    (
        "--rdzv-backend file --rdzv-endpoint m --rdzv-id j --rdzv-conf quorum=any",
        "quorum applies only to the TCP store and requires --rdzv-endpoint",
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
    with pytest.raises(SystemExit) as exit_info:
        command([*line.split(), script])
    assert exit_info.value.code == 2
    assert f"argument {line.split()[0]}" in capsys.readouterr().err


def test_key_given_twice_is_rejected_despite_spaces(script: str) -> None:
    with pytest.raises(ConfigError, match="each key once"):
        parse(["--rdzv-endpoint", "h:1", "--rdzv-conf", "quorum=any, quorum =any", script])


def test_single_node_may_use_the_wildcard_address(script: str) -> None:
    flags = ["--nnodes", "1", "--node-rank", "0", "--master-port", "7", "--master-addr"]
    endpoints = {host: parse([*flags, host, script])[0].rdzv_endpoint for host in ("0", "0::0")}
    assert endpoints == {"0": "127.0.0.1:7", "0::0": "[::1]:7"}
    assert parse(["--standalone", "--local-addr", "0.0.0.0", script])[0].is_single_node


def test_fault_tolerance_options_set_the_config(script: str) -> None:
    flags = "--nnodes 1:4 --spares 2 --topology rack7 --store-grace 9 --rdzv-endpoint h,g:7"
    config, _ = parse([*flags.split(), "--rdzv-conf", "is_host=false", script])
    assert (config.rendezvous_settings.spares, config.rendezvous_settings.quorum) == (2, True)
    assert (config.topology, config.rendezvous_timeouts.store_grace) == ("rack7", 9.0)
    assert (config.endpoints, config.options.is_host) == (("h", "g:7"), False)


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
    config, _ = parse(["--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", conf, script])
    assert config.rendezvous_settings.quorum is is_required


def test_config_rejects_an_unknown_backend() -> None:
    rule = "rdzv_backend must be one of tcp, .*etcd-v2, or package.module:function .*, got 'zk'"
    with pytest.raises(ConfigError, match=rule):
        LaunchConfig(rdzv_backend="zk")


def test_etcd_options_are_accepted_in_all_spellings_of_torch(script: str) -> None:
    old = "protocol=https,ssl_cert=c,ssl_cert_key=k,ca_cert=a,etcd_prefix=/p"
    new = "cert=c,key=k,cacert=a,etcd_prefix=/p"
    for backend, conf in (("etcd-v2", old), ("etcd", new)):
        flags = ["--rdzv-backend", backend, "--rdzv-id", "j", "--rdzv-conf", conf]
        etcd = parse([*flags, "--rdzv-endpoint", "h,[::1]:7", script])[0].etcd_config
        assert etcd is not None
        assert [attrs.astuple(m) for m in etcd.members] == [
            ("https", "h", 2379),
            ("https", "::1", 7),
        ]
        assert (etcd.cacert, etcd.cert, etcd.key, etcd.prefix) == ("a", "c", "k", "/p")


@pytest.mark.parametrize("key", sorted(ETCD_KEYS))
@pytest.mark.parametrize("backend", ["tcp", "file", "static"])
def test_etcd_key_is_rejected_with_another_backend(backend: str, key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{key} applies only to rdzv_backend etcd, not to {backend}"
    ):
        LaunchConfig(
            run_id="job",
            rdzv_backend=backend,
            rdzv_endpoint="h:1",
            node_rank=0,
            rdzv_configs={key: "x"},
        )


def test_missing_etcd_password_file_is_named(tmp_path: Path) -> None:
    etcd = EtcdConfig("h", user="u", password_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"password_file cannot be read: .*none"):
        etcd.open(1.0)


def test_join_timeout_takes_precedence_over_timeout(script: str) -> None:
    line = ["--rdzv-conf", "timeout=900,join_timeout=600", script]
    request = parse_launch(line, {})
    assert request.config.rendezvous_timeouts.join_timeout == 600
    (warning,) = request.settings.warnings
    assert warning == "ignoring --rdzv-conf timeout=900: join_timeout=600 takes precedence"


def test_rdzv_config_values_may_be_numbers_or_text() -> None:
    conf = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": "4"}
    timeouts = LaunchConfig(rdzv_configs=conf, store_grace=7.0).rendezvous_timeouts
    assert (timeouts.keep_alive_interval, timeouts.lease_ttl, timeouts.store_grace) == (
        0.5,
        2.0,
        7.0,
    )


def test_workers_start_from_a_fork_server_by_default() -> None:
    config, _ = parse(["--preload", "json,os.path", __file__])
    assert (config.start_method, config.preload) == ("forkserver", ("json", "os.path"))
    assert parse(["--start_method=spawn", __file__])[0].start_method == "spawn"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--start-method=threads",), "must be one of forkserver, spawn, fork, got 'threads'"),
        (
            ("--start-method=spawn", "--preload=json"),
            r"preload \(--preload\) requires start_method=forkserver",
        ),
        (
            ("--preload=a b",),
            r"preload \(--preload\) must be names of modules, as in a,b.c, got 'a b'",
        ),
        (("--no-python", "--start-method=forkserver"), "requires Python: remove --no-python"),
        (("--no-python", "--start-method=fork"), "--start-method fork requires Python"),
    ],
)
def test_invalid_start_method_is_rejected(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([*flags, __file__])


@pytest.mark.parametrize("text", ["1", "true", "T", "yes", "Y", "0", "False", "f", "NO", "n"])
def test_is_host_and_empty_pairs_are_read_as_torch_reads_them(text: str, script: str) -> None:
    flags = [*TWO_NODES.split(), "h:1", "--rdzv-conf"]
    config, _ = parse([*flags, f" is_host = {text} ", "--rdzv-conf", " ", script])
    conf = _parse_rendezvous_config(f" is_host = {text} ")
    expected = RendezvousParameters("c10d", "h:1", "j", 1, 2, **conf).get_as_bool("is_host")
    assert config.options.is_host is expected


def test_home_directory_is_expanded_in_paths(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "secret").write_text("a secret of sufficient length")
    flags = ["--log-dir=~/logs", "--preemption-notice=file:~/notice", script]
    assert parse(flags)[0].log_dir == str(tmp_path / "logs")
    assert read_secret({}, "~/secret", "--secret-file") == b"a secret of sufficient length"
    with FileStore("~/store") as store:
        store.set("key", b"value")
    assert (tmp_path / "store").is_dir()
