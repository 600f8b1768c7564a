"""What a launch has of torch: its `LaunchConfig` fields, torchrun's variables, and its shapes.

Each field and variable means what it means there, or is refused with the reason. What a field says
is found in ours afterwards, so that everything else reads those alone; saying one thing twice is no
mistake, and saying two things is one. torch itself is not imported here.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ..agent.options import DRAIN_SIGNALS, STOP_SIGNALS
from ..endpoint import is_any_port_here
from ..errors import ConfigError
from ..flag_values import NUMA_BINDINGS, TORCHRUN_ONLY
from ..signals import as_signal, read_signals
from ..workers.output_plan import StreamChoice, Streams
from ..workers.spec import WorkerState

if TYPE_CHECKING:
    from ..agent.interface import RunResult
    from ..launch.launch_config import LaunchConfig

TORCH_DEFAULT_TIMEOUT_S = 900  # torch writes it into rdzv_configs as `timeout` unless it is given

# -- fields of LaunchConfig -----------------------------------------------------------------------

LOGS_SPECS = ("torch.distributed.elastic.multiprocessing.api", "DefaultLogsSpecs")


def texts(value: Iterable[str] | None) -> tuple[str, ...]:
    """A list of texts, which torch lets be None."""
    if isinstance(value, str):
        raise ConfigError(f"filters are a list of texts, got the text {value!r}")
    return tuple(value or ())


def plain_values(config: LaunchConfig) -> dict[str, Any]:
    """What torch's fields of a config say, as values of the fields that are read.

    Raises:
        ConfigError: one of them cannot be heeded, or contradicts a field of ours.
    """
    if config.metrics_cfg:
        raise ConfigError(
            "metrics_cfg has no effect in torch either, and is refused here: leave it empty and "
            f"give an observe_port; got {dict(config.metrics_cfg)!r}"
        )
    if config.event_log_handler != "null":
        raise ConfigError(
            f"event_log_handler must be 'null', got {config.event_log_handler!r}: "
            f"{TORCHRUN_ONLY['event_log_handler']}"
        )
    return {**_meeting(config), **_logs(config), **_binding(config), **_signals(config)}


def _meeting(config: LaunchConfig) -> dict[str, Any]:
    """Where and as whom, with torch's ways to say that nobody else will come."""
    found: dict[str, Any] = {}
    tcp = config.rdzv_backend in ("tcp", "c10d", "static")
    if config.max_nodes == 1 and tcp and is_any_port_here(config.rdzv_endpoint):
        found["rdzv_endpoint"] = ""
        if config.rdzv_backend == "static":
            found["rdzv_backend"] = "tcp"
    conf = dict(config.rdzv_configs)
    if config.rdzv_timeout != -1:
        conf["timeout"] = config.rdzv_timeout
    if config.rdzv_backend == "static" and config.node_rank is None and "rank" in conf:
        found["node_rank"] = _rank(conf.pop("rank"))
    if conf != config.rdzv_configs:
        found["rdzv_configs"] = conf
    if config.run_id == "" and config.max_nodes == 1:
        # No other node has to know the name of a job that has only one node.
        found["run_id"] = str(uuid.uuid4())
    return found


def _rank(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"rdzv_configs rank is a whole number, got {value!r}") from None


def _logs(config: LaunchConfig) -> dict[str, Any]:
    specs = config.logs_specs
    if specs is None:
        return {}
    # The class is compared by name, because torch is not imported for this.
    if (type(specs).__module__, type(specs).__qualname__) != LOGS_SPECS:
        raise ConfigError(
            f"logs_specs must be torch's DefaultLogsSpecs or None, got {specs!r}: set log_dir, "
            "redirects, tee and local_ranks_filter instead"
        )
    found = {
        "log_dir": specs.root_log_dir,
        "redirects": _choice(specs._redirects),
        "tee": _choice(specs._tee),
        "local_ranks_filter": frozenset(specs._local_ranks_filter or ()) or None,
    }
    if found["log_dir"] == os.devnull:
        if found["redirects"].any or found["tee"].any:
            raise ConfigError(f"logs_specs sends output to files, and its log_dir is {os.devnull}")
        found["log_dir"] = None
    return {"logs_specs": None, **_once(config, "logs_specs", found)}


def _choice(streams: int | Mapping[int, int]) -> StreamChoice:
    if isinstance(streams, Mapping):
        return StreamChoice(by_rank={rank: Streams(int(s)) for rank, s in streams.items()})
    return StreamChoice(everywhere=Streams(int(streams)))


def _binding(config: LaunchConfig) -> dict[str, Any]:
    if config.numa_options is None:
        return {}
    mode = getattr(config.numa_options, "affinity_mode", None)
    name = getattr(mode, "value", mode)
    if name not in NUMA_BINDINGS:
        raise ConfigError(
            "numa_options is torch's NumaOptions with an affinity_mode of "
            f"{', '.join(NUMA_BINDINGS)}, got {config.numa_options!r}"
        )
    return _once(config, "numa_options", {"numa_binding": name})


