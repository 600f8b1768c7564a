"""The same weights at any world size: trained by real ranks over gloo, through kills and resizes.

What one process can show (semantics and refusals) is shown in this one, without a process group.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import signal

import pytest
import torch
from logical_training import train_or_be_refused
from torch import nn

from elasticlib import LogicalWorkers
from elasticlib.errors import ConfigError, NotReproducible, StateMismatch
from elasticlib.logical.shares import seed_of

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
ASTRAY = {
    "weights": r"ranks 0 and 2 .*weights is \w+ and \w+ .*load the same checkpoint",
    "threads": r"ranks 0 and 2 .*threads is 1 and 2 .*torch.set_num_threads\(1\)",
    "parallel": ".*DistributedDataParallel",
}
"""What is wrong with the ranks, and what each of them says."""

WRONG = {what: [{"world": 3, "until": 1, "astray": what}] for what in ASTRAY}

# Of the training, which belongs to whichever test comes first.
pytestmark = pytest.mark.timeout(300)


def train_in_turn(ranks, folder, segments):
    """What all ranks say in the last of these segments."""
    folder.mkdir()
    for segment in segments:
        ends = ranks.ends(train_or_be_refused, segment["world"], folder, segment)
        if "killed" in segment:
            assert ends[0].status == -signal.SIGKILL, ends
        else:
            assert not any(end.error for end in ends), ends
    told = [ends[rank].value for rank in segment.get("members", range(segment["world"]))]
    assert all(one == told[0] for one in told), told
    return told[0]


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """Of each job the digests of the weights after each step, and of the optimizer at last."""
    folder = tmp_path_factory.mktemp("trained")
    jobs = (JOBS | WRONG).items()
    return {name: train_in_turn(ranks, folder / name, segments) for name, segments in jobs}


@pytest.mark.parametrize("name", [name for name in JOBS if name != "world 1"])
def test_each_steps_weights_are_bitwise_equal_to_those_of_one_process(trained, name):
    assert trained[name] == trained["world 1"]
    assert len(set(trained[name])) == LAST + 1


@pytest.mark.parametrize(("what", "sentence"), ASTRAY.items())
def test_ranks_that_begin_otherwise_are_refused_all_with_one_sentence(trained, what, sentence):
    (said,) = trained[what]
    assert re.match(sentence, said), said


# What one process can show


def loss_of(model, x):
    return (model(x) ** 2).sum()


def run_step(logical, x, step=0):
    for worker in logical.step(step):
        loss_of(logical.model, x[list(worker.samples(len(x)))]).backward()
    logical.reduce()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_gradient_is_the_global_batchs_but_for_rounding(count):
    model, x = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
        torch.rand(11, 4),
    )
    x = x.double()
    loss_of(model, x).backward()
    whole = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    run_step(LogicalWorkers(model, count), x)
    for parameter, grad in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_a_sum_has_the_bits_of_the_tree_and_not_of_adding_one_by_one():
    model = nn.Linear(1, 1, bias=False)
    logical = LogicalWorkers(model, 5)
    terms = [1e8, 1.0, -1e8, 1.0, 0.5]
    for worker in logical.step(0):
        (model.weight.sum() * terms[worker.index]).backward()
    logical.reduce()
    a, b, c, d, e = torch.tensor(terms)
    assert model.weight.grad.item() == (((a + b) + (c + d)) + e).item()
    assert model.weight.grad.item() != ((((a + b) + c) + d) + e).item()


def test_zeros_of_either_sign_add_up_alike_however_a_worker_has_no_gradient():
    """No gradient counts as 0.0, in whichever way a sum comes about: copied, or added."""
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


def test_several_backwards_of_one_worker_add_up_and_grads_from_before_do_not_count():
    model = nn.Linear(1, 1, bias=False)
    logical = LogicalWorkers(model, 2)
    for step in range(3):
        for _ in logical.step(step):
            for _ in range(2):
                model.weight.sum().backward()
        logical.reduce()
        assert model.weight.grad.item() == 4.0


def test_what_no_logical_worker_used_has_no_gradient_and_is_not_decayed():
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


def test_parameters_may_be_frozen_and_thawed_between_steps():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(4, 3)
    logical = LogicalWorkers(model, 3)
    run_step(logical, x)
    model[0].requires_grad_(False).zero_grad()
    run_step(logical, x, 1)
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    run_step(logical, x, 2)
    assert model[0].weight.grad is not None


def test_a_parameter_frozen_in_training_stays_as_it_is_also_through_a_resume():
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


def test_random_numbers_follow_from_seed_step_and_worker_alone():
    model = nn.Linear(1, 1)

    def drawn(logical, step):
        found = []
        for worker in logical.step(step):
            found += [torch.rand(1).item(), torch.rand(1, generator=worker.generator).item()]
            model(torch.ones(1, 1)).sum().backward()
        logical.reduce()
        return [*found, torch.rand(1).item()]

    logical, again, other = (LogicalWorkers(model, 3, seed=seed) for seed in (7, 7, 8))
    first, second = drawn(logical, 0), drawn(logical, 1)
    torch.rand(5)
    assert drawn(again, 1) == second
    everything = [*first, *second, *drawn(other, 0)]
    assert len(set(everything)) == len(everything)


def test_a_step_left_in_the_middle_may_be_begun_again():
    model, x = nn.Linear(3, 3), torch.ones(8, 3)
    logical, undisturbed = LogicalWorkers(model, 8), LogicalWorkers(model, 8)
    run_step(undisturbed, x)
    grad = model.weight.grad.clone()
    for worker in logical.step(0):
        loss_of(model, x).backward()
        if worker.index == 5:
            break
    with pytest.raises(NotReproducible, match="reduce"):
        logical.reduce()
    run_step(logical, x)
    assert torch.equal(model.weight.grad, grad)
    with pytest.raises(NotReproducible, match="reduce"):
        logical.reduce()


def test_a_step_that_was_not_reduced_is_not_forgotten():
    logical = LogicalWorkers(nn.Linear(3, 3), 2)
    for _ in logical.step(4):
        pass
    with pytest.raises(NotReproducible, match=r"step 5 .*step 4 "):
        next(logical.step(5))


def test_gradients_are_put_into_the_same_memory_at_each_step():
    model, x = nn.Linear(3, 3), torch.ones(8, 3)
    logical = LogicalWorkers(model, 8)
    places = []
    for step in range(12):
        run_step(logical, x, step)
        places.append(model.weight.grad.data_ptr())
    # Three buffers, used in turn.
    assert len(set(places)) <= 3


# What would break the promise is refused


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.BatchNorm1d(3), "1.(running_mean|running_var|num_batches_tracked) of a BatchNorm1d"),
        (nn.BatchNorm1d(3, momentum=None), "1.(running_mean|running_var|num_batches_tracked)"),
    ],
)
def test_a_buffer_that_depends_on_the_batch_is_refused(module, name):
    model = nn.Sequential(nn.Linear(3, 3), module)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(NotReproducible, match=f"worker 0 changed the buffer {name}"):
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
def test_so_are_others_than_those_of_batch_norm(model, name):
    with pytest.raises(NotReproducible, match=f"changed the buffer {name}"):
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


def normalise(x, module, training):
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


def remove_it(x, module):
    module.register_buffer("mean", None)
    return x


@pytest.mark.parametrize(
    "forward",
    [
        functools.partial(normalise, training=True),
        write_through_data,
        change_only_the_sign_of_zero,
        replace_by_another_tensor,
        replace_data_by_another_dtype,
        remove_it,
    ],
)
def test_a_buffer_is_refused_however_the_forward_pass_changes_it(forward):
    model = WithBuffers(forward)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(NotReproducible, match="worker 0 changed the buffer mean of a WithBuffers"):
        run_step(LogicalWorkers(model, 2), torch.rand(8, 3))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("mean", [0.0, math.nan])
def test_buffers_that_are_only_read_are_accepted_whatever_they_hold(mean):
    model = WithBuffers(functools.partial(normalise, training=False), mean)
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
def test_normalisation_that_keeps_nothing_from_batch_to_batch_is_trained(module):
    model = nn.Sequential(nn.Linear(3, 3), module)
    run_step(LogicalWorkers(model, 2), torch.rand(8, 3))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Embedding(5, 2, sparse=True)
    turns = LogicalWorkers(model, 2).step(0)
    next(turns)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(NotReproducible, match=r"gradient of weight is torch.sparse_coo"):
        next(turns)


def test_a_lazy_parameter_is_refused_by_name():
    with pytest.raises(ConfigError, match="parameter weight is a UninitializedParameter"):
        next(LogicalWorkers(nn.LazyLinear(3), 2).step(0))


def test_counts_that_cannot_be_are_refused():
    for settings in ({"count": 0}, {"count": 2, "bucket_bytes": 0}):
        with pytest.raises(ConfigError, match="count and bucket_bytes"):
            LogicalWorkers(nn.Linear(1, 1), **settings)
    with pytest.raises(ConfigError, match=r"step.*got -1"):
        next(LogicalWorkers(nn.Linear(1, 1), 2).step(-1))


def test_a_step_that_is_a_tensor_seeds_as_its_number_and_what_is_no_integer_is_refused():
    logical = LogicalWorkers(nn.Linear(1, 1), torch.tensor(2), seed=torch.tensor(1))
    assert next(logical.step(torch.tensor(3))).seed == seed_of(1, 3, 0, "model")
    LogicalWorkers(nn.Linear(1, 1), 2, seed=1).load_state_dict(logical.state_dict())
    for settings in ({"count": 2.0}, {"count": 2, "seed": 0.0}):
        with pytest.raises(ConfigError, match="integer"):
            LogicalWorkers(nn.Linear(1, 1), **settings)
    with pytest.raises(ConfigError, match=r"step is 4\.0"):
        next(logical.step(4.0))


def test_a_state_of_other_settings_or_another_machine_is_refused():
    model = nn.Linear(1, 1)
    logical = LogicalWorkers(model, 4, seed=1)
    state = logical.state_dict()
    logical.load_state_dict(state)
    with pytest.raises(StateMismatch, match="count is 8 and 4"):
        LogicalWorkers(model, 8, seed=1).load_state_dict(state)
    with pytest.raises(StateMismatch, match="seed is 2 and 1"):
        LogicalWorkers(model, 4, seed=2).load_state_dict(state, accept_other_conditions=True)
    threads = torch.get_num_threads()
    state["conditions"]["threads"] = threads + 1
    with pytest.raises(StateMismatch, match=rf"threads is {threads} and .*set_num_threads"):
        logical.load_state_dict(state)
    logical.load_state_dict(state, accept_other_conditions=True)
