"""The plan of the house, read off the code itself: one test a rule, which lists all that breaks it.

Lines of 100 columns, 5 positional arguments and the codes of `type: ignore` are ruff's to check.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "elasticlib"
NAMES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
TESTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py"))

ORDER = (
    "",  # the modules at the top, such as errors.py
    *("stores", "rendezvous", "workers", "observe", "agent"),
    *("data", "logical", "checkpoint", "in_place"),
    *("compat", "launch", "integrations", "examples", "testing"),
    "__init__.py",
)
"""Each folder imports those before it alone."""

COMPAT_DOOR = "compat/torch_launch.py"
"""All that is imported of torch's shapes, and that by `launch` alone: see docs/design.md."""

COMPOSERS = ("in_place", "compat", "launch", "integrations", "examples", "testing", "__init__.py")
"""They alone choose the doers; the others get theirs handed over, as an interface or a value."""
MEETS_ITS_AGENT = ("checkpoint/manager.py", "workers/context.py")

WORLD = {
    *("time", "datetime", "os", "socket", "select", "selectors", "threading", "subprocess"),
    *("multiprocessing", "signal", "random", "logging", "torch"),
}
DOES = {"socket", "selectors", "threading", "subprocess", "multiprocessing"}
"""Who imports one of these directly opens connections, or starts threads or processes."""

PURE = (
    "agent/policy.py",
    "agent/stop_procedure.py",
    "agent/hang_detector.py",
    "checkpoint/boxes.py",
    "data/position.py",
    "in_place/takeover.py",
    "launch/schedulers.py",
    "logical/tree_sum.py",
    "observe/event.py",
    "rendezvous/reconcile.py",
    "rendezvous/membership.py",
    "rendezvous/rank_assignment.py",
    "stores/key_space.py",
    "stores/tcp_protocol.py",
    "workers/spec.py",
)
"""Modules that decide or encode. They, and all that they import, import nothing of the world."""

ENVIRONMENT_IS_NOT_FOR = ("", "stores", "rendezvous", "agent", "observe", "data", "logical")
NO_PLAIN_THREADS_IN = ("stores", "rendezvous", "agent", "observe", "launch", "integrations")
MAX_FUNCTION_LINES = 50


def folder(name: str) -> str:
    if name == "__init__.py":
        return name
    return name.split("/")[0] if "/" in name else ""


