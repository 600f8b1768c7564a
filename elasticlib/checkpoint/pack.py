"""Pack: a state as one range of bytes, the same on disk, in shared memory and between nodes.

A pack is a safetensors file (see `safetensors_header`), so any tool can open it. Each tensor is an
entry under its name in the state, such as `model/layers.0.weight`. Tensors that are the same memory
(tied weights) are one entry, and are the same memory again when the pack is read. A dense tensor
whose dimensions are in another order in memory (channels_last, transposed), or whose dtype
safetensors does not know, is an entry of bytes, `NAME~storage`; its strides are restored. All other
tensors (with gaps, expanded, overlapping, conjugated, negated) are saved as plain dense values.

In a rank's part of a sharded state, a shard is an entry under the name of its tensor. If only some
of the ranks have that tensor, its name is followed by `~mesh` and these ranks: the stages of a
pipeline can have different tensors of one name, and no tool must take one for the other.

A layout depends on the structure of the state, and on the dtypes, shapes, strides and devices of
its tensors. `LayoutCache` reuses it, with views of the memory that is copied to, so that a snapshot
in a training loop costs one walk over the state and one `torch._foreach_copy_`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import attrs
import torch

from ..errors import CheckpointCorruptError, CheckpointError
from .safetensors_header import (
    ARRAY_DTYPES,
    CRC_BYTES,
    DTYPES,
    PackEntry,
    PackHeader,
    compact_json,
    encode_header,
    order_entries,
    read_header,
    state_capacity,
)
from .state_tree import (
    FlatState,
    StatePath,
    TreeEncoding,
    decode_path,
    encode_path,
    encode_structure,
    flatten,
    format_path,
    path_name,
    unflatten,
)
from .tensor_layout import (
    MapLocation,
    StridedLayout,
    copy_from_devices,
    device_tag,
    dtype_from_name,
    dtype_name,
    is_copyable,
    lock_pages,
    relocated,
    strided_view,
)

if TYPE_CHECKING:
    from .snapshot_slots import MappedSlot

_TensorKey: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]
SMALL_BYTES = 64 << 10  # The copy of such a tensor costs little, and keeping it must not cost much.
_ENTRY_DTYPES = {dtype_from_name(name): entry for entry, name in DTYPES.items()}
_STORAGE = "~storage"  # No name of a tensor contains this: a "~" in a key is written "~0".
_DECODING_ERRORS = (
    *(AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError),
)


@attrs.frozen(eq=False)
class Shards:
    """The sharded tensors of a rank's part of a state."""

    tensors: Mapping[StatePath, torch.Tensor]  # this rank's elements of each one in this part
    offsets: Sequence[tuple[int, ...]]  # of these elements in the whole tensors
    meshes: Sequence[str]  # the ranks that have each of these tensors; "" if all ranks have it
    paths: Sequence[StatePath]  # of all sharded tensors of the state
    has_rest: bool  # whether this part contains what is not sharded, too
    rest_mesh: str = ""  # the ranks for which this is the rest; "" if it is for all ranks


