"""Logical workers give bitwise equal weights at any world size, with kills and resizes.

The first tests train with worker processes over gloo. The other tests run in this process, without
a process group.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import signal

import pytest
import torch
from logical_training import train_or_return_error
from torch import nn

from elasticlib import LogicalWorkers
from elasticlib.errors import ConfigError, NotReproducibleError, StateMismatchError
from elasticlib.logical.logical_workers import derive_seed

LAST = 5
WORLDS = [3, 5, 1, 4, 2]


def constant(world):
    return [{"world": world, "until": LAST}]


JOBS = {
    **{f"world {world}": constant(world) for world in (1, 2, 5)},
    "resized": [{"world": world, "until": step} for step, world in enumerate(WORLDS, 1)],
    "killed": [
        {"world": 2, "until": LAST, "killed": 1},
        {"world": 5, "until": LAST, "killed": 3},
        {"world": 3, "until": LAST},
    ],
    "a group in a larger world": [{"world": 3, "until": LAST, "members": [1, 2]}],
}
# The inconsistency of each faulty job, and the error that all of its ranks raise.
FAULTY = {
    "weights": r"ranks 0 and 2 .*weights is \w+ and \w+ .*load the same checkpoint",
    "threads": r"ranks 0 and 2 .*threads is 1 and 2 .*torch.set_num_threads\(1\)",
    "parallel": ".*DistributedDataParallel",
}

FAULTY_JOBS = {fault: [{"world": 3, "until": 1, "fault": fault}] for fault in FAULTY}

# The first test runs all of the training.
pytestmark = pytest.mark.timeout(300)


def train_in_turn(ranks, folder, segments):
    """Run the segments one after another, and return what all ranks returned in the last."""
    folder.mkdir()
    for segment in segments:
        ends = ranks.results(train_or_return_error, segment["world"], folder, segment)
        if "killed" in segment:
            assert ends[0].status == -signal.SIGKILL, ends
        else:
            assert not any(end.error for end in ends), ends
    results = [ends[rank].value for rank in segment.get("members", range(segment["world"]))]
    assert all(result == results[0] for result in results), results
    return results[0]


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """Return, for each job, the digests of the weights after each step, and of the optimizer."""
    folder = tmp_path_factory.mktemp("trained")
    jobs = (JOBS | FAULTY_JOBS).items()
    return {name: train_in_turn(ranks, folder / name, segments) for name, segments in jobs}


@pytest.mark.parametrize("name", [name for name in JOBS if name != "world 1"])
def test_each_steps_weights_are_bitwise_equal_to_those_of_one_process(trained, name):
    assert trained[name] == trained["world 1"]
    assert len(set(trained[name])) == LAST + 1


@pytest.mark.parametrize(("fault", "pattern"), FAULTY.items())
def test_ranks_that_start_differently_are_rejected_with_one_message(trained, fault, pattern):
    (message,) = trained[fault]
    assert re.match(pattern, message), message


# -- In one process --------------------------------------------------------------------------------


def loss_of(model, x):
    return (model(x) ** 2).sum()


def run_step(logical, x, step=0):
    for worker in logical.step(step):
        loss_of(logical.model, x[list(worker.samples(len(x)))]).backward()
    logical.reduce()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_gradient_is_that_of_the_global_batch_except_for_rounding(count):
    model, x = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
        torch.rand(11, 4),
    )
    x = x.double()
    loss_of(model, x).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    run_step(LogicalWorkers(model, count), x)
    for parameter, grad in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_gradients_are_added_along_the_tree_and_not_one_by_one():
    model = nn.Linear(1, 1, bias=False)
    logical = LogicalWorkers(model, 5)
    terms = [1e8, 1.0, -1e8, 1.0, 0.5]
    for worker in logical.step(0):
        (model.weight.sum() * terms[worker.index]).backward()
    logical.reduce()
    a, b, c, d, e = torch.tensor(terms)
    assert model.weight.grad.item() == (((a + b) + (c + d)) + e).item()
    assert model.weight.grad.item() != ((((a + b) + c) + d) + e).item()


def test_a_missing_gradient_counts_as_positive_zero():
    """The result is the same whether a sum starts with the gradient, adds it or copies it."""
    signs = {}
    for absent in (0, 1, 2):
        model = nn.Linear(1, 1, bias=False)
        logical = LogicalWorkers(model, 3)
        for worker in logical.step(0):
            if worker.index != absent:
                (model.weight.sum() * -0.0).backward()
        logical.reduce()
        signs[absent] = model.weight.grad.signbit().item()
    assert signs == {0: False, 1: False, 2: False}


def test_several_backward_calls_add_up_and_earlier_gradients_do_not_count():
    model = nn.Linear(1, 1, bias=False)
    logical = LogicalWorkers(model, 2)
    for step in range(3):
        for _ in logical.step(step):
            for _ in range(2):
                model.weight.sum().backward()
        logical.reduce()
        assert model.weight.grad.item() == 4.0


def test_an_unused_parameter_has_no_gradient_and_no_weight_decay():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    before = model["unused"].weight.clone()
    logical = LogicalWorkers(model, 4)
    for _ in logical.step(0):
        model["used"](torch.ones(1, 2)).sum().backward()
    logical.reduce()
    optimizer.step()
    assert model["unused"].weight.grad is None
    assert torch.equal(model["unused"].weight, before)


def test_parameters_can_be_frozen_and_unfrozen_between_steps():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(4, 3)
    logical = LogicalWorkers(model, 3)
    run_step(logical, x)
    model[0].requires_grad_(False).zero_grad()
    run_step(logical, x, 1)
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    run_step(logical, x, 2)
    assert model[0].weight.grad is not None


def test_a_parameter_that_is_frozen_in_training_stays_unchanged_after_a_resume():
    def train(model, optimizer, steps):
        logical = LogicalWorkers(model, 3)
        for step in steps:
            model[0].requires_grad_(step < 2)
            run_step(logical, torch.ones(4, 3), step)
            optimizer.step()
            weights.append(model[0].weight.detach().clone())

    weights = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(4))
    resumed = copy.deepcopy(model)
    again = torch.optim.AdamW(resumed.parameters())
    again.load_state_dict(optimizer.state_dict())
    train(resumed, again, [4])
    train(model, optimizer, [4])
    assert not torch.equal(weights[0], weights[1])
    assert all(torch.equal(weights[1], later) for later in weights[2:])


def test_random_numbers_depend_only_on_seed_step_and_worker():
    model = nn.Linear(1, 1)

    def drawn(logical, step):
        values = []
        for worker in logical.step(step):
            values += [torch.rand(1).item(), torch.rand(1, generator=worker.generator).item()]
            model(torch.ones(1, 1)).sum().backward()
        logical.reduce()
        return [*values, torch.rand(1).item()]

    logical, again, other = (LogicalWorkers(model, 3, seed=seed) for seed in (7, 7, 8))
    first, second = drawn(logical, 0), drawn(logical, 1)
    torch.rand(5)
    assert drawn(again, 1) == second
    everything = [*first, *second, *drawn(other, 0)]
    assert len(set(everything)) == len(everything)


def test_an_interrupted_step_can_be_started_again():
    model, x = nn.Linear(3, 3), torch.ones(8, 3)
    logical, undisturbed = LogicalWorkers(model, 8), LogicalWorkers(model, 8)
    run_step(undisturbed, x)
    grad = model.weight.grad.clone()
    for worker in logical.step(0):
        loss_of(model, x).backward()
        if worker.index == 5:
            break
    with pytest.raises(NotReproducibleError, match="reduce"):
        logical.reduce()
    run_step(logical, x)
    assert torch.equal(model.weight.grad, grad)
    with pytest.raises(NotReproducibleError, match="reduce"):
        logical.reduce()


def test_a_step_that_was_not_reduced_is_an_error():
    logical = LogicalWorkers(nn.Linear(3, 3), 2)
    for _ in logical.step(4):
        pass
    with pytest.raises(NotReproducibleError, match=r"step 5 .*step 4 "):
        next(logical.step(5))


def test_gradients_reuse_the_same_memory_at_each_step():
    model, x = nn.Linear(3, 3), torch.ones(8, 3)
    logical = LogicalWorkers(model, 8)
    addresses = []
    for step in range(12):
        run_step(logical, x, step)
        addresses.append(model.weight.grad.data_ptr())
    assert len(set(addresses)) <= 3  # The gradients alternate between three buffers.


# -- Unsupported models and settings ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.BatchNorm1d(3), "1.(running_mean|running_var|num_batches_tracked) of a BatchNorm1d"),
        (nn.BatchNorm1d(3, momentum=None), "1.(running_mean|running_var|num_batches_tracked)"),
    ],
)
def test_running_statistics_of_batch_norm_are_rejected(module, name):
    model = nn.Sequential(nn.Linear(3, 3), module)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(NotReproducibleError, match=f"worker 0 changed the buffer {name}"):
        run_step(LogicalWorkers(model, 2), torch.rand(8, 3))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (
            nn.Sequential(
                nn.Unflatten(1, (3, 1)),
                nn.Linear(1, 4),
                nn.InstanceNorm1d(3, track_running_stats=True),
            ),
            r"2.running_(mean|var) of a InstanceNorm1d",
        ),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            r"parametrizations.weight.0._[uv] of a _SpectralNorm",
        ),
    ],
)
def test_other_running_statistics_are_rejected(model, name):
    with pytest.raises(NotReproducibleError, match=f"changed the buffer {name}"):
        run_step(LogicalWorkers(model, 2), torch.rand(8, 3))


class WithBuffers(nn.Module):
    """A module whose forward pass calls a function on its own two buffers."""

    def __init__(self, forward, mean=0.0):
        super().__init__()
        self.linear, self.function = nn.Linear(3, 3), forward
        self.register_buffer("mean", torch.full((3,), mean))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return self.function(self.linear(x), self)


def normalize(x, module, training):
    return nn.functional.batch_norm(x, module.mean, module.var, training=training)


def write_through_data(x, module):
    module.mean.data.add_(1)
    return x


def change_only_the_sign_of_zero(x, module):
    module.mean.neg_()
    return x


def replace_by_another_tensor(x, module):
    module.mean = module.mean.clone()
    return x


def replace_data_by_another_dtype(x, module):
    module.mean.data = module.mean.double()
    return x


def remove_buffer(x, module):
    module.register_buffer("mean", None)
    return x


@pytest.mark.parametrize(
    "forward",
    [
        functools.partial(normalize, training=True),
        write_through_data,
        change_only_the_sign_of_zero,
        replace_by_another_tensor,
        replace_data_by_another_dtype,
        remove_buffer,
    ],
)
def test_every_way_to_change_a_buffer_is_detected(forward):
    model = WithBuffers(forward)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(
        NotReproducibleError, match="worker 0 changed the buffer mean of a WithBuffers"
    ):
        run_step(LogicalWorkers(model, 2), torch.rand(8, 3))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("mean", [0.0, math.nan])
def test_buffers_that_are_only_read_are_accepted(mean):
    model = WithBuffers(functools.partial(normalize, training=False), mean)
    run_step(LogicalWorkers(model, 2), torch.rand(8, 3))
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.BatchNorm1d(3).eval(),
        nn.GroupNorm(1, 3),
        nn.LayerNorm(3),
    ],
    ids=str,
)
def test_normalization_without_running_statistics_is_supported(module):
    model = nn.Sequential(nn.Linear(3, 3), module)
    run_step(LogicalWorkers(model, 2), torch.rand(8, 3))
    assert all(parameter.grad is not None for parameter in model.parameters())


class WithOptimizer(nn.Linear):
    """A layer whose optimizer runs in the backward pass."""

    def __init__(self):
        super().__init__(3, 3)
        optimizer = torch.optim.SGD([self.weight], lr=0.1, fused=True)
        self.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())


class Scaled(nn.Linear):
    """A layer whose forward pass writes to its weight."""

    def __init__(self, write):
        super().__init__(3, 3)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self, x)
        return super().forward(x)


class Embeds(nn.Module):
    """An embedding, which normalizes the rows that it looks up."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, 3, max_norm=0.1)

    def forward(self, x):
        return self.rows((x[:, 0] * 5).long())


