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
PLACE = ROOT / ".venv-pythons"
SECONDS = 1500.0
"""For each step: a torch with its CUDA libraries is some gigabytes."""


def at_hand() -> dict[str, Path]:
    """An interpreter for each minor version, of several the one with the least patches: Debian's
    rather than one that was put beside it."""
    folders = [Path(folder) for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)]
    if shutil.which("pyenv"):
        asked = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
        folders += sorted(Path(asked.stdout.strip()).glob("versions/*/bin"))
    names = ["python3", *(f"python{version}" for version in SUPPORTED)]
    found: dict[str, tuple[tuple[int, ...], Path]] = {}
    for path in (folder / name for folder in folders for name in names):
        version = version_of(path)
        minor = ".".join(map(str, version[:2]))
        if version and minor in SUPPORTED and version < found.get(minor, ((99,), path))[0]:
            found[minor] = version, path
    return {minor: path for minor, (_, path) in sorted(found.items())}


def version_of(path: Path) -> tuple[int, ...]:
    """Nothing for what is no interpreter, or cannot make an environment."""
    code = "import sys, ensurepip, venv; print(*sys.version_info[:3])"
    if not os.access(path, os.X_OK):
        return ()
    asked = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    return tuple(map(int, asked.stdout.split())) if asked.returncode == 0 else ()


def try_one(python: Path, place: Path, *, demo: bool) -> str:
    """What did not work, or nothing."""
    begin = [python, "-m", "venv", place]
    if demo:
        begin = ["make", "--no-print-directory", "demo", f"PYTHON={python}", f"VENV={place}"]
    # Resolved with what the metadata says: nothing but that is downloaded.
    resolve = [place / "bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
    resolve += ["--dry-run", "--quiet", "--constraint", "constraints.txt", "--editable", ".[dev]"]
    for command in (begin, resolve):
        said = " ".join(map(str, command))
        try:
            ran = subprocess.run(command, cwd=ROOT, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"{said}: not done after {SECONDS:g} s"
        if ran.returncode:
            return f"{said}: exit code {ran.returncode}"
    return ""


def main(given: list[str]) -> int:
    found = at_hand()
    resolve = "--resolve" in given
    asked = [word for word in given if word != "--resolve"]
    own = ".".join(map(str, sys.version_info[:2]))
    wanted = asked or list(found)
    failed = 0
    for version in [version for version in (asked or SUPPORTED) if version not in found]:
        print(f"Python {version}: not at hand", flush=True)
        failed += version in asked
    for version in [version for version in wanted if version in found]:
        full = ".".join(map(str, version_of(found[version])))
        print(f"Python {full}, {found[version]}", flush=True)
        place = PLACE / version
        shutil.rmtree(place, ignore_errors=True)
        try:
            demo = not resolve or version == own
            why = try_one(found[version], place, demo=demo)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        print(
            f"Python {full}: {why or ('set up, demo run' if demo else 'all is found')}", flush=True
        )
        failed += bool(why)
    print(f"{len([v for v in wanted if v in found]) - failed} passed, {failed} failed")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
