"""Rules for the structure of the code: one test for each rule, which lists all violations.

ruff checks the line length, the number of positional arguments and the codes of `type: ignore`.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "elasticlib"
NAMES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
TESTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py"))

# Each package imports only packages before it.
ORDER = (
    "",  # the modules at the top, such as errors.py
    *("stores", "rendezvous", "workers", "observe", "agent"),
    *("data", "logical", "checkpoint", "in_place"),
    *("compat", "launch", "integrations", "examples", "testing"),
    "__init__.py",
)

# The only module of `compat` that other packages import; only `launch` does. See docs/design.md.
COMPAT_MODULE = "compat/failures.py"

# Only these packages create objects that do I/O. They pass them to the others as arguments.
COMPOSERS = ("in_place", "compat", "launch", "integrations", "examples", "testing", "__init__.py")
# The exception: a checkpoint manager finds its agent through the worker context.
COMPOSER_EXCEPTION = ("checkpoint/manager.py", "workers/context.py")

# Modules that pure code does not import.
IO_MODULES = {
    *("time", "datetime", "os", "socket", "select", "selectors", "threading", "subprocess"),
    *("multiprocessing", "signal", "random", "logging", "torch"),
}
# It only looks up the names and numbers of signals.
PURE_USES = {"signals.py": {"signal"}}
# A module that imports one of these opens connections, or starts threads or processes.
CONNECTION_MODULES = {
    *("socket", "selectors", "threading", "subprocess", "multiprocessing"),
}

# Modules that decide or encode. They, and all modules that they import, do no I/O.
PURE = (
    "agent/machine.py",
    "agent/machine_check.py",
    "agent/messages.py",
    "agent/stop_agreement.py",
    "agent/hang_detector.py",
    "checkpoint/boxes.py",
    "data/position.py",
    "in_place/takeover.py",
    "launch/schedulers.py",
    "logical/tree_sum.py",
    "observe/event.py",
    "observe/event_kinds.py",
    "options.py",
    "rendezvous/reconcile.py",
    "rendezvous/bad_nodes.py",
    "rendezvous/blame.py",
    "rendezvous/membership.py",
    "rendezvous/node_intent.py",
    "rendezvous/rank_assignment.py",
    "stores/key_space.py",
    "stores/tcp_protocol.py",
    "workers/spec.py",
)

NO_ENVIRONMENT_IN = ("", "stores", "rendezvous", "agent", "observe", "data", "logical")
FOREIGN_FIELDS = (
    *("sys.argv", "raw.name", "parser.description", "args.device", "local.buffer", "tensor.data"),
)
NO_PLAIN_THREADS_IN = ("stores", "rendezvous", "agent", "observe", "launch", "integrations")
MAX_FUNCTION_LINES = 50


def package_of(name: str) -> str:
    """Return the name of the package, "" for modules at the top, or "__init__.py"."""
    if name == "__init__.py":
        return name
    return name.split("/")[0] if "/" in name else ""


@functools.cache
def read_text(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def parse(path: str) -> ast.Module:
    return ast.parse(read_text(path))


def parse_module(name: str) -> ast.Module:
    return parse(f"elasticlib/{name}")


def walk_without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below a node, except imports that are only for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from walk_without_type_checking(child)


@functools.cache
def external_imports(name: str) -> frozenset[str]:
    """Return the top-level names of the imports of a module, without those of elasticlib."""
    found = set()
    for node in ast.walk(parse_module(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return frozenset(found)


@functools.cache
def internal_imports(name: str) -> frozenset[str]:
    """Return the modules of elasticlib that a module imports, anywhere in it."""
    found: set[str] = set()
    package = [*Path(name).parent.parts]
    for node in walk_without_type_checking(parse_module(name)):
        if isinstance(node, ast.ImportFrom) and node.level:
            parent = package[: len(package) - node.level + 1]
            module = "/".join([*parent, *(node.module.split(".") if node.module else [])])
            submodules = {f"{module}/{alias.name}.py".lstrip("/") for alias in node.names}
            found |= {f"{module}.py", f"{module}/__init__.py"} | submodules
    return frozenset(found & set(NAMES))


def all_imports(name: str) -> set[str]:
    """Return all modules that a module imports, directly or indirectly."""
    found: set[str] = set()
    pending = [name]
    while pending:
        new = internal_imports(pending.pop()) - found
        found |= new
        pending.extend(new)
    return found


def assert_none(violations: list[str], rule: str) -> None:
    assert not violations, "\n".join([rule, *sorted(violations)])


def test_each_package_imports_only_packages_before_it_in_the_order() -> None:
    unknown = {package_of(name) for name in NAMES} - set(ORDER)
    assert not unknown, f"{sorted(unknown)} are missing in ORDER, the order of imports"
    violations = [
        f"{name} imports {other}"
        for name in NAMES
        for other in internal_imports(name)
        if ORDER.index(package_of(other)) > ORDER.index(package_of(name))
    ]
    assert_none(violations, f"A package imports only packages before it: {', '.join(ORDER[1:-1])}.")


def test_only_launch_imports_compat() -> None:
    violations = [
        f"{name} imports {other}"
        for name in NAMES
        for other in internal_imports(name)
        if package_of(other) == "compat" != package_of(name)
        and (package_of(name) != "launch" or other != COMPAT_MODULE)
    ]
    assert_none(violations, f"Only launch imports compat, and only {COMPAT_MODULE}.")
    assert f"`{COMPAT_MODULE}`" in (ROOT / "docs" / "design.md").read_text()


def test_only_testing_imports_testing_and_only_examples_import_integrations() -> None:
    may_import = {"testing": {"testing"}, "integrations": {"integrations", "examples"}}
    violations = [
        f"{name} imports {other}"
        for name in NAMES
        for other in internal_imports(name)
        if package_of(name) not in may_import.get(package_of(other), {package_of(name)})
    ]
    assert_none(
        violations, "`testing` and `integrations` need packages that elasticlib does not depend on."
    )


def test_there_is_no_import_cycle() -> None:
    violations = [
        f"{name}: {sorted(all_imports(name))}" for name in NAMES if name in all_imports(name)
    ]
    assert_none(violations, "These modules are in an import cycle.")


def test_only_composing_packages_import_modules_with_io_of_another_package() -> None:
    violations = [
        f"{name} imports {other}, which imports {sorted(modules)}"
        for name in NAMES
        for other in internal_imports(name)
        if package_of(other) not in ("", package_of(name))
        and package_of(name) not in COMPOSERS
        and (modules := external_imports(other) & CONNECTION_MODULES)
        and (name, other) != COMPOSER_EXCEPTION
    ]
    assert_none(
        violations,
        "Objects that open connections or start threads or processes are passed as arguments.",
    )


def test_pure_modules_import_nothing_that_does_io() -> None:
    missing = [
        f"elasticlib/{name} is in the list PURE but does not exist: if it was renamed or merged, "
        "replace it by the module that decides or encodes now"
        for name in PURE
        if name not in NAMES
    ]
    violations = [
        f"{name} needs {inner}, which imports {sorted(external_imports(inner) & IO_MODULES)}"
        for name in PURE
        if name in NAMES
        for inner in {name} | all_imports(name)
        if external_imports(inner) & IO_MODULES - PURE_USES.get(inner, set())
    ]
    assert_none(missing + violations, "A pure module gets all values from I/O as arguments.")


def test_only_the_clock_module_imports_time() -> None:
    assert_none(
        [
            name
            for name in NAMES
            if name != "clock.py" and external_imports(name) & {"time", "datetime"}
        ],
        "Only elasticlib.clock imports time.",
    )


def test_the_core_packages_do_not_read_the_environment() -> None:
    violations = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if package_of(name) in NO_ENVIRONMENT_IN
        for node in ast.walk(parse_module(name))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]
    assert_none(violations, "These packages get the values of environment variables as arguments.")


def test_functions_have_at_most_50_code_lines() -> None:
    violations = []
    for path in [*(f"elasticlib/{name}" for name in NAMES), *TESTS]:
        lines = read_text(path).splitlines()
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = code_lines(node, lines)
                if length > MAX_FUNCTION_LINES:
                    violations.append(f"{path}:{node.lineno}: {node.name} has {length} code lines")
    assert_none(violations, f"Functions have at most {MAX_FUNCTION_LINES} code lines.")


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Return the number of lines of the body without docstring, blank lines and comments."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    body_lines = lines[body[0].lineno - 1 : node.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in body_lines)


def test_test_files_have_different_names() -> None:
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    duplicates = [name for name, times in names.items() if times > 1]
    assert_none(duplicates, "pytest imports test files by their names, so the names must differ.")


def test_test_files_named_in_conftest_exist() -> None:
    named = re.findall(r'"(test_\w+\.py)"', read_text("tests/conftest.py"))
    assert len(named) > 20
    missing = sorted(set(named) - {Path(path).name for path in TESTS})
    assert_none(missing, "tests/conftest.py names test files that do not exist.")


def test_each_module_has_a_docstring() -> None:
    violations = [
        name
        for name in NAMES
        if parse_module(name).body and not ast.get_docstring(parse_module(name))
    ]
    assert_none(violations, "A module needs a docstring.")


def test_the_library_has_no_assert_statements() -> None:
    violations = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if package_of(name) != "testing"  # its contract suites are tests
        for node in ast.walk(parse_module(name))
        if isinstance(node, ast.Assert)
    ]
    assert_none(
        violations, "python -O removes assertions: raise an error, or use errors.require_not_none."
    )


def test_threads_are_created_by_daemon_thread() -> None:
    violations = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if package_of(name) in NO_PLAIN_THREADS_IN
        for node in ast.walk(parse_module(name))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Thread"
    ]
    assert_none(
        violations,
        "threads.daemon_thread reports exceptions; the owner of a plain thread would wait forever.",
    )


def test_each_thread_has_an_owner_that_hears_of_its_end() -> None:
    violations = [
        f"{name}:{node.lineno}"
        for name in NAMES
        for node in ast.walk(parse_module(name))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "daemon_thread"
        if len(node.args) + len(node.keywords) < 3 or ast.unparse(node).endswith("lambda _: None)")
    ]
    assert_none(violations, "daemon_thread gets an on_error, such as threads.only_logged.")


def fields(name: str) -> set[str]:
    """Return the names of the fields of all classes of a module."""
    found = set()
    for node in ast.walk(parse_module(name)):
        if isinstance(node, ast.ClassDef):
            found |= {n.attr for n in assigned_attributes(node) if ast.unparse(n.value) == "self"}
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [line]
                names = [getattr(target, "target", target) for target in targets]
                found |= {one.id for one in names if isinstance(one, ast.Name)}
    return found


def assigned_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def test_no_module_assigns_a_field_of_another_modules_object() -> None:
    """Fields are told apart by their names, so a field of a class of the same name is not found."""
    own = {name: fields(name) for name in NAMES}
    everywhere = set().union(*own.values())
    violations = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name in NAMES
        for node in assigned_attributes(parse_module(name))
        if node.attr in everywhere - own[name]
        # These are objects of Python and of torch.
        and ast.unparse(node) not in FOREIGN_FIELDS
    ]
    assert_none(violations, "Each piece of state has one owner: call a method of it.")


def run_python(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], timeout=100).returncode


def test_importing_elasticlib_does_not_import_torch() -> None:
    code = "import sys, elasticlib; sys.exit('torch' in sys.modules or 'attrs' in sys.modules)"
    assert run_python(code) == 0


def test_contract_suites_are_imported_with_their_dependencies_on_first_use() -> None:
    code = (
        "import sys, elasticlib.testing as testing; "
        "assert not {'pytest', 'hypothesis'} & set(sys.modules); "
        "[getattr(testing, name) for name in testing.__all__]"
    )
    assert run_python(code) == 0


def test_the_command_line_is_parsed_without_torch_and_importlib_metadata() -> None:
    code = (
        "import sys; from elasticlib.launch.command_line import build_parser; build_parser(); "
        "sys.exit('torch' in sys.modules or 'importlib.metadata' in sys.modules)"
    )
    assert run_python(code) == 0


def test_state_without_shards_is_saved_and_restored_without_importing_dtensor() -> None:
    """The modules of DTensor take a second to import, in each new worker."""
    code = (
        "import sys, tempfile, torch, elasticlib\n"
        "with elasticlib.CheckpointManager(tempfile.mkdtemp()) as manager:\n"
        "    manager.save(1, {'w': torch.ones(3)}).wait()\n"
        "    assert manager.restore({'w': torch.ones(3)}).step == 1\n"
        "forbidden = {'torch.distributed.tensor', 'torch.distributed.checkpoint'}\n"
        "sys.exit(bool(forbidden & set(sys.modules)))"
    )
    assert run_python(code) == 0