def scale_row(module, x):
    module.weight.data[0] *= x.mean()


def swap_rows(module, _x):
    module.weight.data = module.weight.data.roll(1, 0)


def replace_weight(module, _x):
    module.weight = nn.Parameter(module.weight.detach() + 1)


def write_frozen_bias(module, x):
    module.bias.requires_grad_(requires_grad=False)
    module.bias.data += x.mean(0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Embeds, "rows.weight of a Embedding"),
        (WithOptimizer, "weight of a WithOptimizer"),
        (functools.partial(Scaled, scale_row), "weight of a Scaled"),
        (functools.partial(Scaled, swap_rows), "weight of a Scaled"),
        (functools.partial(Scaled, replace_weight), "weight of a Scaled"),
        (functools.partial(Scaled, write_frozen_bias), "bias of a Scaled"),
    ],
)
def test_every_way_to_change_a_parameter_before_the_optimizer_is_detected(make, name):
    torch.manual_seed(0)
    with pytest.raises(NotReproducibleError, match=f"changed the parameter {name}.*max_norm"):
        run_step(LogicalWorkers(make(), 2), torch.rand(8, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("index", [0, 4999, 5000])
def test_each_element_of_a_parameter_counts(dtype, index):
    model = nn.ParameterList([torch.randn(5001, dtype=dtype)])
    logical = LogicalWorkers(model, 2)
    for worker in logical.step(0):
        model[0].abs().sum().backward()
        if worker.index:
            model[0].data[index] += 1
    with pytest.raises(NotReproducibleError, match="changed the parameter 0 of a ParameterList"):
        logical.reduce()


def test_a_sparse_gradient_is_rejected_by_name():
    model = nn.Embedding(5, 2, sparse=True)
    turns = LogicalWorkers(model, 2).step(0)
    next(turns)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(NotReproducibleError, match=r"gradient of weight is torch.sparse_coo"):
        next(turns)


def test_a_lazy_parameter_is_rejected_by_name():
    with pytest.raises(ConfigError, match="parameter weight is a UninitializedParameter"):
        next(LogicalWorkers(nn.LazyLinear(3), 2).step(0))


def test_invalid_counts_are_rejected():
    for settings in ({"count": 0}, {"count": 2, "bucket_bytes": 0}):
        with pytest.raises(ConfigError, match="count and bucket_bytes"):
            LogicalWorkers(nn.Linear(1, 1), **settings)
    with pytest.raises(ConfigError, match=r"step.*got -1"):
        next(LogicalWorkers(nn.Linear(1, 1), 2).step(-1))


def test_integers_of_any_type_are_accepted_and_other_numbers_are_rejected():
    logical = LogicalWorkers(nn.Linear(1, 1), torch.tensor(2), seed=torch.tensor(1))
    assert next(logical.step(torch.tensor(3))).seed == derive_seed(1, 3, 0, "model")
    LogicalWorkers(nn.Linear(1, 1), 2, seed=1).load_state_dict(logical.state_dict())
    for settings in ({"count": 2.0}, {"count": 2, "seed": 0.0}):
        with pytest.raises(ConfigError, match="integer"):
            LogicalWorkers(nn.Linear(1, 1), **settings)
    with pytest.raises(ConfigError, match=r"step is 4\.0"):
        next(logical.step(4.0))


def test_a_state_of_other_settings_or_another_environment_is_rejected():
    model = nn.Linear(1, 1)
    logical = LogicalWorkers(model, 4, seed=1)
    state = logical.state_dict()
    logical.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="count is 8 and 4"):
        LogicalWorkers(model, 8, seed=1).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="seed is 2 and 1"):
        LogicalWorkers(model, 4, seed=2).load_state_dict(state, allow_other_environment=True)
    threads = torch.get_num_threads()
    state["environment"]["threads"] = threads + 1
    with pytest.raises(StateMismatchError, match=rf"threads is {threads} and .*set_num_threads"):
        logical.load_state_dict(state)
    logical.load_state_dict(state, allow_other_environment=True)


def test_seeds_differ_for_each_step_worker_and_purpose():
    seeds = {
        derive_seed(seed, step, worker, purpose)
        for seed in (0, 1, -1, 10**30)
        for step in range(20)
        for worker in range(20)
        for purpose in ("model", "data", "update")
    }
    assert len(seeds) == 4 * 20 * 20 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A resumed job must draw the same random numbers, so the value must never change.
    assert derive_seed(0, 0, 0, "model") == 1133652586245721400
    with pytest.raises(ConfigError, match=r"step.*got -1"):
        derive_seed(0, -1, 0, "model")
