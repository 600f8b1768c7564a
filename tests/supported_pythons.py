"""Run the commands of README.md on each Python version that the README names and that is installed.

`make demo` runs as for a new user, in a virtual environment that is removed afterwards. What
`make test` would install in addition is only resolved, not installed.

Usage: `python tests/supported_pythons.py [--resolve] [3.10 ...]`. By default the script tries all
versions, and lists those that it does not find. With `--resolve`, the demo runs only on the version
of the current interpreter, because each other version would download some gigabytes for torch. For
the other versions the script only checks that pip can resolve all dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".venv-pythons"
STEP_TIMEOUT_S = 1500.0  # torch with its CUDA libraries is a download of some gigabytes


def find_interpreters() -> dict[str, Path]:
    """Return an interpreter for each minor version that is installed.

    Of several interpreters of one version it is that of the lowest patch release, which is likely
    the one of the distribution.
    """
    folders = [Path(folder) for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)]
    if shutil.which("pyenv"):
        pyenv = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
        folders += sorted(Path(pyenv.stdout.strip()).glob("versions/*/bin"))
    names = ["python3", *(f"python{version}" for version in SUPPORTED)]
    found: dict[str, tuple[tuple[int, ...], Path]] = {}
    for path in (folder / name for folder in folders for name in names):
        version = read_version(path)
        minor = ".".join(map(str, version[:2]))
        if version and minor in SUPPORTED and version < found.get(minor, ((99,), path))[0]:
            found[minor] = version, path
    return {minor: path for minor, (_, path) in sorted(found.items())}


def read_version(path: Path) -> tuple[int, ...]:
    """Return the version of an interpreter, or () if it cannot create environments."""
    code = "import sys, ensurepip, venv; print(*sys.version_info[:3])"
    if not os.access(path, os.X_OK):
        return ()
    result = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    return tuple(map(int, result.stdout.split())) if result.returncode == 0 else ()


def try_interpreter(python: Path, environment: Path, *, demo: bool) -> str:
    """Return what failed, or "" if all steps succeeded."""
    setup = [python, "-m", "venv", environment]
    if demo:
        setup = ["make", "--no-print-directory", "demo", f"PYTHON={python}", f"VENV={environment}"]
    # Resolving needs only the metadata of the packages.
    resolve = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
    resolve += ["--dry-run", "--quiet", "--constraint", "constraints.txt", "--editable", ".[dev]"]
    for command in (setup, resolve):
        line = " ".join(map(str, command))
        try:
            result = subprocess.run(command, cwd=ROOT, timeout=STEP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"{line}: not done after {STEP_TIMEOUT_S:g} s"
        if result.returncode:
            return f"{line}: exit code {result.returncode}"
    return ""


def main(arguments: list[str]) -> int:
    found = find_interpreters()
    resolve = "--resolve" in arguments
    named = [argument for argument in arguments if argument != "--resolve"]
    own = ".".join(map(str, sys.version_info[:2]))
    wanted = named or list(found)
    failed = 0
    for version in [version for version in (named or SUPPORTED) if version not in found]:
        print(f"Python {version}: not installed", flush=True)
        failed += version in named
    for version in [version for version in wanted if version in found]:
        full = ".".join(map(str, read_version(found[version])))
        print(f"Python {full}, {found[version]}", flush=True)
        environment = ENVIRONMENTS / version
        shutil.rmtree(environment, ignore_errors=True)
        try:
            demo = not resolve or version == own
            success = "the demo succeeded" if demo else "all dependencies can be resolved"
            failure = try_interpreter(found[version], environment, demo=demo)
        finally:
            shutil.rmtree(environment, ignore_errors=True)
        print(f"Python {full}: {failure or success}", flush=True)
        failed += bool(failure)
    print(f"{len([v for v in wanted if v in found]) - failed} passed, {failed} failed")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
