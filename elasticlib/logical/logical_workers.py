"""Training with a fixed number of logical workers, whose weights do not depend on the world size.

Conditions that must be the same on all ranks and after each restart are compared, as far as a
program can read them, and reported with their values. docs/bitwise_reproducibility.md lists those
that cannot be checked, such as random numbers that the script draws itself, or kernels that are not
deterministic.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.position import check_int, even_share
from ..errors import ConfigError, NotReproducibleError, StateMismatchError
from .gradient_exchange import DEFAULT_BUCKET_BYTES, GradientExchange, ModelGradient
from .tree_sum import logical_workers_of_rank

STATE_FORMAT = 1  # of LogicalWorkers.state_dict

# What to do about a difference, for values whose name does not show it.
MISMATCH_ADVICE = {
    "threads": "call torch.set_num_threads(1), or another fixed number, before training;"
    " launchers choose it by the number of workers on a node",
    "weights": "load the same checkpoint on every rank, or call torch.manual_seed with the same"
    " seed before creating the model",
}

DIGEST_COLUMNS = 1021  # a prime number, so that exchanged rows of a matrix change the sums as well

SeedPurpose = Literal["model", "data", "update"]  # forward pass; augmentation; after reduce


class LogicalWorker:
    """A logical worker in one step: it computes a fixed part of the global batch.

    Args:
        index: number of the logical worker, from 0.
        count: number of logical workers.
        step: step of the job.
        seed: seed of the job.
    """

    def __init__(self, index: int, count: int, step: int, seed: int) -> None:
        self.index = index
        """The number of the logical worker, from 0."""
        self.count = count
        """The number of logical workers."""
        self.step = step
        """The step of the job that is computed."""
        self.seed = derive_seed(seed, step, index, "model")
        """The seed of torch's random numbers during this worker's turn. Seed other generators that
        the forward pass uses, such as NumPy's, with it."""
        self._data_seed = derive_seed(seed, step, index, "data")

    def samples(self, batch_size: int) -> range:
        """Return this worker's part of a global batch, counted from the first sample of the batch.

        It is the same at any world size. It is empty if `batch_size` is not larger than the index
        of this logical worker.

        Args:
            batch_size: number of samples in the global batch.
        """
        return even_share(batch_size, rank=self.index, world_size=self.count)

    @cached_property
    def generator(self) -> torch.Generator:
        """A CPU generator for augmentations, independent of the random numbers of the model."""
        return torch.Generator().manual_seed(self._data_seed)