def may_go_unbound(config: LaunchConfig) -> bool:
    """Whether workers are to run anywhere, if they cannot be bound."""
    return bool(getattr(config.numa_options, "should_fall_back_if_binding_fails", False))


def _signals(config: LaunchConfig) -> dict[str, Any]:
    if config.signals_to_handle is None:
        return {}
    ends = read_signals(config.signals_to_handle, "signals_to_handle") or ()
    agent = config.supervision.agent
    both = sorted({*ends} & {*agent.drain_signals})
    if agent.stop_signals not in (STOP_SIGNALS, ends) or (
        both and agent.drain_signals != DRAIN_SIGNALS
    ):
        raise ConfigError(
            f"signals_to_handle says {config.signals_to_handle}, and supervision something else: "
            "say it in one of them"
        )
    # torch's jobs name SIGUSR2 among those that end the run.
    drains = tuple(n for n in agent.drain_signals if n not in ends)
    agent = attrs.evolve(agent, stop_signals=ends, drain_signals=drains)
    return {"supervision": attrs.evolve(config.supervision, agent=agent)}


def _once(config: LaunchConfig, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """These values, if the fields that they are for say nothing else."""
    for field, value in found.items():
        if getattr(config, field) not in (None, StreamChoice(), value):
            raise ConfigError(
                f"{name} says {field}={value!r}, and {field} is {getattr(config, field)!r}: "
                "say it in one of them"
            )
    return dict(found)


def ours(config: Any, kind: type[LaunchConfig]) -> LaunchConfig:
    """A config of our kind; torch's own is read field by field.

    Raises:
        ConfigError: it is neither, or says what cannot be done here.
    """
    if isinstance(config, kind):
        return config
    names = getattr(type(config), "__dataclass_fields__", {})
    if not {"min_nodes", "max_nodes", "nproc_per_node", "rdzv_backend"} <= set(names):
        raise ConfigError(f"config is a LaunchConfig, got {config!r}")
    values = {name: getattr(config, name) for name in names}
    known = attrs.fields_dict(kind)
    for name in set(values) - set(known):
        if values.pop(name) != names[name].default:
            raise ConfigError(f"elasticlib does not know the field {name} of torch's LaunchConfig")
    conf = dict(values["rdzv_configs"])
    if "join_timeout" in conf and conf.get("timeout") == TORCH_DEFAULT_TIMEOUT_S:
        del conf["timeout"]  # torch has put it there, and its c10d does not read it
    values["rdzv_configs"] = conf
    return kind(**values)


# -- variables of torchrun ------------------------------------------------------------------------

WITHOUT_EFFECT: Mapping[str, str] = {
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "workers in the kernel's uninterruptible sleep "
    "are not looked for; --hang-timeout finds those that make no steps",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "workers never share a store with the rendezvous, and "
    "theirs is served by their agent",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "elasticlib does not watch torch's file timers; "
    "--hang-timeout finds workers that make no steps",
}
"""Variables that torchrun heeds and elasticrun does not, and why; none of them is an error."""


@attrs.frozen(kw_only=True)
class TorchrunOptions:
    """python: the interpreter of scripts and modules, None for the agent's own. use_libuv: which of
    torch's two servers the workers' store is.
    """

    python: str | None = None
    use_libuv: bool = True


def read_torchrun_variables(
    environment: Mapping[str, str], *, python: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of a `TorchrunOptions`, and a sentence for each variable that has no effect.

    python: whether the workers are started by an interpreter, and so might be by another one.

    Raises:
        ConfigError: one of them cannot work.
    """
    found: dict[str, Any] = {}
    notes = tuple(
        f"{name}={environment[name]} has no effect: {why}"
        for name, why in WITHOUT_EFFECT.items()
        if environment.get(name, "") not in ("", "0")
    )
    name = environment.get("PYTHON_EXEC")
    if name and python:
        found["python"] = shutil.which(name)
        if found["python"] is None:
            raise ConfigError(
                f"PYTHON_EXEC is the interpreter of the workers, and {name!r} is no program here"
            )
    # As torch reads it: whatever is not 1 asks for the other server.
    found["use_libuv"] = environment.get("USE_LIBUV", "1") == "1"
    return found, notes


# -- shapes of a run, each imported when it is needed ----------------------------------------------


def values_of(name: str, result: RunResult) -> dict[int, Any]:
    """What the workers of a run that succeeded returned.

    Raises:
        ChildFailedError: it failed. SignalException: it was stopped or drained.
    """
    if result.state is WorkerState.SUCCEEDED:
        return result.return_values
    from .failures import ChildFailedError, SignalException, failures_of

    if result.state in (WorkerState.STOPPED, WorkerState.DRAINED):
        said = f"{name}: {result.state.value}: {result.reason}"
        raise SignalException(said, as_signal(result.signal), result)
    raise ChildFailedError(name, failures_of(result.failures), result)
