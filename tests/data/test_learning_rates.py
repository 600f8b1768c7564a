"""Learning rates that follow the global batch: through resizes, restores and any scheduler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, AdamW, lr_scheduler

from elasticlib import scale_learning_rates
from elasticlib.errors import ConfigError

SCHEDULERS = {
    "none": lambda _: None,
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "cosine, which goes on from the present rate": lambda o: lr_scheduler.CosineAnnealingLR(
        o, 20, eta_min=0.01
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.7, total_steps=30),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 16)],
        [4],
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


class Recording(SGD):
    """Says with which rates a step is taken."""

    def step(self, closure=None):
        self.taken = [float(group["lr"]) for group in self.param_groups]
        return super().step(closure)


def made(schedule):
    parts = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [parts[0]]}, {"params": [parts[1]], "lr": 0.05}]
    optimizer = Recording(groups, lr=0.5, momentum=0.9)
    return optimizer, SCHEDULERS[schedule](optimizer)


def steps(optimizer, scheduler, count):
    """The rates of so many steps."""
    found = []
    for _ in range(count):
        for group in optimizer.param_groups:
            for part in group["params"]:
                part.grad = torch.ones_like(part)
        optimizer.step()
        found.append(optimizer.taken)
        if scheduler is not None:
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0] if plateau else []))
    return found


def saved(optimizer, scheduler):
    return copy.deepcopy([optimizer.state_dict(), scheduler and scheduler.state_dict()])


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("restore_first", [True, False])
@pytest.mark.parametrize("rule", ["linear", "sqrt"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_through_2_3_1_workers_each_step_has_the_schedules_rate_for_its_batch(
    schedule, rule, restore_first
):
    """And what is saved is, to the bit, what a job that was never resized would save."""
    undisturbed, state, at = made(schedule), None, 0
    for world in (2, 3, 1):
        optimizer, scheduler = made(schedule)
        if not restore_first:
            factor = scale_learning_rates(optimizer, 32 * world, reference_batch=64, rule=rule)
        if state:
            optimizer.load_state_dict(state[0])
            if scheduler is not None:
                scheduler.load_state_dict(state[1])
        for _ in range(2):  # once more than needed
            factor = scale_learning_rates(optimizer, 32 * world, reference_batch=64, rule=rule)
        assert factor == pytest.approx({"linear": world / 2, "sqrt": (world / 2) ** 0.5}[rule])
        rates = steps(optimizer, scheduler, 5)
        expected = steps(*undisturbed, 5)
        assert rates == [[rate * factor for rate in group] for group in expected]
        state, at = saved(optimizer, scheduler), at + 5
        groups = [{**group, "params": []} for group in state[0]["param_groups"]]
        others = saved(*undisturbed)[0]["param_groups"]
        assert groups == [{**group, "params": []} for group in others]
        if scheduler is not None:
            assert state[1] == saved(*undisturbed)[1]


def test_the_parameters_move_by_the_scaled_rate():
    part = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD([part], lr=0.25)
    scale_learning_rates(optimizer, 128, reference_batch=64)
    part.grad = torch.ones(1)
    optimizer.step()
    assert part.item() == -0.5
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    part = torch.nn.Parameter(torch.zeros(1))
    optimizer = AdamW([part], lr=torch.tensor(0.25), weight_decay=0.0)
    rate = optimizer.param_groups[0]["lr"]
    scale_learning_rates(optimizer, 256, reference_batch=64, rule="sqrt")
    part.grad = torch.ones(1)
    optimizer.step()
    assert part.item() == pytest.approx(-0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_a_step_that_raises_leaves_nothing_scaled_behind_that_is_saved():
    class Broken(Recording):
        def step(self, closure=None):
            super().step(closure)
            raise ValueError("out of memory, say")

    part = torch.nn.Parameter(torch.zeros(1))
    optimizer = Broken([part], lr=0.25)
    scale_learning_rates(optimizer, 128, reference_batch=64)
    for _ in range(2):
        with pytest.raises(ValueError, match="out of memory"):
            optimizer.step()
        assert optimizer.taken == [0.5]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rule": "cubic"}, "rule is 'cubic', must be one of linear, sqrt"),
        ({"reference_batch": 0}, "global_batch=8 and reference_batch=0"),
        ({"global_batch": 0}, "global_batch=0 and reference_batch=4"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(options, named):
    optimizer, _ = made("none")
    with pytest.raises(ConfigError, match=named):
        scale_learning_rates(optimizer, **{"global_batch": 8, "reference_batch": 4, **options})
    assert steps(optimizer, None, 1) == [[0.5, 0.05]]
