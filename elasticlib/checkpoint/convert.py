"""States to and from what torch itself writes: `torch.save` files, and folders of its distributed
checkpoints (DCP).

Nothing is unpickled that could run code: both are read with `weights_only`, and a DCP folder's
list of contents, which is a pickle, by an unpickler that knows the classes of such lists alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ..errors import CheckpointCorrupt, CheckpointError, describe, present
from ..foreign import full_name
from .file import load_checkpoint
from .manager import CheckpointManager

_DCP_LIST = ".metadata"
"""The file that makes a folder one of DCP's."""

_LISTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}
"""What a DCP folder's list is made of, beside dtypes and the classes of DCP's `metadata`."""

_PICKLED = (
    *(pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError),
    *(KeyError, TypeError, ValueError, UnicodeDecodeError),
)
"""What Python's unpickler answers to what is none."""


def _is_dcp(path: str) -> bool:
    return Path(path, _DCP_LIST).is_file()


def is_folder(source: str) -> bool:
    """Whether this is a folder of ours, or the URL of one."""
    return "://" in source or (os.path.isdir(source) and not _is_dcp(source))


def read(source: str, step: int | None = None) -> tuple[Any, int | None]:
    """A state, and its step if it is known: of a folder of ours, of DCP's, or a file of torch's.

    Args:
        step: of a folder of ours, which one; the newest by default.

    Raises:
        CheckpointError, FileNotFoundError: there is none, it is damaged, or holds what
            `weights_only` does not read.
    """
    if not is_folder(source):
        return (_read_dcp if _is_dcp(source) else _read_torch_save)(source), None
    manager = CheckpointManager(source)
    steps = manager.steps()
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {source}")
    step = steps[-1] if step is None else step
    return manager.load(step), step


def write(target: str, state: object, form: str, step: int | None = None) -> list[str]:
    """Write a state anew.

    Args:
        form: `folder`, of which it becomes the checkpoint of `step`; `torch`, or `dcp`.

    Returns:
        The names of what that form does not keep.

    Raises:
        CheckpointError: the form does not hold such a state, or the disk failed.
    """
    if form == "dcp":
        _write_dcp(Path(target), state)
        return _empty(state)
    if form == "torch":
        _write_torch_save(Path(target), state)
        return []
    with CheckpointManager(target) as manager:
        manager.save(present(step, "a step"), _Values(state)).wait()
    return []


class _Values:
    """A state that was read, as an object: its optimizers' state dicts are all that there is."""

    def __init__(self, state: object) -> None:
        self._state = state

    def state_dict(self) -> object:
        return self._state

    def load_state_dict(self, state: object) -> None:
        self._state = state


# -- torch.save -----------------------------------------------------------------------------------


def _read_torch_save(path: str) -> Any:
    """The state in a file of `torch.save`; what `save_checkpoint` wrote is checked by its sum."""
    try:
        return load_checkpoint(path)
    except CheckpointCorrupt:
        raise
    except CheckpointError:
        pass  # it has no sum to check it by
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, *_PICKLED) as error:
        raise CheckpointError(
            f"{path} cannot be read by torch.load(weights_only=True): {error}"
        ) from error


