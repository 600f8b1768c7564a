"""A folder of checkpoints behind any fsspec URL: s3://, gs://, memory://, and what else there is.

There is no rename there and no lock. A commit is data first and the manifest last, which object
stores put whole or not at all; the fence is looked at right before that, as best it can be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..errors import CheckpointError
from .local import CHUNK, Place
from .summing import no_news


class RemotePlace(Place):
    """A folder that fsspec reaches (the extra `fsspec`, imported when one is first used)."""

    readers = 8

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise CheckpointError(
                f"{url} needs fsspec: pip install 'elasticlib[fsspec]', and its part for this URL"
            ) from error
        self.name = url
        try:
            self._fs: Any
            self._fs, self._root = url_to_fs(url)
        except Exception as error:
            raise CheckpointError(f"{url} cannot be opened: {error}") from error

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def folders(self) -> list[str]:
        rows = self._list("")
        return sorted(_base(row["name"]) for row in rows if row["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        rows = self._list(folder)
        return {_base(row["name"]): int(row["size"]) for row in rows if row["type"] == "file"}

    def read(self, name: str) -> bytes | None:
        with self._spoken(name):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def read_into(
        self,
        name: str,
        buffer: memoryview,
        *,
        start: int = 0,
        seen: Callable[[memoryview], None] = no_news,
    ) -> int:
        with self._spoken(name):
            for done in range(0, len(buffer), CHUNK):
                part = buffer[done : done + CHUNK]
                begin = start + done
                data = self._fs.cat_file(self._path(name), start=begin, end=begin + len(part))
                part[: len(data)] = data
                seen(part[: len(data)])
                if len(data) < len(part):
                    return done + len(data)
        return len(buffer)

    def write(self, name: str, data: memoryview) -> None:
        path = self._path(name)
        with self._spoken(name):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                with self._fs.open(path, "wb") as file:
                    for start in range(0, len(data), CHUNK):
                        file.write(data[start : start + CHUNK])
                self._fs.invalidate_cache()
                size = self._fs.info(path)["size"]
                if size != len(data):
                    raise OSError(f"{len(data)} bytes were written, and {size} are there")
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(path)
                raise

    def put(self, name: str, data: bytes) -> None:
        with self._spoken(name):
            path = self._path(name)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)

    def remove(self, name: str) -> None:
        with self._spoken(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_folder(self, folder: str) -> None:
        # Most have no folders but those that hold something.
        with contextlib.suppress(Exception):
            self._fs.rmdir(self._path(folder))

    def _list(self, folder: str) -> list[dict[str, Any]]:
        with self._spoken(folder):
            self._fs.invalidate_cache()
            try:
                return list(self._fs.ls(self._path(folder), detail=True))
            except FileNotFoundError:
                return []

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    @contextmanager
    def _spoken(self, name: str) -> Iterator[None]:
        """Each kind of file system has errors of its own: here all are OSError, and say where."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.name}/{name}: {type(error).__name__}: {error}") from error


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
