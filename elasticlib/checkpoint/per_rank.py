"""Values that each rank saves and restores for itself, such as the state of a generator.

The values of a rank are a pack of their own, as text in the header of the rank's part. So they are
meant to be small. A shard of one byte stands for them in the list of the part's shards: a state
without the values of a rank is incomplete, like one that lacks elements of a sharded tensor.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from ..errors import CheckpointCorruptError, CheckpointError, ConfigError, StateMismatchError
from ..untrusted import decompress
from .boxes import Box, TensorShard
from .pack import LayoutCache, unpack
from .state_tree import RankValues, StatePath, flatten, format_path, path_name, to_plain_values

MissingValue: TypeAlias = Callable[[int], Any]
"""Returns the value of a rank, given the rank, if no rank of this number has saved one."""

MAX_VALUES_BYTES = 64 << 20  # of one rank, before they are compressed

PATH: StatePath = (("by rank",),)  # of the shard that stands for the values of a rank
NAME = path_name(PATH)


def read_names(
    per_rank: Sequence[str] | Mapping[str, MissingValue | None],
) -> dict[str, MissingValue | None]:
    """Return the names that are saved by rank, with the functions for missing values.

    Raises:
        ConfigError: an argument is not valid.
    """
    functions = dict(per_rank) if isinstance(per_rank, Mapping) else dict.fromkeys(per_rank)
    is_valid = all(type(name) is str for name in functions)
    if isinstance(per_rank, str) or not is_valid:
        raise ConfigError(
            'per_rank must have names of the state, such as ("rng",), or a dict of names and '
            f"functions, got {per_rank!r}"
        )
    return functions


class RankValueEncoder:
    """Separates the values that a rank saves for itself from a state, and encodes them."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = tuple(names)
        self._layouts = LayoutCache()

    def split(self, state: object, rank: int, world_size: int) -> tuple[object, RankValues | None]:
        """Return the state without the values of this rank, and these values.

        Raises:
            CheckpointError: the state is not a dict with these names, or a value cannot be saved.
        """
        if not self._names:
            return state, None
        missing = [name for name in self._names if not isinstance(state, dict) or name not in state]
        if missing:
            raise CheckpointError(
                f"per_rank has {missing[0]!r}, and the state has no such name at the top level"
            )
        own = {name: state[name] for name in self._names}  # type: ignore[index]
        rest = {name: part for name, part in state.items() if name not in own}  # type: ignore[attr-defined]
        flat = flatten(own, reject_state_dicts=True)
        if flat.shards:
            raise CheckpointError(
                f"{format_path(next(iter(flat.shards)))} is a sharded tensor, which is saved by "
                "rank anyway: leave its name out of per_rank"
            )
        image = self._layouts.plan(flat)
        if image.size > MAX_VALUES_BYTES:
            raise CheckpointError(
                f"the values of per_rank {', '.join(map(repr, self._names))} have {image.size} "
                f"bytes on rank {rank}, and at most {MAX_VALUES_BYTES} are saved by rank: save "
                "large tensors as sharded tensors, or under names that are the same on all ranks"
            )
        memory = bytearray(image.size)
        image.copy_to(memory)
        text = base64.b64encode(zlib.compress(memory, 1)).decode()
        return rest, RankValues(text, rank, world_size)


def shard_of(values: RankValues) -> tuple[torch.Tensor, TensorShard]:
    """Return the shard that stands for the values of a rank."""
    box = Box((values.rank,), (1,))
    return torch.ones(1, dtype=torch.uint8), TensorShard(
        NAME, "uint8", (values.world_size,), box, (1,)
    )


def decode_values(text: object) -> dict[str, Any]:
    """Return the values of a rank.

    Raises:
        CheckpointCorruptError: the text was not written by `RankValueEncoder`.
    """
    try:
        data = decompress(base64.b64decode(str(text), validate=True), MAX_VALUES_BYTES)
    except ValueError as error:
        raise CheckpointCorruptError(f"the values of a rank cannot be decoded: {error}") from error
    values = unpack(memoryview(bytearray(data)))
    if not isinstance(values, dict):
        raise CheckpointCorruptError("the values of a rank are no dict of names")
    return values


@attrs.frozen
class RankValueRule:
    """The rule by which a rank restores values that were saved by rank."""

    functions: Mapping[str, MissingValue | None]  # see `CheckpointManager`
    rank: int
    world_size: int

    def add_values(
        self, saved: object, texts: Sequence[object], state: Mapping[str, Any]
    ) -> object:
        """Return the saved state with the values of this rank.

        Args:
            saved: what was saved for all ranks.
            texts: the encoded values by rank; empty if none were saved.
            state: the live state; names that it does not have are left out.

        Raises:
            StateMismatchError: another number of ranks has saved the values of a name, and there is
                no function for it.
        """
        if not (texts or self.functions) or not isinstance(saved, dict):
            return saved
        own = decode_values(texts[min(self.rank, len(texts) - 1)]) if texts else {}
        values = dict(saved)
        for name in (*own, *(name for name in self.functions if name not in own)):
            if name not in state:
                if name in own:
                    values[name] = own[name]  # so that `strict` applies
            elif name in own and len(texts) == self.world_size:
                values[name] = own[name]
            elif (function := self.functions.get(name)) is not None:
                is_saved = name in own and self.rank < len(texts)
                values[name] = own[name] if is_saved else to_plain_values(function(self.rank))
            else:
                raise StateMismatchError(self._describe_mismatch(name, name in own, len(texts)))
        return values

    def _describe_mismatch(self, name: str, is_saved: bool, num_ranks: int) -> str:
        path = format_path((name,))
        advice = (
            f"give a function that returns the value of a rank, CheckpointManager(..., per_rank="
            f"{{{name!r}: function}}), or restore without it, by strict=False"
        )
        if is_saved:
            return (
                f"{path} was saved by each of {num_ranks} ranks, and now there are "
                f"{self.world_size}: {advice}"
            )
        return f"{path} was not saved by rank, as per_rank has it: {advice}"