@functools.cache
def text(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse(text(path))


def of(name: str) -> ast.Module:
    return tree(f"elasticlib/{name}")


def run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node, but not what is imported for its types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from run_nodes(child)


@functools.cache
def others(name: str) -> frozenset[str]:
    """The top names of what a file imports that is not elasticlib's."""
    found = set()
    for node in ast.walk(of(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return frozenset(found)


@functools.cache
def own(name: str) -> frozenset[str]:
    """The files of elasticlib that a file imports, anywhere in it."""
    found: set[str] = set()
    package = [*Path(name).parent.parts]
    for node in run_nodes(of(name)):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            module = "/".join([*above, *(node.module.split(".") if node.module else [])])
            inside = {f"{module}/{alias.name}.py".lstrip("/") for alias in node.names}
            found |= {f"{module}.py", f"{module}/__init__.py"} | inside
    return frozenset(found & set(NAMES))


def beneath(name: str) -> set[str]:
    """All that a file imports, and what these import."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = own(waiting.pop()) - found
        found |= new
        waiting.extend(new)
    return found


def assert_none(broken: list[str], rule: str) -> None:
    assert not broken, "\n".join([rule, *sorted(broken)])


def test_each_package_imports_only_packages_before_it_in_the_order() -> None:
    unknown = {folder(name) for name in NAMES} - set(ORDER)
    assert not unknown, f"{sorted(unknown)} have no place in ORDER, which says who imports whom"
    broken = [
        f"{name} imports {other}"
        for name in NAMES
        for other in own(name)
        if ORDER.index(folder(other)) > ORDER.index(folder(name))
    ]
    assert_none(broken, f"A folder imports those before it alone: {', '.join(ORDER[1:-1])}.")


def test_only_launch_imports_compat() -> None:
    broken = [
        f"{name} imports {other}"
        for name in NAMES
        for other in own(name)
        if folder(other) == "compat" != folder(name)
        and (folder(name) != "launch" or other != COMPAT_DOOR)
    ]
    assert_none(broken, f"Only launch imports compat, by {COMPAT_DOOR}.")
    assert f"`{COMPAT_DOOR}`" in (ROOT / "docs" / "design.md").read_text()


def test_only_testing_imports_testing_and_only_examples_import_integrations() -> None:
    may_import = {"testing": {"testing"}, "integrations": {"integrations", "examples"}}
    broken = [
        f"{name} imports {other}"
        for name in NAMES
        for other in own(name)
        if folder(name) not in may_import.get(folder(other), {folder(name)})
    ]
    assert_none(broken, "`testing` and `integrations` need what elasticlib does not depend on.")


def test_there_is_no_import_cycle() -> None:
    broken = [f"{name}: {sorted(beneath(name))}" for name in NAMES if name in beneath(name)]
    assert_none(broken, "These stand in a circle with some of what they import.")


def test_only_composing_packages_import_modules_with_io_of_another_package() -> None:
    broken = [
        f"{name} imports {other}, which imports {sorted(others(other) & DOES)}"
        for name in NAMES
        for other in own(name)
        if folder(other) not in ("", folder(name))
        and folder(name) not in COMPOSERS
        and others(other) & DOES
        and (name, other) != MEETS_ITS_AGENT
    ]
    assert_none(
        broken, "Who composes hands over what opens connections, starts threads or processes."
    )


def test_pure_modules_import_nothing_that_does_io() -> None:
    gone = [
        f"elasticlib/{name} is on the list PURE and is not there: if it was renamed or merged, "
        "put the module that decides or encodes in its place there"
        for name in PURE
        if name not in NAMES
    ]
    broken = [
        f"{name} has {inner}, which imports {sorted(others(inner) & WORLD)}"
        for name in PURE
        if name in NAMES
        for inner in {name} | beneath(name)
        if others(inner) & WORLD
    ]
    assert_none(gone + broken, "A pure module takes all that it needs as arguments.")


def test_only_the_clock_module_imports_time() -> None:
    assert_none(
        [name for name in NAMES if name != "clock.py" and others(name) & {"time", "datetime"}],
        "Time is read from elasticlib.clock alone.",
    )


def test_the_core_packages_do_not_read_the_environment() -> None:
    broken = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if folder(name) in ENVIRONMENT_IS_NOT_FOR
        for node in ast.walk(of(name))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]
    assert_none(broken, "These folders are given what the environment says as arguments.")


def test_functions_have_at_most_50_code_lines() -> None:
    broken = []
    for path in [*(f"elasticlib/{name}" for name in NAMES), *TESTS]:
        lines = text(path).splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = code_lines(node, lines)
                if length > MAX_FUNCTION_LINES:
                    broken.append(f"{path}:{node.lineno}: {node.name} has {length} code lines")
    assert_none(broken, f"Functions have at most {MAX_FUNCTION_LINES} code lines.")


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Lines of the body without its docstring, blank lines and comments."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    written = lines[body[0].lineno - 1 : node.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in written)


def test_test_files_have_different_names() -> None:
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    twice = [name for name, times in names.items() if times > 1]
    assert_none(twice, "pytest imports a file of tests by its name, so each has one of its own.")


def test_each_module_has_a_docstring() -> None:
    broken = [name for name in NAMES if of(name).body and not ast.get_docstring(of(name))]
    assert_none(broken, "A module begins with a docstring.")


def test_the_library_has_no_assert_statements() -> None:
    broken = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if folder(name) != "testing"  # its suites are tests
        for node in ast.walk(of(name))
        if isinstance(node, ast.Assert)
    ]
    assert_none(broken, "python -O leaves assertions out: raise, or see errors.require_not_none.")


def test_threads_are_created_by_daemon_thread() -> None:
    broken = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if folder(name) in NO_PLAIN_THREADS_IN
        for node in ast.walk(of(name))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Thread"
    ]
    assert_none(
        broken,
        "threads.daemon_thread reports an exception; the owner of a plain thread waits forever.",
    )


def python(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], timeout=100).returncode


def test_importing_elasticlib_does_not_import_torch() -> None:
    code = "import sys, elasticlib; sys.exit('torch' in sys.modules or 'attrs' in sys.modules)"
    assert python(code) == 0


def test_contract_suites_are_imported_with_their_dependencies_on_first_use() -> None:
    code = (
        "import sys, elasticlib.testing as testing; "
        "assert not {'pytest', 'hypothesis'} & set(sys.modules); "
        "[getattr(testing, name) for name in testing.__all__]"
    )
    assert python(code) == 0


def test_the_command_line_is_parsed_without_torch_and_importlib_metadata() -> None:
    code = (
        "import sys; from elasticlib.launch.command_line import build_parser; build_parser(); "
        "sys.exit('torch' in sys.modules or 'importlib.metadata' in sys.modules)"
    )
    assert python(code) == 0


def test_state_without_shards_is_saved_and_restored_without_importing_dtensor() -> None:
    """Their modules take a second to import, in each new worker."""
    code = (
        "import sys, tempfile, torch, elasticlib\n"
        "with elasticlib.CheckpointManager(tempfile.mkdtemp()) as manager:\n"
        "    manager.save(1, {'w': torch.ones(3)}).wait()\n"
        "    assert manager.restore({'w': torch.ones(3)}).step == 1\n"
        "late = {'torch.distributed.tensor', 'torch.distributed.checkpoint'}\n"
        "sys.exit(bool(late & set(sys.modules)))"
    )
    assert python(code) == 0