def _write_torch_save(target: Path, state: object) -> None:
    """Write a new file that `torch.load(weights_only=True)` reads; of one that fails nothing is
    left."""
    try:
        with _aside(target) as made:
            with open(made, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            # Mapped, so that no tensor is read.
            torch.load(made, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        why = re.search(r"Unsupported [^.]*(\.[^ ][^.]*)*", str(error))
        raise CheckpointError(
            f"{target} was not written, as torch.load(weights_only=True) would not read it back: "
            f"{why[0] if why else error}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """Where something is made that then gets the name of `target`, unless it fails."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder, "made")
        yield made
        os.rename(made, target)


# -- torch.distributed.checkpoint -----------------------------------------------------------------


def _write_dcp(target: Path, state: object) -> None:
    """Write a new folder as `torch.distributed.checkpoint.save` does; of one that fails nothing is
    left.

    What DCP makes of a state it also makes of this one: keys become strings, containers dicts and
    lists, and containers that are empty are lost.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"DCP saves a dict of names, and the state is a {full_name(state)}")
    try:
        with _aside(target) as made, _in_one_process():
            dcp_save(dict(state), checkpoint_id=made, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{target} could not be written by DCP: {_why(error)}") from error


def _read_dcp(path: str) -> Any:
    """The state in a folder of DCP's, whatever the number of ranks was; its tensors put together.

    Keys are strings, as DCP has no others; but an optimizer's state has numbers again, as
    `load_state_dict` knows nothing else by its parameters.
    """
    reader, planner = _Reader(path), _Planner(flatten_state_dict=False)
    try:
        listed = reader.read_metadata()
        flat = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            if isinstance(about, metadata.TensorStorageMetadata)
            else None
            for name, about in listed.state_dict_metadata.items()
        }
        with _in_one_process():
            dcp_load(flat, storage_reader=reader, planner=planner, no_dist=True)
        return _numbered(_nested(flat, listed.planner_data or {}))
    except (CheckpointException, OSError, RuntimeError, MemoryError, *_PICKLED) as error:
        raise CheckpointError(f"{path} cannot be read as DCP's: {_why(error)}") from error


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """DCP warns that there are no other ranks, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        yield


class _Reader(FileSystemReader):
    """Reads its list of contents without running what is pickled there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:  # noqa: ARG002
        with open(Path(self.path, _DCP_LIST), "rb") as file:
            found = _ListUnpickler(file).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError(f"{_DCP_LIST} is a {full_name(found)}")
        return found


class _ListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." not in name:
            if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
            ours = getattr(metadata, name, None) if module == metadata.__name__ else None
            if getattr(ours, "__module__", None) == metadata.__name__:
                return ours
            if (module, name) in _LISTED:
                return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{_DCP_LIST} names {module}.{name}, which is not allowed")


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.original_state_dict[name] = torch.load(value, weights_only=True)
        except _PICKLED as error:
            raise CheckpointError(f"what it has as {name!r} is no plain value: {error}") from error


def _nested(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> Any:
    """The state again. In a path a whole number is the place in a list, all else a key."""
    root = _Inner()
    for name, value in flat.items():
        *above, last = paths.get(name, (name,))
        inner: dict[Any, Any] = root
        for key in above:
            inner = inner.setdefault(key, _Inner())
        inner[last] = value
    return _with_lists(root)


class _Inner(dict[Any, Any]):
    """A container on the way to its values: none of those."""


def _with_lists(value: Any) -> Any:
    if not isinstance(value, _Inner):
        return value
    found = {key: _with_lists(part) for key, part in value.items()}
    if found and all(type(key) is int for key in found):
        return [found[key] for key in sorted(found)]
    return found


def _numbered(value: Any) -> Any:
    """With numbers for the keys of an optimizer's state, of which DCP has made strings."""
    if isinstance(value, list):
        return [_numbered(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _numbered(item) for key, item in value.items()}
    groups = found.get("param_groups")
    if not (isinstance(groups, list) and found.keys() <= {"state", "param_groups"}):
        return found
    numbers = {
        str(number): number
        for group in groups
        if isinstance(group, dict) and isinstance(group.get("params"), list)
        for number in group["params"]
    }
    # One that has taken no step has an empty state, which DCP does not keep.
    states = found.get("state", {}).items()
    return {"state": {numbers.get(key, key): part for key, part in states}, "param_groups": groups}


def _empty(value: object, name: str = "") -> list[str]:
    """The names of the containers that hold nothing."""
    if not isinstance(value, Mapping):
        return []
    if not value and name:
        return [name]
    inner = ((f"{name}.{key}" if name else str(key), part) for key, part in value.items())
    return [found for path, part in inner for found in _empty(part, path)]


def _why(error: BaseException) -> str:
    """DCP wraps what went wrong on each rank; there is one."""
    if isinstance(error, CheckpointException):
        error = next((cast(Any, one)[0] for one in error.failures.values()), error)
    return describe(error)