@attrs.frozen(eq=False)
class PackLayout:
    """The position of each tensor of a state in a pack. It refers to no memory of the state."""

    key: tuple[Any, ...]  # what the layout depends on
    header: bytes  # all bytes before `~state`
    tree: str  # the end of the text of `~state`
    start: int  # offset of the first byte after `~state`
    size: int  # of the pack, in bytes
    stored: tuple[int, ...]  # the tensors that are copied, by their positions in the state
    offsets: tuple[int, ...]  # of each of them in the pack, in bytes
    layouts: tuple[StridedLayout, ...]  # of each of them in the pack
    devices: frozenset[torch.device]  # other than the CPU, from which tensors are copied
    structure_crc: int  # CRC-32 of the structure of the state

    def encode_head(self, values: str) -> bytes | None:
        """Return all bytes before the tensors, or None if there is no room for the values."""
        head = self.header + _state_text(values, self.tree)
        return head.ljust(self.start) if len(head) <= self.start else None

    def views(self, buffer: memoryview | bytearray) -> list[torch.Tensor]:
        """Return the tensors that `PackImage.copy_to` fills, as views of a buffer."""
        if not self.stored:
            return []
        # The views are reused. If they were created in inference mode, copies to them would fail
        # outside of it.
        with torch.inference_mode(mode=False):
            storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
            return [
                strided_view(storage, offset // layout.dtype.itemsize, layout)
                for offset, layout in zip(self.offsets, self.layouts, strict=True)
            ]


@attrs.frozen(eq=False)
class PackImage:
    """A pack that is not copied yet: what precedes the tensors, and those of the state itself."""

    layout: PackLayout
    head: bytes
    values_digest: str  # of the plain values, the generators and the structure; "" if not here
    sources: list[torch.Tensor]  # in the order of the pack

    @property
    def size(self) -> int:
        """The size of the pack in bytes."""
        return self.layout.size

    def copy_to_slot(self, slot: MappedSlot) -> None:
        """Copy the pack to a slot, whose views are reused if the layout is that of the last copy.

        The pages of the slot are locked if tensors are on a GPU.
        """
        layout, memory = self.layout, slot.view(self.size)
        if layout.devices:
            lock_pages(slot)
        self.copy_to(memory, slot.views_of(layout, lambda: layout.views(memory)))

    def copy_to(
        self, buffer: memoryview | bytearray, views: list[torch.Tensor] | None = None
    ) -> None:
        """Copy the pack to a buffer, without its checksum, and wait until the tensors are there.

        Args:
            buffer: Writable memory of at least `size` bytes, at a multiple of 64 bytes.
            views: The result of `layout.views(buffer)`, if it is known.
        """
        buffer[: len(self.head)] = self.head
        buffer[self.size - CRC_BYTES : self.size] = bytes(CRC_BYTES)
        if not self.sources:
            return
        targets = self.layout.views(buffer) if views is None else views
        if self.layout.devices:
            copy_from_devices(targets, self.sources, self.layout.devices)
        elif True in [source.requires_grad for source in self.sources]:
            with torch.no_grad():
                torch._foreach_copy_(targets, self.sources)
        else:
            torch._foreach_copy_(targets, self.sources)


class LayoutCache:
    """The last two layouts, which are reused while the structure of the state is the same.

    There are two, because a save of a rank's part may need another layout than a snapshot of the
    part. Not thread-safe. If an exception of a signal handler interrupts a method at any line, the
    cache can still be used.
    """

    def __init__(self) -> None:
        self._last: list[PackLayout] = []  # the newest one first

    def plan(
        self, flat: FlatState, meta: Mapping[str, Any] | None = None, shards: Shards | None = None
    ) -> PackImage:
        """Plan the pack of a state.

        Args:
            flat: The state.
            meta: JSON values for `read_meta`, such as the step.
            shards: The sharded tensors, if the pack is a rank's part of a sharded state.

        Raises:
            CheckpointError: The state contains a tensor or a key that cannot be saved; the message
                names its path.
        """
        has_rest = shards is None or shards.has_rest
        tensors = list(flat.tensors) if has_rest else []
        structure, values = (flat.structure, flat.values) if has_rest else ([], [])
        if shards is not None:
            tensors += shards.tensors.values()
        try:
            forms = [(t.dtype, t.shape, t.stride(), t.device) for t in tensors]
            groups = _alias_groups(tensors, forms)
        except RuntimeError:
            _reject_tensors(flat, tensors, shards)
            raise
        parts = None
        if shards is not None:
            names = (has_rest, tuple(shards.tensors), tuple(shards.paths), shards.rest_mesh)
            parts = (*names, tuple(shards.offsets), tuple(shards.meshes))
        key = (structure, forms, groups, parts)
        text = compact_json({"meta": meta or {}, "values": values})
        layout, head = None, None
        for known in self._last:
            if _are_equal(known.key, key) and (head := known.encode_head(text)) is not None:
                layout = known
                break
        if layout is None or head is None:
            layout = _build_layout(tensors, key, text, shards)
            self._last = [layout, *self._last[:1]]
            head = layout.encode_head(text) or b""  # There is room in a new layout.
        digest = _digest_values(flat, layout) if has_rest else ""
        return PackImage(layout, head, digest, [tensors[at] for at in layout.stored])


def plan_layout(state: object, meta: Mapping[str, Any] | None = None) -> PackImage:
    """Plan the pack of a state that has no sharded tensors.

    Args:
        state: As `state_tree.flatten` takes it.
        meta: JSON values for `read_meta`, such as the step.

    Raises:
        CheckpointError: The state contains something that cannot be saved; the message names its
            path.
    """
    return LayoutCache().plan(flatten(state), meta)


def pack_state(state: object, meta: Mapping[str, Any] | None = None) -> memoryview:
    """Return the pack of a state in new memory. Arguments and errors are those of `plan_layout`."""
    image = plan_layout(state, meta)
    memory = bytearray(image.size)
    image.copy_to(memory)
    return memoryview(memory)


# -- planning --------------------------------------------------------------------------------------


def _digest_values(flat: FlatState, layout: PackLayout) -> str:
    """Return a digest that is equal for two ranks with the same plain values and generators."""
    crc = zlib.crc32(compact_json(flat.values).encode())
    for at in flat.generators:
        state = flat.tensors[at]  # on the CPU, also that of a generator of a GPU
        crc = zlib.crc32(ctypes.string_at(state.data_ptr(), state.nbytes), crc)
    return f"{layout.structure_crc:08x}{crc:08x}"


def _are_equal(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    try:
        return bool(key == other)
    except Exception:  # A key of a dict in the state has no usable comparison.
        return False


def _alias_groups(tensors: list[torch.Tensor], forms: list[_TensorKey]) -> list[int] | None:
    """Return, for each tensor, the position of the first tensor with the same memory and form.

    Return None if no two tensors begin at the same address, as is nearly always the case.
    """
    pointers = [tensor.data_ptr() for tensor in tensors]
    if len({*pointers}) == len(pointers):
        return None
    first: dict[Any, int] = {}
    groups = []
    for at, (tensor, pointer, form) in enumerate(zip(tensors, pointers, forms, strict=True)):
        # Tensors without elements share nothing.
        memory = (pointer, *form, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else at
        groups.append(first.setdefault(memory, at))
    return groups


def _build_layout(
    tensors: list[torch.Tensor],
    key: tuple[Any, ...],
    values: str,
    shards: Shards | None,
) -> PackLayout:
    """Compute the layout of a pack with room for `values`; see `LayoutCache.plan` for `key`."""
    structure, _, groups, _ = key
    groups = list(range(len(tensors))) if groups is None else groups
    unique = [at for at, first in enumerate(groups) if first == at]
    number_of = {at: number for number, at in enumerate(unique)}
    numbers = [number_of[first] for first in groups]
    tree, places, arrays = _describe_tensors(structure, numbers, shards)
    for at in unique:
        _check_tensor(places[at].path, tensors[at])
    names = _unique_names([places[at] for at in unique])
    layouts = [StridedLayout.of(tensors[at]).densified() for at in unique]
    order = order_entries([layout.num_bytes for layout in layouts])
    entries, rows, sizes = [], [None] * len(unique), [layouts[number].num_bytes for number in order]
    ends = [*itertools.accumulate(sizes, initial=0)]
    for place, number in enumerate(order):
        at, layout = unique[number], layouts[number]
        plain, row = _entry_and_row(tensors[at], layout, arrays.get(at), place)
        suffix, dtype, shape = plain or (_STORAGE, "U8", (layout.num_bytes,))
        name = names[number] + suffix
        entries.append(PackEntry(name, dtype, shape, ends[place], ends[place + 1]))
        rows[number] = row
    tree["tensors"] = rows
    text = f',"tree":{compact_json(tree)}}}'
    capacity = state_capacity(_state_text(values, text))
    offsets = {names[number]: places[at].offsets for number, at in enumerate(unique)}
    header, size = encode_header(capacity, entries, None if shards is None else offsets)
    copied = [place for place, number in enumerate(order) if layouts[number].num_bytes]
    return PackLayout(
        key=key,
        header=header,
        tree=text,
        start=len(header) + capacity,
        size=size,
        stored=tuple(unique[order[place]] for place in copied),
        offsets=tuple(len(header) + capacity + ends[place] for place in copied),
        layouts=tuple(layouts[order[place]] for place in copied),
        structure_crc=zlib.crc32(compact_json(tree.get("tree")).encode()),
        devices=frozenset(tensors[at].device for at in unique if not tensors[at].is_cpu),
    )


class _Place(NamedTuple):
    """The place of a tensor in the state."""

    path: StatePath
    mesh: str  # the ranks that have it; "" if all ranks do
    offsets: tuple[int, ...] | None = None  # of a shard


def _describe_tensors(
    structure: Sequence[Any], numbers: list[int], shards: Shards | None
) -> tuple[dict[str, Any], list[_Place], Mapping[int, Any]]:
    """Return the tree of a pack without its rows, the place of each tensor, and the arrays.

    Args:
        structure: The structure of the state, if it is in the pack.
        numbers: The number of each tensor in the pack.
        shards: See `LayoutCache.plan`.
    """
    encoding = encode_structure(structure, numbers) if structure else TreeEncoding()
    tree: dict[str, Any] = {"tree": encoding.tree} if structure else {}
    if shards is None:
        return tree, [_Place(path, "") for path in encoding.paths], encoding.arrays
    tree["shards"] = numbers[len(encoding.paths) :]
    if shards.has_rest:
        tree["shard_paths"] = [encode_path(path) for path in shards.paths]
    places = [_Place(path, shards.rest_mesh) for path in encoding.paths]
    places += map(_Place, shards.tensors, shards.meshes, shards.offsets)
    return tree, places, encoding.arrays


def _state_text(values: str, tree: str) -> bytes:
    """Return the text of `~state`, without the spaces at its end."""
    return f"{values[:-1]}{tree}".encode("ascii")


def _entry_and_row(
    tensor: torch.Tensor, layout: StridedLayout, array: Any, place: int
) -> tuple[tuple[str, str, tuple[int, ...]] | None, Any]:
    """Return the entry of a tensor, and the row that describes the tensor in the tree.

    The entry is the suffix of its name, its dtype and its shape; or None if the entry has to be one
    of bytes. The row of a plain tensor on the CPU is the number of its entry.
    """
    if array is not None:
        array_dtype, shape, order = array
        name = ARRAY_DTYPES.get(array_dtype) if order == "C" else None
        row = ["uint8", layout.shape, layout.stride, place, ""]
        return None if name is None else ("", name, shape), row
    name = _ENTRY_DTYPES.get(tensor.dtype) if layout.is_contiguous else None
    location = device_tag(tensor)
    entry = None if name is None else ("", name, layout.shape)
    if name is not None and layout.is_row_major and location == "cpu":
        return entry, place
    return entry, [dtype_name(layout.dtype), layout.shape, layout.stride, place, location]


def _unique_names(places: Iterable[_Place]) -> list[str]:
    """Return the name of each tensor in the pack, given its place in the state.

    Raises:
        CheckpointError: Two paths have the same name.
    """
    known: dict[str, StatePath] = {}
    for path, mesh, _ in places:
        name = path_name(path)
        # safetensors has a key of this name next to the entries.
        name = "~__metadata__" if name == "__metadata__" else name
        name = f"{name}~mesh {mesh}" if mesh else name
        if name in known:
            raise CheckpointError(
                f"{format_path(known[name])} and {format_path(path)} have the same name in a file, "
                f"{name!r}: use keys that are written differently"
            )
        known[name] = path
    return [*known]


def _check_tensor(path: StatePath, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise CheckpointError(
            f"{format_path(path)} is a nested tensor, which is not saved: save the list of its "
            "tensors, tensor.unbind()"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(
            f"{format_path(path)} is a tensor without plain elements ({tensor.layout}, "
            f"{tensor.device})"
        )
    if not is_copyable(tensor.dtype):
        raise CheckpointError(
            f"{format_path(path)} is a tensor of {dtype_name(tensor.dtype)}, which torch cannot "
            "copy: save its bytes, tensor.view(torch.uint8)"
        )


def _reject_tensors(flat: FlatState, tensors: list[torch.Tensor], shards: Shards | None) -> None:
    """Raise CheckpointError for the first tensor that cannot be saved, if there is one."""
    paths: list[StatePath] = []
    if shards is None or shards.has_rest:
        paths = encode_structure(flat.structure, range(len(flat.tensors))).paths
    if shards is not None:
        paths = [*paths, *shards.tensors]
    for path, tensor in zip(paths, tensors, strict=True):
        _check_tensor(path, tensor)


# -- reading ---------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class PartContents:
    """A rank's part of a sharded state."""

    state: Any  # what is not sharded, with None in place of sharded tensors
    paths: tuple[StatePath, ...]  # of all sharded tensors, if the state is here
    has_rest: bool  # whether what is not sharded is here
    shards: list[torch.Tensor]  # this part's elements of sharded tensors, in the order of the rows


def unpack(pack: memoryview, *, map_location: MapLocation = "cpu", copy: bool = True) -> Any:
    """Return the state in a pack.

    Args:
        pack: Writable memory, at a multiple of 64 bytes.
        map_location: The devices for tensors, as `torch.load` takes it. NumPy arrays stay.
        copy: Whether all tensors get memory of their own. If not, tensors on the CPU of more than
            `SMALL_BYTES` are views of the pack, and keep all of its memory.

    Raises:
        CheckpointCorruptError: The bytes are not a pack, or its header was changed or truncated.
            (The elements are not checked here.)
        CheckpointUnreadableError: Another version wrote the pack in another format, or NumPy is
        missing.
    """
    return unpack_part(pack, map_location=map_location, copy=copy).state


def unpack_part(
    pack: memoryview, *, map_location: MapLocation = "cpu", copy: bool = True
) -> PartContents:
    """Return the contents of a rank's part. Arguments and errors are those of `unpack`.

    Sharded tensors are not moved to another device.
    """
    header = read_header(pack)
    if len(pack) < header.size:
        raise CheckpointCorruptError(f"the pack has {header.size} bytes, got {len(pack)}")
    data = pack[header.start : header.size]
    with _translate_decoding_errors("list of tensors"):
        stored = [_stored_tensor(data, row, header) for row in header.tree["tensors"]]
        numbers = header.tree.get("shards", [])
        shards = [stored[number][0] for number in numbers if number >= 0]
    # Errors of a device or of the caller's function are not errors of the pack.
    tensors = [
        relocated(
            tensor.clone() if copy or tensor.nbytes <= SMALL_BYTES else tensor,
            location,
            map_location,
        )
        for tensor, location in stored
    ]
    with _translate_decoding_errors("tree"):
        if "tree" not in header.tree:
            return PartContents(None, (), False, shards)
        state = unflatten(header.tree["tree"], header.values, tensors)
        paths = tuple(map(decode_path, header.tree.get("shard_paths", [])))
        return PartContents(state, paths, True, shards)


@contextlib.contextmanager
def _translate_decoding_errors(what: str) -> Iterator[None]:
    """Raise a decoding error of the block as a CheckpointCorruptError about the pack's `what`."""
    try:
        yield
    except _DECODING_ERRORS as error:
        raise CheckpointCorruptError(f"the pack's {what} cannot be decoded: {error}") from error


def _stored_tensor(data: memoryview, row: Any, header: PackHeader) -> tuple[torch.Tensor, str]:
    """Return a tensor as a view of the data, and the device from which it was saved."""
    if type(row) is int:
        entry, location = header.entries[_count(row)], "cpu"
        dtype = dtype_from_name(DTYPES[entry.dtype])
        base = _bytes_at(data, entry)
        return base.view(dtype).view(entry.shape), location
    name, shape, stride, place, location = row
    if len(shape) != len(stride) or type(location) is not str:
        raise ValueError(f"a tensor cannot be {row!s:.200}")
    layout = StridedLayout(
        dtype_from_name(name), tuple(map(_count, shape)), tuple(map(_count, stride))
    )
    base = _bytes_at(data, header.entries[_count(place)])
    if not layout.is_dense or layout.num_bytes != len(base):
        raise ValueError(f"a tensor of {row!s:.200} is not the {len(base)} bytes of its entry")
    return strided_view(base.untyped_storage(), 0, layout), location


def _bytes_at(data: memoryview, entry: PackEntry) -> torch.Tensor:
    size = entry.end - entry.begin
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=entry.begin)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value
