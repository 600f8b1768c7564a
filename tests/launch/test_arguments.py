"""torchrun's command line: what is accepted works, and what cannot work is refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from elasticlib import Command, Module, Script
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse, parse_launch
from elasticlib.launch.backends import ETCD_KEYS, EtcdConfig
from elasticlib.launch.command_line import build_parser
from elasticlib.launch.elasticrun import command
from elasticlib.launch.launch_config import LaunchConfig


def test_every_two_word_flag_has_both_spellings() -> None:
    options = set(build_parser()._option_string_actions)
    twins = {o for o in options if o.startswith("--") and "-" in o[2:]}
    assert {"--" + twin[2:].replace("-", "_") for twin in twins} <= options


def test_one_node_by_itself_needs_no_flag_and_has_a_name_of_its_own(script: str) -> None:
    config, entrypoint = parse([script, "--epochs", "3"])
    assert (config.min_nodes, config.max_nodes, config.is_single_node) == (1, 1, True)
    assert config.run_id != parse([script])[0].run_id
    assert entrypoint == Script(script, ("--epochs", "3"))


def test_flags_after_the_script_are_the_scripts(script: str) -> None:
    config, entrypoint = parse(["--nproc_per_node", "2", script, "--nproc-per-node", "9"])
    assert config.nproc_per_node == 2
    assert entrypoint.args == ("--nproc-per-node", "9")


def test_elastic_flags_are_read(script: str) -> None:
    flags = "--nnodes 1:4 --rdzv-endpoint [::1]:29401 --rdzv-id j --max-restarts 2 --node-rank 3"
    config, _ = parse([*flags.split(), "--rdzv-conf", "join_timeout=9,last_call_timeout=0", script])
    assert (config.min_nodes, config.max_nodes, config.max_restarts) == (1, 4, 2)
    assert (config.run_id, config.rdzv_endpoint, config.node_rank) == ("j", "[::1]:29401", 3)
    assert (config.options.join_timeout, config.rendezvous_settings.last_call_timeout) == (9.0, 0.0)
    assert config.rdzv_backend == "tcp"


def test_master_flags_mean_the_static_backend(script: str) -> None:
    config, _ = parse(
        ["--nnodes", "2", "--node_rank", "1", "--master_addr", "h", "--master_port", "7", script]
    )
    assert (config.rdzv_backend, config.rdzv_endpoint, config.node_rank) == ("static", "h:7", 1)


def test_modules_and_programs_are_told_from_scripts() -> None:
    assert parse(["-m", "pkg.train", "x"])[1] == Module("pkg.train", ("x",))
    assert parse(["--no-python", "echo", "x"])[1] == Command("echo", ("x",))


REFUSED = [
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
        "--nnodes 2 --rdzv-endpoint h:1 --rdzv-id= SCRIPT",
        "--rdzv-id must have 1 to 256 bytes, got ''",
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
    ("--rdzv-conf a=1,a=2 SCRIPT", "each key once"),
    (
        "--rdzv-conf colour=red SCRIPT",
        "unknown --rdzv-conf key 'colour'; valid keys: close_timeout",
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


@pytest.mark.parametrize(("line", "sentence"), REFUSED)
def test_what_cannot_work_is_refused_with_a_sentence(line: str, sentence: str, script: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse([script if word == "SCRIPT" else word for word in line.split()])
    assert sentence in str(refused.value)


def test_a_script_whose_ending_is_left_out_is_named(script: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {script}"):
        parse([script.removesuffix(".py")])


TWO = "--nnodes 2 --rdzv-endpoint"
STATIC = "--nnodes 2 --rdzv-backend static --node-rank 0 --rdzv-endpoint"
REFUSED_FOR_LOSS = [
    ("--store-grace 0", "--store-grace must be seconds above 0 and up to 1e+06, got 0.0"),
    (f"{TWO} h:1 --spares=-1", "spares must be at least 0, got -1"),
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
    (f"{TWO} h:1,g:1,h:1", "--rdzv-endpoint names one endpoint twice: h:1,g:1,h:1"),
    (f"{TWO} h:1,g:0", "--rdzv-endpoint must have a fixed port, got 'g:0'"),
    (f"{TWO} h:1,0.0.0.0:1", "--rdzv-endpoint must be reachable from the other nodes"),
    (
        f"{TWO} h:1,g:1 --rdzv-conf is_host=true",
        "is_host=true requires a single endpoint, got several",
    ),
    (f"{TWO} h:1 --rdzv-conf quorum=any", "--rdzv-conf quorum requires several endpoints, got one"),
    (f"{TWO} h:1,g:1 --rdzv-conf quorum=maybe", "quorum must be majority or any, got 'maybe'"),
    (
        "--standalone --rdzv-conf quorum=any",
        "quorum applies only to the TCP store and requires --rdzv-endpoint",
    ),
    (
        "--rdzv-backend file --rdzv-endpoint m --rdzv-id j --rdzv-conf quorum=any",
        "quorum applies only to the TCP store and requires --rdzv-endpoint",
    ),
    (f"{TWO} h:1 --rdzv-id {'x' * 257}", "--rdzv-id must have 1 to 256 bytes"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED_FOR_LOSS)
def test_what_cannot_outlive_a_loss_as_asked_is_refused_with_exit_code_2(
    line: str, sentence: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    soon = ("--rdzv-conf", "join_timeout=0.5")  # where it is not refused
    assert command([*line.split(), *soon, script]) == 2
    said = capsys.readouterr().err
    assert said.startswith("elasticrun: error: ")
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--nnodes", "3:1", __file__], "ConfigError: --nnodes must be"), ([7], "TypeError: ")],
)
def test_what_ends_the_launcher_itself_is_in_its_own_error_file(
    argv: list[Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = tmp_path / "termination-log"
    error.touch()
    before = error.stat().st_ino
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error))
    with contextlib.suppress(TypeError):
        assert command(argv) == 2
    message = json.loads(error.read_text())["message"]
    assert message["message"].startswith(said)
    assert said.startswith("Config") or "Traceback" in message["extraInfo"]["py_callstack"]
    # In its place: it may be mounted there.
    assert error.stat().st_ino == before


@pytest.mark.parametrize("line", ["--store-grace soon", "--spares some", "--spares 1.5"])
def test_what_is_no_number_is_refused_with_exit_code_2_and_the_flag(
    line: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command([*line.split(), script])
    assert ended.value.code == 2
    assert f"argument {line.split()[0]}" in capsys.readouterr().err


def test_a_key_is_given_once_however_it_is_spaced(script: str) -> None:
    with pytest.raises(ConfigError, match="each key once"):
        parse(["--rdzv-endpoint", "h:1", "--rdzv-conf", "quorum=any, quorum =any", script])


def test_one_nodes_own_address_may_be_the_wildcard(script: str) -> None:
    flags = ["--nnodes", "1", "--node-rank", "0", "--master-port", "7", "--master-addr"]
    found = {host: parse([*flags, host, script])[0].rdzv_endpoint for host in ("0", "0::0")}
    assert found == {"0": "127.0.0.1:7", "0::0": "[::1]:7"}
    assert parse(["--standalone", "--local-addr", "0.0.0.0", script])[0].is_single_node


def test_what_a_job_may_lose_is_read(script: str) -> None:
    flags = "--nnodes 1:4 --spares 2 --topology rack7 --store-grace 9 --rdzv-endpoint h,g:7"
    config, _ = parse([*flags.split(), "--rdzv-conf", "is_host=false", script])
    assert (config.rendezvous_settings.spares, config.rendezvous_settings.quorum) == (2, True)
    assert (config.topology, config.rendezvous_timeouts.store_grace) == ("rack7", 9.0)
    assert (config.endpoints, config.options.is_host) == (("h", "g:7"), False)


@pytest.mark.parametrize(
    ("endpoint", "conf", "counts"),
    [
        ("h:1", "", False),
        ("h:1,g:1", "", True),
        ("h:1,g:1", "quorum=majority", True),
        ("h:1,g:1", "quorum=any", False),
    ],
)
def test_a_quorum_counts_where_the_store_may_move(
    endpoint: str, conf: str, counts: bool, script: str
) -> None:
    config, _ = parse(["--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", conf, script])
    assert config.rendezvous_settings.quorum is counts


def test_an_unknown_backend_is_refused_by_the_config_too() -> None:
    rule = "rdzv_backend must be one of tcp, .*etcd-v2, or package.module:function .*, got 'zk'"
    with pytest.raises(ConfigError, match=rule):
        LaunchConfig(rdzv_backend="zk")


def test_etcd_is_found_by_all_of_torchs_spellings(script: str) -> None:
    old = "protocol=https,ssl_cert=c,ssl_cert_key=k,ca_cert=a,etcd_prefix=/p"
    new = "cert=c,key=k,cacert=a,etcd_prefix=/p"
    for backend, conf in (("etcd-v2", old), ("etcd", new)):
        flags = ["--rdzv-backend", backend, "--rdzv-id", "j", "--rdzv-conf", conf]
        place = parse([*flags, "--rdzv-endpoint", "h,[::1]:7", script])[0].etcd_config
        assert place is not None
        assert [attrs.astuple(m) for m in place.members] == [
            ("https", "h", 2379),
            ("https", "::1", 7),
        ]
        assert (place.cacert, place.cert, place.key, place.prefix) == ("a", "c", "k", "/p")


@pytest.mark.parametrize("key", sorted(ETCD_KEYS))
@pytest.mark.parametrize("backend", ["tcp", "file", "static"])
def test_etcds_keys_are_refused_beside_other_backends(backend: str, key: str) -> None:
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


def test_a_password_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    place = EtcdConfig("h", user="u", password_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"password_file cannot be read: .*none"):
        place.open(1.0)


def test_of_two_words_for_the_time_to_join_torchs_newer_one_counts(script: str) -> None:
    line = ["--rdzv-conf", "timeout=900,join_timeout=600", script]
    told = parse_launch(line, {})
    assert told.config.rendezvous_timeouts.join_timeout == 600
    (note,) = told.settings.warnings
    assert note == "ignoring --rdzv-conf timeout=900: join_timeout=600 takes precedence"


def test_conf_values_may_be_numbers_or_text() -> None:
    conf = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": "4"}
    timing = LaunchConfig(rdzv_configs=conf, store_grace=7.0).rendezvous_timeouts
    assert (timing.keep_alive_interval, timing.lease_ttl, timing.store_grace) == (0.5, 2.0, 7.0)


def test_workers_start_warm_unless_they_are_told_otherwise() -> None:
    config, _ = parse(["--preload", "json,os.path", __file__])
    assert (config.start_method, config.preload) == ("forkserver", ("json", "os.path"))
    assert parse(["--start_method=spawn", __file__])[0].start_method == "spawn"


@pytest.mark.parametrize(
    ("flags", "sentence"),
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
def test_a_start_that_cannot_be_is_refused(flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse([*flags, __file__])
