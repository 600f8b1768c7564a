"""The packages that pip installs: their files, their tests, and their types."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({folder!r}))"
USES_TYPES = """
from elasticlib import ElasticBatchSampler, ElasticDistributedSampler

class OnlySized:  # as datasets of Hugging Face: no subclass of torch's Dataset
    def __len__(self) -> int:
        return 8

sampler = ElasticDistributedSampler(OnlySized(), 1, 0)
batches: list[list[int]] = list(ElasticBatchSampler(sampler, 4))
reveal_type(sampler.epoch)
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout is built"),
]


def tracked_files(*folders: str) -> set[str]:
    """Return the files of the repository in these folders, as git lists them."""
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split("\n")) - {""}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist. The wheel is built from the unpacked sdist, as pip does."""
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "source"
    for name in tracked_files():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)

    def build(kind: str, where: Path) -> Path:
        code = BUILD.format(kind=kind, folder=str(folder))
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return folder / done.stdout.split("\n")[-2]

    sdist = build("sdist", source)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("wheel", unpacked), sdist


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(
    packages: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(packages[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert names == tracked_files("elasticlib")


def test_the_sdist_has_the_tests_and_the_documentation(packages: tuple[Path, Path]) -> None:
    with tarfile.open(packages[1]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    wanted = tracked_files() - tracked_files(".ci", ".gitignore")
    assert wanted - names == set()


def test_tests_of_the_sdist_pass_with_the_installed_wheel(
    packages: tuple[Path, Path], tmp_path: Path
) -> None:
    with tarfile.open(packages[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    with zipfile.ZipFile(packages[0]) as wheel:
        wheel.extractall(tmp_path / "site")
    shutil.rmtree(unpacked / "elasticlib")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/data"],
        cwd=unpacked,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_type_checkers_find_the_types_of_an_editable_install(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "uses_types.py"
    script.write_text(USES_TYPES)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=/dev/null", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    shown = re.search(r'Revealed type is "(builtins\.)?int"', done.stdout)
    assert shown is not None, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout
