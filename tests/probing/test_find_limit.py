"""Probing from end to end: the answer against brute force, what must not fail later, and what is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import autobatch
from autobatch import Workload
from autobatch.api.pipeline import RunContext, run_plan
from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.options import PlanOptions
from autobatch.core.progress import Progress
from autobatch.probing import attempt as attempts
from autobatch.probing.attempt import TrainSetup, attempt
from autobatch.probing.child import open_process
from autobatch.probing.find_limit import ProbeLimits, find_limit
from autobatch.probing.setup import SetupSettings, open_setup
from benchmarks.workloads import WORKLOADS
from tests.support.probes import WIDTH, amsgrad, mlp, probed, vectors, work

# The answer, against brute force.


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(6 * 4, 4),
    )  # fmt: skip


def on_squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0].view(-1, 1, 4, 4)), batch[1])


def all_pairs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    features = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(features @ features.T, torch.arange(len(features)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(4, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(len(x), 4, 4))[0][:, -1])


def wide() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


CASES = {
    "mlp": (work(lambda: mlp(256)), "150KiB"),
    "convolutions": (work(convolutions, loss=on_squares), "30KiB"),
    "pairs": (work(loss=all_pairs), "48KiB"),
    "lstm": (work(Recurrent), "100KiB"),
    "deep": (work(wide), "28KiB"),
}
# Under CUDA's allocator the smallest budget is a segment of 2 MiB.
WIDE = 256
SIMULATED = {
    "mlp": (work(lambda: mlp(4096)), "4MiB"),
    "pairs": (work(lambda: mlp(2048), loss=all_pairs), "2MiB"),
    "convolutions": (
        work(
            lambda: nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 32, 3), nn.Flatten(),
                                  nn.Linear(32 * 144, 4)),
            train_data=vectors(200, WIDE),
            loss=lambda m, b: functional.cross_entropy(m(b[0].view(-1, 1, 16, 16)), b[1]),
        ),
        "6MiB",
    ),
}  # fmt: skip


def check_against_every_size(workload: Workload, device: str, budget: str) -> None:
    setup = open_setup(workload, SetupSettings(device=device, memory_budget=budget))
    found = autobatch.probe(workload, device=device, memory_budget=budget)
    cap = min(found.micro_batch + 8, len(workload.train_data))
    fits = {size: attempt(setup, size).attempt.fits for size in range(1, cap + 1)}
    assert fits[found.micro_batch]
    assert found.limited_by == "memory"
    assert not any(fits[size] for size in range(found.micro_batch + 1, cap + 1))
    ran = {one.micro_batch: one.fits for one in found.attempts}
    assert ran[found.micro_batch], "the answer itself ran"
    assert all(fits.get(size, False) == fit for size, fit in ran.items() if size in fits)


@pytest.mark.parametrize("case", CASES)
def test_every_size_up_to_the_limit_agrees_with_the_probe_on_the_host(case: str) -> None:
    check_against_every_size(CASES[case][0], "cpu", CASES[case][1])


@pytest.mark.parametrize("case", SIMULATED)
def test_every_size_up_to_the_limit_agrees_with_the_probe_on_a_simulated_gpu(case: str) -> None:
    check_against_every_size(SIMULATED[case][0], "sim:t4", SIMULATED[case][1])


def test_the_words_of_a_simulated_gpu_are_those_of_cuda() -> None:
    setup = open_setup(work(lambda: mlp(2048)), SetupSettings(device="sim:t4", memory_budget="4MiB"))
    failed = attempt(setup, 600).attempt
    assert not failed.fits
    assert failed.reason is not None
    assert failed.reason.startswith("CUDA out of memory. Tried to allocate ")
    assert "GPU 0 has a total capacity of 14.55 GiB" in failed.reason


# What must not run out of memory afterwards.


def survives(setup: TrainSetup, size: int, steps: int, seed: int = 0) -> bool:
    """Train on samples drawn at random, through another path than an attempt: torch's own loop, by hand."""
    generator = torch.Generator().manual_seed(seed)
    data, workload = setup.workload.train_data, setup.workload
    join = workload.collate or torch.utils.data.default_collate
    with setup.device.enforced() as meter:
        model = workload.model()
        optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
        try:
            for _ in range(steps):
                for _ in range(2):
                    with meter.uncounted():
                        ids = torch.randint(len(data), (size,), generator=generator).tolist()
                        batch = join([data[index] for index in ids])
                    meter.count(batch)
                    # As many operators as a window has: the loss is divided, as it is in one.
                    (workload.loss(model, batch) / 2).backward()
                    del batch
                optimizer.step()
                optimizer.zero_grad()
        except torch.OutOfMemoryError:
            return False
    return True


def deep() -> nn.Module:
    """Many blocks of up to 1 MiB: CUDA's allocator takes those in segments of 2 MiB, larger ones of 20."""
    layers = [layer for _ in range(7) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Linear(WIDTH, 256), *layers, nn.Linear(256, 4))


@pytest.mark.parametrize(
    ("device", "model", "budget", "windows"),
    [("cpu", lambda: mlp(2048), "1300KiB", 200), ("sim:t4", deep, "12MiB", 12)],
    ids=["cpu", "sim"],
)
def test_large_state_that_comes_with_the_first_step_is_seen(
    device, model, budget, windows, monkeypatch
) -> None:
    """Tiny activations, AdamW with three states: one window alone accepts what training cannot run."""
    workload = work(model, optimizer=amsgrad, train_data=vectors(3000))
    setup = open_setup(workload, SetupSettings(device=device, memory_budget=budget))
    found = autobatch.probe(workload, device=device, memory_budget=budget).micro_batch
    assert survives(setup, found, windows)
    # The mutant: activations are gone when the first step makes the state, so they are never seen together.
    monkeypatch.setattr(attempts, "ATTEMPT_STEPS", (1,))
    monkeypatch.setattr(attempts, "OTHER_ATTEMPT_STEPS", (1,))
    too_large = found + max(1, found // 4)
    assert attempt(setup, too_large).attempt.fits
    assert not survives(setup, too_large, steps=3)


def test_a_size_that_runs_in_one_order_of_windows_only_does_not_fit(monkeypatch) -> None:
    """A first window of two micro-batches leaves a cache in other pieces than one of one."""
    workload = WORKLOADS["resnet-bn"]()
    options = {"device": "sim:t4", "memory_budget": "2MiB"}
    setup = open_setup(workload, SetupSettings(**options))
    found = autobatch.probe(workload, **options).micro_batch
    assert survives(setup, found, steps=6)
    monkeypatch.setattr(attempts, "OTHER_ATTEMPT_STEPS", (1,))
    refused = [size for size in range(found + 1, found + 8) if attempt(setup, size).attempt.fits]
    assert refused
    assert not survives(setup, refused[-1], steps=3)


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_other_order_is_predicted_once_it_made_a_difference(isolated, tmp_path) -> None:
    """Then the second prediction is right: one error, two runs, and every size above it fails."""
    options = SetupSettings(device="sim:t4", memory_budget="2MiB")
    here = open_setup(WORKLOADS["resnet-bn"](), options)
    file = tmp_path / "train.py"
    file.write_text("from benchmarks.workloads import WORKLOADS\n\ntrain = WORKLOADS['resnet-bn']\n")
    with open_process(f"{file}:train", options, isolated=isolated) as process:
        found = find_limit(process, ProbeLimits(), home=tmp_path, progress=Progress()).probe
    assert [one.fits for one in found.attempts] == [False, True]
    assert found.upper_bound_by == "replay"
    above = range(found.micro_batch + 1, found.attempts[0].micro_batch + 1)
    assert not any(attempt(here, size).attempt.fits for size in above)


class Sequences(Dataset):
    """Few are as long as the longest, and those do not come first."""

    def __init__(self, count: int = 240) -> None:
        self.lengths = [2 + (index * 37 % 29) + (30 if index % 60 == 41 else 0) for index in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(self.lengths[index], 8), torch.tensor(index % 4)


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(inputs), batch_first=True), torch.stack(labels)


def over_time(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).mean(dim=1), batch[1])


@pytest.mark.parametrize(
    ("size_of", "windows"), [(None, 300), (lambda sample: len(sample[0]), 50)], ids=["scan", "size_of"]
)
def test_samples_of_different_lengths_never_run_out_at_the_answer(size_of, windows: int) -> None:
    workload = work(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)),
        train_data=Sequences(), collate=pad, loss=over_time, size_of=size_of,
    )  # fmt: skip
    found = autobatch.probe(workload, device="cpu", memory_budget="150KiB")
    setup = open_setup(workload, SetupSettings(device="cpu", memory_budget="150KiB"))
    assert 2 <= found.micro_batch < 60
    assert survives(setup, found.micro_batch, windows)


# Batches of one, caps, and what does not fit.


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def test_batch_statistics_of_one_sample_are_not_needed() -> None:
    found = autobatch.probe(work(normalised), device="cpu", memory_budget="60KiB")
    assert found.micro_batch > 2
    assert 1 not in [one.micro_batch for one in found.attempts]


def test_a_budget_that_holds_only_a_sample_that_cannot_run_alone_says_so() -> None:
    probe = SetupSettings(device="cpu", memory_budget="1GiB")
    least = attempt(open_setup(work(normalised), probe), 2).attempt.peak_allocated_bytes
    with pytest.raises(DoesNotFitError, match=r"micro-batch of 2 does not fit.*1 cannot run.*Expected more"):
        autobatch.probe(work(normalised), device="cpu", memory_budget=str(least - 1))
    assert autobatch.probe(work(normalised), device="cpu", memory_budget=str(least)).micro_batch >= 2


def test_the_data_set_caps() -> None:
    found = autobatch.probe(work(train_data=vectors(5)), device="cpu", memory_budget="1GiB")
    assert (found.micro_batch, found.limited_by, found.upper_bound_by) == (5, "dataset", "cap")
    assert autobatch.probe(work(train_data=vectors(1)), device="cpu").micro_batch == 1


@pytest.mark.parametrize("cap", [1, 2, 7])
def test_a_cap_is_reached_and_not_passed(cap: int) -> None:
    result, listener = probed(work(), max_micro_batch=cap)
    assert (result.probe.micro_batch, result.probe.limited_by) == (cap, "max_micro_batch")
    assert max(listener.sizes) == cap


def test_the_target_batch_caps() -> None:
    options = PlanOptions(device="cpu", memory_budget="1GiB", target_batch=3)
    result = run_plan(work(), options, RunContext())
    assert (result.probe.micro_batch, result.probe.limited_by) == (3, "target_batch")


@pytest.mark.parametrize(("device", "budget"), [("cpu", "9KiB"), ("sim:t4", "2MiB")])
def test_what_does_not_fit_names_phase_bytes_and_budget(device: str, budget: str) -> None:
    workload = work(mlp if device == "cpu" else lambda: mlp(6000))
    with pytest.raises(DoesNotFitError) as caught:
        autobatch.probe(workload, device=device, memory_budget=budget)
    text = str(caught.value)
    assert "micro-batch of 1 does not fit" in text
    assert any(f"(in the {phase})" in text for phase in ("setup", "forward", "backward", "optimizer"))
    if device == "cpu":
        assert "requested" in text
        assert "free" in text
        assert "9.00 KiB" in text
    else:
        assert "Tried to allocate" in text
        assert "is free" in text
        assert "2.00 MiB allowed" in text


def test_one_size_is_answered_alone() -> None:
    result, listener = probed(work(), micro_batch=5)
    assert (result.probe.micro_batch, listener.sizes, result.profile) == (5, [5], None)
    assert result.probe.source == "asked"
    with pytest.raises(DoesNotFitError, match="micro-batch of 500 does not fit in 80"):
        probed(work(), micro_batch=500)


def test_samples_that_cannot_be_joined_name_their_shapes() -> None:
    with pytest.raises(InputError, match=r"cannot be collated.*found shapes.*collate"):
        autobatch.probe(work(train_data=Sequences()), device="cpu")