class LogicalWorkers:
    """Divides a fixed number of logical workers among the ranks, and adds up their gradients.

    Typical use::

        logical = LogicalWorkers(model, 8)
        for step in range(first, last):
            for worker in logical.step(step):            # the logical workers of this rank
                local = worker.samples(len(batch))
                loss = loss_of(model(batch[local])).sum() / len(batch)
                loss.backward()
            logical.reduce()                             # .grad is that of the whole batch
            optimizer.step()

    The loss of a logical worker is the sum over its samples, divided by the number of samples in
    the global batch. So the losses of all logical workers add up to the mean of the batch. Several
    calls of `backward` for one logical worker add up. One without samples needs no call.

    The model must not be wrapped in DistributedDataParallel, and must be the same on every rank.
    Without a process group, this process computes all logical workers.
    docs/bitwise_reproducibility.md describes the guarantees, the cost, and what the script must do.

    Args:
        model: its parameters with `requires_grad` are trained. They are read again at each step.
        count: number of logical workers, which is the largest possible world size. It determines
            the weights, so a state with another count is rejected.
        seed: seed of all random numbers; the same on every rank.
        group: process group whose ranks share the work; the default group if None.
        bucket_bytes: part of the gradient that is exchanged at a time.

    Raises:
        ConfigError: `count`, `seed` or `bucket_bytes` is invalid, there are more ranks than logical
            workers, or the model is a DistributedDataParallel.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        *,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        count, seed = check_int("count", count), check_int("seed", seed)
        if count < 1 or bucket_bytes < 1:
            raise ConfigError(f"need count and bucket_bytes >= 1, got {count} and {bucket_bytes}")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the model is a DistributedDataParallel, which adds gradients in an order of its"
                " own: pass the model that it wraps, model.module"
            )
        self.model = model
        """The model whose parameters are trained."""
        self.count = count
        """The number of logical workers."""
        self.seed = seed
        """The seed of all random numbers."""
        self._group, self._bucket_bytes = group, bucket_bytes
        self._exchange: GradientExchange  # for the current members of the group
        self._gradient: ModelGradient | None  # of the trained parameters; None before a first step
        self._step: int | None  # the step that was started and not reduced
        self._num_computed: int  # logical workers of this rank that are computed in this step
        # Each parameter at the start of the step, and the digest of its elements.
        self._parameters: dict[str, tuple[Tensor, Tensor]]
        self.on_group_changed()

    def on_group_changed(self) -> None:
        """Divide the logical workers among the new members of the process group.

        A step that was not reduced must be started again.
        """
        self._exchange = GradientExchange(self.count, self._group, self._bucket_bytes)
        self._gradient = None
        self._step = None
        self._num_computed = 0
        self._parameters = {}

    @property
    def workers(self) -> range:
        """The range of logical workers of this rank. Lengths on two ranks differ by at most one."""
        return logical_workers_of_rank(self.count, self._exchange.world_size, self._exchange.rank)

    def samples(self, batch_size: int) -> range:
        """Return this rank's part of a global batch: the samples of its logical workers, in order.

        Args:
            batch_size: number of samples in the global batch.
        """
        workers, count = self.workers, self.count
        first = even_share(batch_size, rank=workers[0], world_size=count)
        last = even_share(batch_size, rank=workers[-1], world_size=count)
        return range(first.start, last.stop)

    def step(self, step: int) -> Iterator[LogicalWorker]:
        """Yield the logical workers of this rank, to be computed one after another.

        Each turn starts without gradients, and with torch's random numbers seeded by seed, step and
        logical worker. An interrupted step can be started again. At the first step, and whenever
        the trained parameters have changed, the ranks compare their weights and their environment,
        which reads all weights once.

        Args:
            step: number of the step in the job, at least 0; it determines the random numbers.

        Raises:
            ConfigError: `step` is negative or not an integer, a parameter is not supported, or the
                GPU is not set to be deterministic.
            NotReproducibleError: the ranks differ, a buffer of the model was changed, a gradient is
                sparse, or another step was not reduced. The message names the problem and the
                remedy. The weights have not changed.
        """
        step = check_int("step", step)
        gradient = self._start_step(step)
        buffers = buffer_versions(self.model)
        for index in self.workers:
            worker = LogicalWorker(index, self.count, step, self.seed)
            seed_generators(worker.seed, gradient.parameters.values())
            yield worker
            check_buffers_unchanged(self.model, buffers, index)
            gradient.accumulate(index)
            self._num_computed += 1

    def reduce(self) -> None:
        """Write the sum of the gradients of all logical workers to `.grad`. All ranks call this.

        If no logical worker had a gradient for a parameter, its `.grad` is None. The tensors in
        `.grad` are reused at the next step. After this call, torch's random numbers, as an
        optimizer draws them, depend only on seed and step.

        Raises:
            NotReproducibleError: the loop over `step` is not complete, or the forward or backward
                pass changed a parameter.
        """
        gradient, step, workers = self._gradient, self._step, self.workers
        if gradient is None or step is None or self._num_computed != len(workers):
            computed = list(workers[: self._num_computed])
            raise NotReproducibleError(
                f"only {computed} of the logical workers {list(workers)} were computed: call reduce"
                " once in each step, after the complete loop over LogicalWorkers.step"
            )
        check_parameters_unchanged(self.model, self._parameters)
        gradient.reduce_to_grads()
        update_seed = derive_seed(self.seed, step, self.count, "update")
        seed_generators(update_seed, gradient.parameters.values())
        self._step, self._num_computed = None, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that must be the same when training resumes, for the checkpoint."""
        return {
            "format": STATE_FORMAT,
            "count": self.count,
            "seed": self.seed,
            "environment": numerics_environment(self._trained_parameters()),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_other_environment: bool = False
    ) -> None:
        """Check that training continues with the same settings. Nothing is loaded from the state.

        Call it after the model was moved to its device and torch was configured.

        Args:
            state: the result of `state_dict` on any rank, at any world size.
            allow_other_environment: accept another version of torch, number of threads or kind of
                machine. The weights can then differ in their last bits.

        Raises:
            StateMismatchError: the message names the values that differ.
        """
        current, saved = self.state_dict(), dict(state)
        environment, saved_environment = (s.pop("environment", {}) for s in (current, saved))
        difference = describe_differences(current, saved)
        if not difference and not allow_other_environment:
            difference = describe_differences(environment, saved_environment)
        if difference:
            raise StateMismatchError(
                f"here and in the state, {difference}: the weights would be different"
            )

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check `state` as `load_state_dict` does, before a restore changes anything."""
        self.load_state_dict(state)

    def _trained_parameters(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _start_step(self, step: int) -> ModelGradient:
        if self._step not in (None, step):
            raise NotReproducibleError(
                f"step {step} was started, but step {self._step} was not reduced: call reduce after"
                " each loop over LogicalWorkers.step, or start the same step again"
            )
        parameters = self._trained_parameters()
        if self._gradient is None or not self._gradient.is_for(parameters):
            gradient = ModelGradient(parameters, self._exchange)
            check_is_deterministic(parameters)
            conditions = {
                **numerics_environment(parameters),
                "weights": digest_weights(self.model),
                "count": self.count,
                "seed": self.seed,
                "step": step,
                "trained parameters": list(parameters),
            }
            check_ranks_agree(conditions, self._group)
            self._gradient = gradient
        self._gradient.reset()
        # This includes parameters that were frozen since the last step. They would keep its sum,
        # which the optimizer would apply again, and which a restarted job would not have.
        for parameter in self.model.parameters():
            parameter.grad = None
        self._parameters = {
            name: (parameter, digest_elements(parameter))
            for name, parameter in self.model.named_parameters()
        }
        self._step, self._num_computed = step, 0
        return self._gradient


def derive_seed(seed: int, step: int, worker: int, purpose: SeedPurpose) -> int:
    """Return a 63-bit seed: the first bytes of a BLAKE2b digest of the arguments.

    torch's CPU generator uses only the lower 32 bits. So among 77,000 seeds, two are equal in these
    bits with probability 1/2. That is harmless: the random numbers are not secret.

    Raises:
        ConfigError: `step` is negative.
    """
    if step < 0:
        raise ConfigError(f"need step >= 0, got {step}")
    text = f"{seed}/{step}/{worker}/{purpose}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(seed: int, parameters: Iterable[Tensor]) -> None:
    """Seed the generators of the CPU and of all devices of the kinds that the parameters are on.

    `torch.manual_seed` does the same, but needs 0.4 ms to prepare all other kinds of devices.
    """
    torch.default_generator.manual_seed(seed)
    for kind in {parameter.device.type for parameter in parameters} - {"cpu"}:
        module = torch.get_device_module(kind)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


# -- Conditions that all ranks and all restarts must share -----------------------------------------


def numerics_environment(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the properties of this process that affect the last bits of results."""
    kinds = {parameter.device.type for parameter in parameters.values()}
    return {
        "torch": torch.__version__.partition("+")[0],
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "devices": sorted(torch.cuda.get_device_name() if k == "cuda" else k for k in kinds),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def describe_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the names and values that differ, with advice; an empty string if none does."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    text = ", ".join(f"{name} is {one.get(name)} and {other.get(name)}" for name in names)
    advice = "; ".join(MISMATCH_ADVICE[name] for name in names if name in MISMATCH_ADVICE)
    return f"{text} ({advice})" if advice else text


def check_is_deterministic(parameters: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for a GPU whose kernels may compute other bits at each call."""
    if not any(parameter.device.type == "cuda" for parameter in parameters.values()):
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.benchmark:
        raise ConfigError(
            "kernels of a GPU may compute other bits at each call: call"
            " torch.use_deterministic_algorithms(True), leave torch.backends.cudnn.benchmark"
            " False, and set CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )


def check_ranks_agree(conditions: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Compare the conditions of all ranks, which must all call this.

    Raises:
        NotReproducibleError: the conditions of two ranks differ; all ranks raise the same message.
    """
    if not dist.is_initialized():
        return
    group = dist.group.WORLD if group is None else group
    has_cpu_backend = group is not None and "cpu:" in dist.get_backend_config(group)
    device = None if has_cpu_backend else torch.accelerator.current_accelerator()
    # The texts are padded with blanks, which JSON ignores. all_gather_object would need NumPy.
    text = json.dumps(dict(conditions)).encode()
    max_length = torch.tensor([len(text)], device=device)
    dist.all_reduce(max_length, dist.ReduceOp.MAX, group=group)
    own = torch.frombuffer(bytearray(text.ljust(int(max_length))), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    first, *others = (json.loads(bytes(part.tolist())) for part in gathered)
    for rank, other in enumerate(others, 1):
        if difference := describe_differences(first, other):
            raise NotReproducibleError(f"ranks 0 and {rank} differ: {difference}")


def digest_weights(model: nn.Module) -> str:
    """Return a BLAKE2b digest, in hexadecimal, of all parameters and buffers with their names."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        local = tensor.detach().cpu().contiguous()
        size = local.numel() * local.element_size()
        digest.update((ctypes.c_char * size).from_address(local.data_ptr()) if size else b"")
    return digest.hexdigest()


# -- Parameters, which only the optimizer may change, after `reduce` -------------------------------


@torch.no_grad()
def digest_elements(tensor: Tensor) -> Tensor:
    """Return the sums of the bits of a tensor in DIGEST_COLUMNS columns of 8 bytes.

    Of a tensor that has no more bytes than one row, a copy is returned. The digest reads the tensor
    once, and does not depend on `Tensor._version`, which not every write raises.
    """
    if tensor.storage_offset() or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    flat = tensor.detach().view(-1).view(torch.uint8)
    num_words = flat.numel() // 8
    words, rest = flat[: num_words * 8].view(torch.int64), flat[num_words * 8 :]
    num_rows = num_words // DIGEST_COLUMNS
    if not num_rows:
        return flat.clone()
    rows, last = words.tensor_split([num_rows * DIGEST_COLUMNS])
    sums = rows.view(num_rows, DIGEST_COLUMNS).sum(0)
    return torch.cat([sums, last, rest.to(torch.int64)])


def check_parameters_unchanged(
    model: nn.Module, before: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Raise NotReproducibleError if a parameter differs from that at the start of the step.

    The other ranks compute other logical workers, and do not see the change.
    """
    after = dict(model.named_parameters())
    for name in {**before, **after}:
        parameter, digest = before.get(name, (None, None))
        current = after.get(name)
        found = None if current is None else digest_elements(current)
        is_unchanged = (
            current is parameter
            and found is not None
            and digest is not None
            and (found.device, found.shape) == (digest.device, digest.shape)
            and torch.equal(found, digest)
        )
        if not is_unchanged:
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise NotReproducibleError(
                f"the forward or backward pass changed the parameter {name} of a {kind}, so the"
                " weights would depend on which logical workers this rank computes. Use no"
                " embedding with max_norm and no optimizer in backward hooks, and write to"
                " parameters only after reduce"
            )


# -- Buffers, which a logical worker must not change -----------------------------------------------


@attrs.frozen(eq=False)
class BufferVersion:
    """A buffer before the turn of a logical worker."""

    tensor: Tensor
    version: int  # Tensor._version, which most operations that write to a tensor raise
    content: Tensor  # a copy

    def is_unchanged(self, current: Tensor | None) -> bool:
        """Return True if the buffer is the same tensor and was not written to.

        The content is compared as well as the version, because some operations write without
        raising it: `torch.nn.functional.batch_norm`, and all operations on a tensor's `.data`.
        """
        if current is not self.tensor or current._version != self.version:
            return False
        content = self.content
        if (current.dtype, current.device, current.shape) != (
            content.dtype,
            content.device,
            content.shape,
        ):
            return False
        # Bytes are compared, because a NaN is not equal to itself, and 0.0 is equal to -0.0.
        flat = (part.detach().reshape(-1).view(torch.uint8) for part in (current, content))
        return torch.equal(*flat)


def buffer_versions(model: nn.Module) -> dict[str, BufferVersion]:
    """Return each buffer of the model, by name, with a copy of its content."""
    return {
        name: BufferVersion(buffer, buffer._version, buffer.detach().clone())
        for name, buffer in model.named_buffers()
    }


def check_buffers_unchanged(
    model: nn.Module, before: Mapping[str, BufferVersion], worker: int
) -> None:
    """Raise NotReproducibleError if a logical worker changed a buffer.

    The other ranks do not see the change.
    """
    after = dict(model.named_buffers())
    for name in {**before, **after}:
        if name not in before or not before[name].is_unchanged(after.get(name)):
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise NotReproducibleError(
                f"logical worker {worker} changed the buffer {name} of a {kind}, so the buffer"
                " would depend on which logical workers this rank computes. Use a module without"
                " running statistics (track_running_stats=False, GroupNorm, LayerNorm), put it"
                " into eval mode, or call torch.nn.functional.batch_norm with training=False or"
                " without running statistics"
            )
