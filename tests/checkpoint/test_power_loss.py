"""A kill or a loss of power at any write of a commit leaves the old or the new state.

The test models the contents of the disk after each call. After a kill, all written data exist.
After a loss of power, contents that were not synced are lost. Of the file names that were not
synced, either none exist, or only the renamed ones, or all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.commit import Committer
from elasticlib.checkpoint.refs import KeepLast, Writer, begin
from elasticlib.checkpoint.storage import CHECKSUM_BYTES, DiskCalls, LocalStorage
from elasticlib.checkpoint.writer import write_alone

Image = dict[str, bytes]


class RecordingDisk(DiskCalls):
    """A disk that records after each call which files a kill or a loss of power would leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.images: list[Image] = []
        # The contents by inode, and the names by directory, at the last sync.
        self.contents: dict[int, bytes] = {}
        self.names: dict[str, dict[str, int]] = {}
        self.renamed: dict[str, dict[str, int]] = {}
        for top, folders, files in os.walk(folder):
            for name in files:
                path = os.path.join(top, name)
                self.contents[os.stat(path).st_ino] = Path(path).read_bytes()
            self._sync_names(top, [*folders, *files])

    def _sync_names(self, folder: str, names: list[str]) -> None:
        self.renamed.pop(folder, None)
        self.names[folder] = {name: os.stat(f"{folder}/{name}").st_ino for name in names}

    def _record(self) -> None:
        self.images += [
            image
            for image in (
                self._after_kill(),
                *(self._synced({}), self._synced(self.renamed), self._with_all_names()),
            )
            if image not in self.images
        ]

    def _synced(self, more: dict[str, dict[str, int]]) -> Image:
        files: Image = {}

        def walk(folder: str) -> None:
            names = self.names.get(folder, {}) | more.get(folder, {})
            for name, inode in names.items():
                path = f"{folder}/{name}"
                if path in self.names:
                    walk(path)
                else:
                    files[path] = self.contents.get(inode, b"")

        walk(self.folder)
        return files

    def _files(self) -> list[Path]:
        return [path for path in Path(self.folder).rglob("*") if path.is_file()]

    def _with_all_names(self) -> Image:
        return {str(path): self.contents.get(path.stat().st_ino, b"") for path in self._files()}

    def _after_kill(self) -> Image:
        return {str(path): path.read_bytes() for path in self._files()}

    def create(self, path: str) -> int:
        handle = super().create(path)
        # The inode number may belong to a deleted file.
        self.contents.pop(os.fstat(handle).st_ino, None)
        self._record()
        return handle

    def write(self, handle: int, data: memoryview) -> int:
        count = super().write(handle, data[: (len(data) + 1) // 2])
        self._record()
        return count

    def sync(self, handle: int) -> None:
        super().sync(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        if os.path.isdir(path):
            self._sync_names(path, os.listdir(path))
        else:
            self.contents[os.fstat(handle).st_ino] = Path(path).read_bytes()
        self._record()

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        folder, name = os.path.split(new)
        self.renamed.setdefault(folder, {})[name] = os.stat(new).st_ino
        self._record()

    def make_folder(self, path: str) -> None:
        super().make_folder(path)
        self.names.pop(path, None)
        self._record()

    def remove(self, path: str) -> None:
        super().remove(path)
        self._record()

    def remove_folder(self, path: str) -> None:
        super().remove_folder(path)
        self._record()


def committer(folder: Path, disk: DiskCalls | None = None) -> Committer:
    writer, catalog = Writer("r", "l", 1), CheckpointCatalog(LocalStorage(folder, disk))
    return Committer(catalog, writer, begin(None, writer), KeepLast(1))


def restored(image: Image, folder: Path, place: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the complete checkpoints in a directory with these files, newest first."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for path, content in image.items():
        copy = place / Path(path).relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    shelf = CheckpointCatalog(LocalStorage(place))
    for ref in shelf.live_refs():
        if ref.is_usable and not shelf.find_corruption(ref):
            yield ref.step, bytes(shelf.read(ref))[:-CHECKSUM_BYTES]


def test_a_kill_or_a_loss_of_power_at_any_write_leaves_the_old_or_the_new_state(
    tmp_path: Path,
) -> None:
    folder, place = tmp_path / "checkpoints", tmp_path / "restored"
    folder.mkdir()
    commits = (
        (1, b"old", None),
        (2, b"new", (1, b"old")),
        (2, b"newer", (2, b"new")),
    )
    for step, data, older in commits:
        disk = RecordingDisk(folder)
        write_alone(committer(folder, disk), step, memoryview(data + bytes(CHECKSUM_BYTES)))
        assert len(disk.images) > 6
        seen = set()
        for image in disk.images:
            newest = next(restored(image, folder, place), None)
            assert newest in (older, (step, data)), (newest, list(image))
            seen.add(newest)
            write_alone(committer(place), 3, memoryview(b"next of step"))
            assert list(restored_in(place)) == [3]
        assert seen == {older, (step, data)}
        assert next(restored(disk.images[-1], folder, place)) == (step, data)


def restored_in(place: Path) -> Iterator[int]:
    refs = CheckpointCatalog(LocalStorage(place)).live_refs()
    return (ref.step for ref in refs if ref.is_usable)
