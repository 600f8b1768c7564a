"""The plan of the house, read off the imports and the lines of the code itself."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "elasticlib"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]

LAYER_0 = {
    *("errors.py", "clock.py", "foreign.py", "signals.py", "threads.py"),
    *("hard_lock.py", "held_folder.py", "_version.py"),
}
PURE = {
    "endpoint.py",
    "visible.py",
    "whole.py",
    "launch/observe_flags.py",
    "launch/settings.py",
    "observe/counts.py",
    "observe/event.py",
    "observe/clocks.py",
    "observe/costs.py",
    "observe/facts.py",
    "observe/exposed.py",
    "observe/history.py",
    "observe/life.py",
    "observe/reading.py",
    "observe/strand.py",
    "observe/tally.py",
    "observe/thinned.py",
    "observe/pace.py",
    "observe/page/curves.py",
    "observe/page/lane.py",
    "observe/page/markup.py",
    "observe/page/page.py",
    "observe/page/recoveries.py",
    "observe/page/rows.py",
    "observe/page/scale.py",
    "observe/page/signs.py",
    "observe/page/strokes.py",
    "observe/page/style.py",
    "observe/page/tables.py",
    "observe/page/timeline.py",
    "observe/page/wording.py",
    "observe/question.py",
    "observe/same_stacks.py",
    "observe/status.py",
    "observe/status_words.py",
    "observe/standing.py",
    "launch/nodelist.py",
    "launch/slurm.py",
    "launch/skypilot.py",
    "stores/state.py",
    "stores/leases.py",
    "stores/wire.py",
    "stores/secret.py",
    "stores/admission.py",
    "stores/pages.py",
    "stores/service.py",
    "stores/file_format.py",
    "workers/lines.py",
    "rendezvous/document.py",
    "rendezvous/ranks.py",
    "rendezvous/decide.py",
    "rendezvous/intent.py",
    "agent/policy.py",
    "agent/agreed.py",
    "agent/hang.py",
    "agent/causes.py",
    "workers/spec.py",
    "workers/ladder.py",
    "workers/beat.py",
    "workers/notice.py",
    "workers/blame.py",
    "workers/error_file.py",
    "workers/exits.py",
    "workers/output_plan.py",
    "workers/places.py",
    "workers/streams.py",
    "workers/timers.py",
    "data/deal.py",
    "data/state.py",
    "data/progress.py",
    "data/permute.py",
    "data/batch.py",
    "data/ranges.py",
    "checkpoint/format.py",
    "logical/shares.py",
    "logical/tree.py",
    "logical/seeds.py",
    "checkpoint/held.py",
    "checkpoint/choose.py",
    "checkpoint/names.py",
    "checkpoint/manifest.py",
    "checkpoint/fence.py",
    "checkpoint/prune.py",
    "checkpoint/slot.py",
    "checkpoint/json_fields.py",
    "checkpoint/pack_head.py",
    "checkpoint/buddies.py",
    "checkpoint/replica_wire.py",
    "integrations/ray/placement.py",
}
INTERFACES = {name for name in NAMES if name.endswith("/interface.py")} | {"rendezvous/layout.py"}
NEVER_IN_PURE = {
    "time",
    "os",
    "socket",
    "threading",
    "subprocess",
    "signal",
    "random",
    "logging",
    "torch",
}
MAY_USE_THE_CLOCK = {"clock.py"}
MAY_READ_THE_ENVIRONMENT = {
    "workers/context.py",
    "launch/elasticrun.py",
    "launch/elastic_launch.py",
    "launch/commands.py",
    # The secret of the job that is asked, and NO_COLOR.
    "launch/reach.py",
    "launch/status_command.py",
    "launch/doctor_command.py",
    # NO_COLOR is about what is shown, and nothing else.
    "launch/logs_command.py",
    # The launch is torchrun's, which knows nothing of our secret.
    "launch/torchrun_handler.py",
    # It tells torch's handler, which asks the environment alone, how to let latecomers in.
    "launch/from_torch.py",
    # Between two execs: it takes out what Python put in, and reads nothing.
    "workers/enter.py",
    # In a worker, or in a script under another launcher: it looks where to leave its error.json.
    "workers/record.py",
    # In a worker of the agents' suite, too, which asks what workers are told.
    "testing/agent_acts.py",
    # In a worker, too: where it says that it writes its stacks when it is asked to.
    "workers/stacks.py",
    # A fork that takes on its own environment.
    "workers/template.py",
    # In a worker, too: whose checkpoints it writes.
    "checkpoint/here.py",
    # In a worker: where its agent's memory is, and which run and generation it is of.
    "checkpoint/told.py",
    # Training scripts, which is what the variables are for.
    "examples/train_text.py",
    "examples/imagenet.py",
    # What it starts keeps its records and temporary files in a folder of its own: TMPDIR.
    "examples/watched_job.py",
    # In a Ray actor, which is the agent's process; in a worker; and the command line's LOGLEVEL.
    "integrations/ray/agent.py",
    "integrations/ray/function.py",
    "integrations/ray/__main__.py",
    "examples/trace.py",
    "examples/with_lightning.py",
    "examples/with_transformers.py",
}
# Where a training script's checkpoints meet its agent: what is saved is told, and stops are heard.
MEETS_ITS_AGENT = {("checkpoint/here.py", "workers/context.py")}
LINE, FUNCTION, FILE, POSITIONAL = 100, 40, 700, 5


def layer(name: str) -> int:
    if name in LAYER_0:
        return 0
    if name in PURE:
        return 1
    if name in INTERFACES:
        return 2
    composes = name.startswith(("launch/", "integrations/")) or name == "__init__.py"
    return 4 if composes else 3


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text())


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Dotted names of what a file imports, elasticlib's own as paths within the package."""
    found = set()
    package = [*Path(name).parent.parts]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            module = [*base, *(node.module.split(".") if node.module else [])]
            path = "/".join(module)
            if f"{path}.py" in NAMES:
                found.add(f"{path}.py")
            else:
                found.update("/".join([*module, alias.name]) + ".py" for alias in node.names)
    return frozenset(found)


def own(name: str) -> set[str]:
    return {found for found in imports(name) if found in NAMES}


def test_every_file_named_here_exists() -> None:
    assert set(NAMES) >= LAYER_0 | PURE | MAY_READ_THE_ENVIRONMENT


@pytest.mark.parametrize("name", NAMES)
def test_a_file_imports_only_what_its_layer_may(name: str) -> None:
    mine = layer(name)
    folder = name.split("/")[0]
    for other in own(name):
        there = layer(other)
        if other.split("/")[0] == "testing":
            assert folder == "testing", f"{name} imports {other}; only tests import testing"
        if other.split("/")[0] == "integrations":
            outside = folder in ("integrations", "examples")
            assert outside, f"{name} imports {other}, which needs what others ship"
        if mine <= 2:
            assert there <= mine, f"{name} (layer {mine}) imports {other} (layer {there})"
            if mine == 0:
                pytest.fail(f"{name} imports {other}, and layer 0 imports nothing of ours")
        elif mine == 3 and folder not in ("testing", "examples", "integrations"):
            assert there <= 3, f"{name} imports {other}; only launch composes"
            same = other.split("/")[0] == folder
            allowed = same or (name, other) in MEETS_ITS_AGENT
            assert allowed or there <= 2, f"{name} imports the doer {other} of another folder"


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_pure_module_has_no_clock_thread_or_environment(name: str) -> None:
    tops = {found.split(".")[0] for found in imports(name)}
    assert not tops & NEVER_IN_PURE, name


@pytest.mark.parametrize("name", NAMES)
def test_only_the_clock_reads_the_time(name: str) -> None:
    if name not in MAY_USE_THE_CLOCK:
        assert not imports(name) & {"time", "datetime"}, name


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_is_read_in_launch_alone(name: str) -> None:
    reads = [
        node.lineno
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]
    assert not reads or name in MAY_READ_THE_ENVIRONMENT, f"{name} lines {reads}"


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "tests").rglob("*.py"))], ids=str)
def test_files_lines_and_functions_stay_small(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= FILE, f"{len(lines)} lines"
    assert all(len(line) <= LINE for line in lines)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert code_lines(node, lines) <= FUNCTION, f"{node.name} is too long"
            positional = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            # A test's arguments are its fixtures, and these files' are torch's.
            free = (
                path in (PACKAGE / "data/sampler.py", PACKAGE / "events.py")
                or PACKAGE not in path.parents
            )
            assert len(positional) <= POSITIONAL or free, f"{node.name}: {positional}"


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Lines of the body without its docstring, blank lines and comments."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    text = lines[body[0].lineno - 1 : node.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_says_what_rule_it_keeps(name: str) -> None:
    if (PACKAGE / name).read_text().strip():
        assert ast.get_docstring(tree(name)), f"{name} has no docstring"


@pytest.mark.parametrize("name", NAMES)
def test_a_type_ignore_names_its_code(name: str) -> None:
    for number, line in enumerate((PACKAGE / name).read_text().splitlines(), 1):
        assert "type: ignore" not in line or "type: ignore[" in line, f"{name}:{number}"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("testing/")])
def test_nothing_is_checked_by_an_assertion(name: str) -> None:
    """python -O leaves them out. (The suites of `testing` are tests.)"""
    found = [node.lineno for node in ast.walk(tree(name)) if isinstance(node, ast.Assert)]
    assert not found, f"{name} lines {found}: raise an error, or see elasticlib.errors.present"


MAY_START_PLAIN_THREADS = {
    "threads.py",
    # It is joined at exit, so that what is being saved is saved; its task's errors are its owner's.
    "checkpoint/behind.py",
    # In processes that are about to end.
    "workers/become.py",
    "data/loader_workers.py",
}


def test_a_thread_that_dies_is_heard() -> None:
    """`threads.helper` tells of its end; a plain one would leave its owner to wait for ever."""
    found = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if not name.startswith(("testing/", "examples/")) and name not in MAY_START_PLAIN_THREADS
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and node.attr == "Thread"
        if isinstance(node.ctx, ast.Load) and _is_called(node, tree(name))
    ]
    assert not found


def _is_called(function: ast.Attribute, of: ast.AST) -> bool:
    calls = (node for node in ast.walk(of) if isinstance(node, ast.Call))
    return any(call.func is function for call in calls)


def test_importing_elasticlib_does_not_import_torch() -> None:
    code = "import sys, elasticlib; sys.exit('torch' in sys.modules or 'attrs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_every_public_name_can_be_had() -> None:
    code = "import elasticlib; [getattr(elasticlib, name) for name in elasticlib.__all__]"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_a_suite_is_found_and_the_simulator_needs_none() -> None:
    code = (
        "import sys, elasticlib.testing.simulation, elasticlib.testing as testing; "
        "assert not {'pytest', 'hypothesis'} & set(sys.modules); "
        "[getattr(testing, name) for name in testing.__all__]"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_the_command_line_is_read_without_torch_or_the_metadata_of_distributions() -> None:
    code = (
        "import sys; from elasticlib.launch.arguments import build_flags; build_flags(); "
        "sys.exit('torch' in sys.modules or 'importlib.metadata' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
