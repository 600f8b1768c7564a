"""Training whose weights do not depend on the world size: a fixed number of logical workers.

What must be alike on all ranks, and from start to start, is compared where it can be read off, and
named where it differs. What cannot (that the program draws no other random numbers, that its
kernels give the same bits each time) stands in docs/same_weights.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.position import check_int, share_of
from ..errors import ConfigError, NotReproducible, StateMismatch
from .gradients import BUCKET_BYTES, Exchange, ModelSum
from .shares import seed_of, workers_of

FORMAT = 1
"""The version of the plain form of a state."""
ADVICE = {
    "threads": "call torch.set_num_threads(1), or another fixed number, before training;"
    " launchers choose it by the number of workers on a node",
    "weights": "load the same checkpoint on every rank, or seed torch alike before making them",
}
"""What to do about a difference, where the name does not say it."""


class LogicalWorker:
    """One of the fixed number of workers among which the job deals each global batch.

    Attributes:
        index, count: which one of how many, from 0.
        step: the step of the job that it is computing.
        seed: what torch's random numbers are seeded with while it does; for other generators
            that its forward pass uses, such as numpy's.
    """

    def __init__(self, index: int, count: int, step: int, seed: int) -> None:
        self.index, self.count, self.step = index, count, step
        self.seed = seed_of(seed, step, index, "model")
        self._data_seed = seed_of(seed, step, index, "data")

    def samples(self, batch: int) -> range:
        """Which samples of a global batch of `batch` are its own, counted from the batch's first.

        The same at any world size; empty where there are fewer samples than logical workers.
        """
        return share_of(batch, rank=self.index, world_size=self.count)

    @cached_property
    def generator(self) -> torch.Generator:
        """For its augmentations: random numbers on the CPU apart from those of the model."""
        return torch.Generator().manual_seed(self._data_seed)


class LogicalWorkers:
    """Deals the fixed number of logical workers to the ranks, and adds up their gradients::

        logical = LogicalWorkers(model, 8)
        for step in range(first, last):
            for worker in logical.step(step):            # those of this rank, one after another
                mine = worker.samples(len(batch))
                loss = loss_of(model(batch[mine])).sum() / len(batch)
                loss.backward()
            logical.reduce()                             # now .grad is the whole batch's
            optimizer.step()

    A logical worker's loss is a *share*: the sum over its samples, divided by the number of samples
    in the global batch, so that the shares add up to the batch's mean. Several calls of `backward`
    for one logical worker add up; one without samples needs none.

    The model is a plain one (no DistributedDataParallel), the same on every rank. Without a process
    group, this process computes all logical workers. docs/same_weights.md has the promises, the
    cost, and what your program must do.

    Args:
        model: whose parameters are trained; those with `requires_grad`, looked up at each step.
        count: the number of logical workers, and so the largest world size. A state of another
            count is refused, since other weights would follow.
        seed: of all random numbers; the same on every rank.
        group: the process group whose ranks share the work; by default all.
        bucket_bytes: how much of the gradient is exchanged at once.

    Raises:
        ConfigError: `count`, `seed` or `bucket_bytes` cannot be, there are more ranks than logical
            workers, or the model is already a parallel one.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        count, seed = check_int("count", count), check_int("seed", seed)
        if count < 1 or bucket_bytes < 1:
            raise ConfigError(f"need count and bucket_bytes >= 1, got {count} and {bucket_bytes}")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the model is a DistributedDataParallel, which reduces gradients itself, in an"
                " order of its own: pass the model that it wraps, model.module"
            )
        self.model, self.count, self.seed = model, count, seed
        self._group, self._bucket_bytes = group, bucket_bytes
        self.regrouped()

    def regrouped(self) -> None:
        """The process group has other members: share the work among them, from the next step on.
        A step that was left in the middle is to be begun again."""
        self._exchange = Exchange(self.count, self._group, self._bucket_bytes)
        self._sum: ModelSum | None = None
        self._step: int | None = None
        self._done = 0

    @property
    def workers(self) -> range:
        """The logical workers of this rank: neighbours, as many as other ranks have or one more."""
        return workers_of(self.count, self._exchange.world_size, self._exchange.rank)

    def samples(self, batch: int) -> range:
        """Which samples of a global batch of `batch` this rank needs: its workers', in order."""
        mine, count = self.workers, self.count
        first, last = (share_of(batch, rank=at, world_size=count) for at in (mine[0], mine[-1]))
        return range(first.start, last.stop)

    def step(self, step: int) -> Iterator[LogicalWorker]:
        """This rank's logical workers, to be computed in the loop's body, one after another.

        Each iteration begins without gradients, and with torch's random numbers seeded by seed,
        step and logical worker. An interrupted step may be started again. At the first step, and
        when there are other parameters than before, the ranks compare their weights and what they
        compute with; that reads all weights once.

        Raises:
            ConfigError: `step` is negative or no integer, a parameter cannot be used, or the GPU is
                not set to be deterministic.
            NotReproducible: the ranks differ, a buffer of the model was changed, a gradient is
                sparse, or another step was not reduced; the message names what and what to do. The
                weights have not changed.
        """
        step = check_int("step", step)
        total = self._begin(step)
        buffers = buffers_of(self.model)
        for index in self.workers:
            worker = LogicalWorker(index, self.count, step, self.seed)
            seed_all(worker.seed, total.parameters.values())
            yield worker
            check_buffers(self.model, buffers, index)
            total.take(index)
            self._done += 1

    def reduce(self) -> None:
        """Add up the gradients of all logical workers, into `.grad`; called by all ranks.

        A parameter for which no logical worker had a gradient has None. The tensors are reused at
        the next step. Random numbers drawn from here on, by the optimizer say, are seeded by seed
        and step alone.

        Raises:
            NotReproducible: the loop over `step` has not come to its end.
        """
        total, step, mine = self._sum, self._step, self.workers
        if total is None or step is None or self._done != len(mine):
            raise NotReproducible(
                f"of logical workers {list(mine)} only {list(mine[: self._done])} are done: reduce"
                " comes once in each step, after the whole loop over LogicalWorkers.step"
            )
        total.complete()
        seed_all(seed_of(self.seed, step, self.count, "update"), total.parameters.values())
        self._step, self._done = None, 0

    def state_dict(self) -> dict[str, Any]:
        """What has to be the same wherever training goes on: for the job's checkpoint."""
        mine = conditions(self._parameters())
        return {"format": FORMAT, "count": self.count, "seed": self.seed, "conditions": mine}

    def load_state_dict(
        self, state: Mapping[str, Any], *, accept_other_conditions: bool = False
    ) -> None:
        """Check that training goes on as it began; nothing is taken from the state.

        Call it once the model is on its device and torch is set up.

        Args:
            state: of any rank, and any world size.
            accept_other_conditions: whether to go on with another version of torch, number of
                threads or kind of machine; the weights may then differ in their last bits.

        Raises:
            StateMismatch: names what differs.
        """
        mine, saved = self.state_dict(), dict(state)
        conditions_here, conditions_then = (one.pop("conditions", {}) for one in (mine, saved))
        found = differences(mine, saved)
        if not found and not accept_other_conditions:
            found = differences(conditions_here, conditions_then)
        if found:
            raise StateMismatch(f"here and in the state, {found}: other weights would follow")

    def _parameters(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _begin(self, step: int) -> ModelSum:
        if self._step not in (None, step):
            raise NotReproducible(
                f"step {step} begins, and step {self._step} was begun but not reduced: call"
                " reduce after each loop over LogicalWorkers.step, or begin the same step again"
            )
        parameters = self._parameters()
        if self._sum is None or not self._sum.fits(parameters):
            total = ModelSum(parameters, self._exchange)
            check_device(parameters)
            mine = conditions(parameters) | {"weights": digest_of(self.model)}
            mine |= {"count": self.count, "seed": self.seed, "step": step}
            mine |= {"trained parameters": list(parameters)}
            check_ranks_agree(mine, self._group)
            self._sum = total
        self._sum.restart()
        # Of all parameters: one that was frozen since would keep the last step's sum, which the
        # optimizer would go on applying, and which a job that was killed would not have.
        for parameter in self.model.parameters():
            parameter.grad = None
        self._step, self._done = step, 0
        return self._sum


def conditions(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """What this process computes with, in plain values."""
    devices = {parameter.device.type for parameter in parameters.values()}
    return {
        "torch": torch.__version__.partition("+")[0],
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "devices": sorted(torch.cuda.get_device_name() if d == "cuda" else d for d in devices),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The names and values that differ, the first one's first, and what to do; or nothing."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    found = ", ".join(f"{name} is {one.get(name)} and {other.get(name)}" for name in names)
    advice = "; ".join(ADVICE[name] for name in names if name in ADVICE)
    return f"{found} ({advice})" if advice else found


def check_device(parameters: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for a GPU whose kernels may give other bits each time."""
    if not any(parameter.device.type == "cuda" for parameter in parameters.values()):
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.benchmark:
        raise ConfigError(
            "on a GPU, kernels give other bits each time: call"
            " torch.use_deterministic_algorithms(True), leave torch.backends.cudnn.benchmark"
            " False, and set CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )


def check_ranks_agree(mine: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raise NotReproducible on every rank, with the same sentence, where they do not begin alike.

    Called by all ranks.
    """
    if not dist.is_initialized():
        return
    group = dist.group.WORLD if group is None else group
    on_cpu = group is not None and "cpu:" in dist.get_backend_config(group)
    device = None if on_cpu else torch.accelerator.current_accelerator()
    # JSON, filled up with blanks: torch's all_gather_object needs NumPy.
    text = json.dumps(dict(mine)).encode()
    longest = torch.tensor([len(text)], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    said = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8).to(device)
    every = [torch.empty_like(said) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, said, group=group)
    first, *others = (json.loads(bytes(each.tolist())) for each in every)
    for rank, theirs in enumerate(others, 1):
        if found := differences(first, theirs):
            raise NotReproducible(f"ranks 0 and {rank} differ: {found}")


def digest_of(model: nn.Module) -> str:
    """Of all weights and buffers, names and bits: BLAKE2b, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous()
        size = plain.numel() * plain.element_size()
        digest.update((ctypes.c_char * size).from_address(plain.data_ptr()) if size else b"")
    return digest.hexdigest()


@attrs.frozen(eq=False)
class BufferBefore:
    """A buffer as it was before a logical worker's turn."""

    tensor: Tensor
    version: int  # `Tensor._version`, which most operations that write to a tensor raise
    content: Tensor  # a copy

    @classmethod
    def of(cls, buffer: Tensor) -> BufferBefore:
        return cls(buffer, buffer._version, buffer.detach().clone())

    def equals(self, now: Tensor | None) -> bool:
        """Return whether the buffer is the same tensor and was not written to.

        The content is compared as well as the version, because some operations write without
        raising it: `torch.nn.functional.batch_norm`, and all operations on a tensor's `.data`.
        """
        if now is not self.tensor or now._version != self.version:
            return False
        content = self.content
        if (now.dtype, now.device, now.shape) != (content.dtype, content.device, content.shape):
            return False
        # The bytes are compared, because a NaN is not equal to itself, and 0.0 is equal to -0.0.
        flat = (one.detach().reshape(-1).view(torch.uint8) for one in (now, content))
        return torch.equal(*flat)


def buffers_of(model: nn.Module) -> dict[str, BufferBefore]:
    """Return each buffer of the model, by name, with a copy of its content."""
    return {name: BufferBefore.of(buffer) for name, buffer in model.named_buffers()}


def check_buffers(model: nn.Module, before: Mapping[str, BufferBefore], worker: int) -> None:
    """Raise NotReproducible if a logical worker changed a buffer: other ranks do not see that."""
    after = dict(model.named_buffers())
    for name in {**before, **after}:
        if name not in before or not before[name].equals(after.get(name)):
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise NotReproducible(
                f"logical worker {worker} changed the buffer {name} of a {kind}: it would come to"
                " depend on which logical workers this rank computes. Use a module without"
                " running statistics (track_running_stats=False, GroupNorm, LayerNorm), put it"
                " into eval mode, or call torch.nn.functional.batch_norm with training=False or"
                " without running statistics"
            )


def seed_all(seed: int, parameters: Iterable[Tensor]) -> None:
    """Seed the generators of the CPU and of all devices of the kinds that the parameters are on.

    `torch.manual_seed` does so, too, but takes 0.4 ms to keep it in mind for all other kinds.
    """
    torch.default_generator.manual_seed(seed)
    for kind in {parameter.device.type for parameter in parameters} - {"cpu"}:
        module = torch.get_device_module(kind)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)
