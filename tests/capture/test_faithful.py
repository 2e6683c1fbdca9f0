"""What a capture cannot carry to the workers is refused or warned about by name; what it carries is equal to a plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpp import SGD, Planning, Run, capture_model, parallelize
from gpp.capture.build import capture
from gpp.capture.examples import built, compare
from gpp.capture.examples import capture_model as capture_settings
from gpp.capture.faithful.numbers import tolerance
from gpp.capture.kept import advanced, random_states
from gpp.capture.stage import build_stage, initial_state
from gpp.errors import CaptureError
from gpp.graph.captured import WITHOUT_WEIGHTS, Captured
from tests.support.call import call
from tests.support.conf import model_named
from tests.support.cutting import assert_cuts_exactly


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.5)
        self.n, self.seen = 0, []
        self.kept: Tensor | None = None
        self.ema = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(torch.tanh(self.a(x))))

    def between(self, h: Tensor) -> Tensor:
        return h


class TensorHook(Plain):
    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: 2 * gradient)
        return h


class Drawn(Plain):
    def between(self, h: Tensor) -> Tensor:
        return 2 * h if random.random() < 0.5 else h


class NumpyDrawn(Plain):
    def between(self, h: Tensor) -> Tensor:
        return h * float(np.random.uniform())


class Averaged(Plain):
    def between(self, h: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean()
        return h - self.ema


class Cached(Plain):
    def between(self, h: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.a.weight.detach().mean()
        return h * self.kept


class Logged(Plain):
    def between(self, h: Tensor) -> Tensor:
        self.n += 1
        self.seen.append(self.n)
        h.register_hook(lambda gradient: None)
        return h


class Guarded(Plain):
    def between(self, h: Tensor) -> Tensor:
        return 2 * h if self.training else h


class Unused(Plain):
    def between(self, h: Tensor) -> Tensor:
        torch.rand(3)
        return self.drop(h)


class InPlace(Plain):
    def __init__(self) -> None:
        super().__init__()
        del self.ema
        self.register_buffer("ema", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        self.ema.mul_(0.9).add_(0.1 * h.detach().mean())
        return h - self.ema


class Assigned(InPlace):
    def between(self, h: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean()
        return h - self.ema


class AssignedAfter(Assigned):
    """The backward needs the buffer as it was before it is assigned."""

    def between(self, h: Tensor) -> Tensor:
        out = h * self.ema + h
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean()
        return out


class AssignedAttached(Assigned):
    """What is assigned has a gradient until the forward ends."""

    def between(self, h: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema.detach() + 0.1 * h.mean()
        return h * self.ema


class Counter:
    def __init__(self) -> None:
        self.n = 0


COUNTS = {"seen": {"n": 0}}


class Elsewhere(Plain):
    """Counts in an object of its own, in its class, and in a variable of its file."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def between(self, h: Tensor) -> Tensor:
        self.counter.n += 1
        type(self).steps += 1
        COUNTS["seen"]["n"] += 1
        return h


class OwnGenerator(Plain):
    """Draws rarely, so that no compared step tells."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def between(self, h: Tensor) -> Tensor:
        return 2 * h if self.random.random() < 0.3 else h


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=True))


class Seeded(Plain):
    def between(self, h: Tensor) -> Tensor:
        torch.manual_seed(0)
        return h + torch.randn(8, dtype=h.dtype)


class Generated(Plain):
    def between(self, h: Tensor) -> Tensor:
        return h + torch.randn(8, dtype=h.dtype, generator=torch.Generator().manual_seed(0))


@lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64) / size


TABLES: dict[int, Tensor] = {}


class Tables(Plain):
    """Tensors that are made once and kept outside of the module."""

    def between(self, h: Tensor) -> Tensor:
        if 8 not in TABLES:
            TABLES[8] = torch.linspace(0, 1, 8, dtype=h.dtype)
        return h * table(8) + TABLES[8]


class Data(Plain):
    """Writes by `.data`, as momentum encoders and codebooks do; normalises a weight that it reads, and writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: nn.Module = nn.Linear(8, 8).requires_grad_(False)
        self.book: Tensor
        self.register_buffer("book", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x[x.isnan()] = 0.0
        return super().forward(x)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.copy_(F.normalize(self.b.weight, dim=1))
        self.book.data.mul_(0.9).add_(h.detach().mean(0))
        (weight, _) = self.slow.parameters()
        weight.data = 0.9 * weight.data + 0.1 * self.a.weight.data.mean()
        return h * self.book + self.slow(h)


class Frozen(Plain):
    """An encoder with dropout and batch norm that the user has put into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(6)
        norm.register_buffer("running_mean", torch.full((6,), 0.3))
        self.encoder = nn.Sequential(nn.Linear(6, 6), norm, nn.Dropout(0.5)).requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.encoder(x))


class Tripled(Plain):
    """By a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, args, output: 3 * output)


KEPT = [
    Frozen,
    InPlace,
    Assigned,
    AssignedAfter,
    AssignedAttached,
    Tables,
    Data,
    Tripled,
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    random.seed(0)


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))


def captured_of(model: nn.Module) -> Captured:
    x, y = example()
    return capture_model(model.double(), {"x": x}, y, F.cross_entropy)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (TensorHook, r"gradient of a\.weight is off by 0\.5 .*test_faithful\.py:\d+: h\.register_hook\(lambda.*Fix: "),
        (Drawn, r"Python's module random draws at .*test_faithful\.py:\d+: return 2 \* h if random.*Fix: draw by torch"),
        (NumpyDrawn, r"numpy\.random draws at .*test_faithful\.py:\d+: return h \* float\(np"),
        (Averaged, r"second step loss is .*attribute ema \(0 before, .*\) at .*: self\.ema = 0\.9 \* self\.ema.*mul_"),
        (
            OwnGenerator,
            r"generator of its own draws.*the generator random draws at .*: return 2 \* h if self\.random.*Fix: draw by",
        ),
        (Checkpointed, r"the checkpoint at .*test_faithful\.py:\d+: .* inside none\. Fix: set use_reentrant=False"),
        (Seeded, r"the seed that is set at .*test_faithful\.py:\d+: torch\.manual_seed\(0\)\. Fix: draw once outside"),
        (
            Generated,
            r"randn\.generator at .*test_faithful\.py:\d+: .*a torch\.Generator cannot be stored: leave generator= out",
        ),
        (Cached, r"second step loss is .*attribute kept .*self\.kept = self\.a\.weight"),
    ],
    ids=[
        "tensor hook",
        "random",
        "numpy",
        "average",
        "generator",
        "checkpoint",
        "seed",
        "torch generator",
        "cache",
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_would_be_lost_is_refused_with_its_line_and_the_fix(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        captured_of(make())


def test_what_is_lost_without_effect_is_a_warning() -> None:
    model = Logged()
    model.b.weight.register_hook(lambda gradient: None)
    warnings = " | ".join(captured_of(model).warnings)
    for words in (
        "attribute n (0 before, 2 after) at",
        "attribute seen",
        "register_hook(lambda gradient: None)",
        "parameter b.weight",
    ):
        assert words in warnings
    assert captured_of(Plain()).warnings == ()


def test_what_is_counted_elsewhere_is_told_and_put_back() -> None:
    model = Elsewhere()
    warnings = captured_of(model).warnings
    assert [words.partition(" before, ")[0].rpartition("the change of ")[2] for words in warnings] == [
        "the attribute counter.n (0",
        "the attribute Elsewhere.steps (0",
        f"the variable COUNTS of {__name__}['seen']['n'] (0",
    ]
    assert (model.counter.n, Elsewhere.steps, COUNTS) == (0, 0, {"seen": {"n": 0}})
    captured_of(Tables())
    assert not TABLES and type(table(8)) is Tensor


def test_the_model_is_left_as_it_was() -> None:
    model = Logged().double()
    model.a.weight.grad = torch.ones_like(model.a.weight)
    model.drop.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, y = example()
    states = random_states()
    capture_model(model, {"x": x}, y, F.cross_entropy)
    assert (model.n, model.seen, model.kept, float(model.ema)) == (0, [], None, 0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.a.weight.grad is not None and bool((model.a.weight.grad == 1).all()) and model.b.weight.grad is None
    assert model.training and not model.drop.training
    assert not advanced(states) and torch.equal(torch.get_rng_state(), states["torch"])


@pytest.mark.parametrize("make", KEPT)
def test_what_is_kept_equals_a_plain_loop(make: Callable[[], nn.Module]) -> None:
    model, (x, y) = make().double(), example()
    captured = captured_of(model)
    assert captured.checked is not None and captured.checked.unknown is None and captured.checked.seconds > 0
    stage = build_stage(captured, [node for op in captured.graph.ops for node in op.nodes], device="cpu")
    stage.load(initial_state(model, captured))
    ours = torch.optim.SGD([p for p in stage.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    plain = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(3):
        for optimizer in (ours, plain):
            optimizer.zero_grad()
        loss, own = F.cross_entropy(model(x), y), stage(4, {"x": x, "target:target": y})["loss"]
        assert float(loss.detach()) == float(own.detach())
        loss.backward()
        own.backward()
        ours.step()
        plain.step()
    now = dict([*stage.named_parameters(), *stage.named_buffers()])
    assert all(torch.equal(tensor, now[name]) for name, tensor in model.state_dict().items() if name in now)


def test_a_later_forward_does_not_touch_what_a_backward_has_kept() -> None:
    model, (x, y) = Data().double(), example()
    stage = build_stage(captured := captured_of(model), [node for op in captured.graph.ops for node in op.nodes], device="cpu")
    stage.load(initial_state(model, captured))
    first, _ = (stage(4, {"x": x, "target:target": y})["loss"] for _ in range(2))
    first.backward()
    F.cross_entropy(model(x.clone()), y).backward()
    for own, plain in zip(stage.parameters(), model.parameters(), strict=True):
        assert own.grad is plain.grad is None or (
            own.grad is not None and plain.grad is not None and torch.equal(own.grad, plain.grad)
        )


def test_an_assigned_buffer_is_written_by_one_stage() -> None:
    model = AssignedAfter().double()
    model.ema.fill_(0.5)
    captured = captured_of(model)

    def make(batch: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"x": torch.randn(batch, 6, dtype=torch.float64)}, torch.randint(3, (batch,))

    assert_cuts_exactly(captured, model, make, F.cross_entropy, batches=(2,))


def test_a_model_that_fails_on_a_part_of_a_batch_is_refused() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 3)

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return self.bag(ids, offsets)

    given = {"ids": torch.arange(4), "offsets": torch.arange(4)}
    with pytest.raises(CaptureError, match=r"Bags fails on a part of a batch.*offsets\[0\].*Fix: make what counts"):
        capture_model(Bags().double(), given, torch.zeros(4, dtype=torch.long), F.cross_entropy)


def test_a_tensor_that_is_no_buffer_is_updated_by_workers_alone() -> None:
    class Kept(Plain):
        def between(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                self.ema.mul_(0.9).add_(0.1 * h.mean())
            return h - self.ema

    # The module's own evaluation updates it, too.
    assert [words[:18] for words in captured_of(Kept()).warnings] == ["workers update ema", "in evaluation loss"]


def test_a_batch_norm_that_counts_batches_is_refused_with_its_fix() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None)).double()
    x, y = example()
    with pytest.raises(CaptureError, match=r"Fix: give the batch norm a momentum"):
        capture_model(model, {"input": x}, y, F.cross_entropy)


def test_a_module_of_torch_export_is_captured() -> None:
    x, y = example()
    exported = torch.export.export(nn.Linear(6, 3).double(), (x,), dynamic_shapes=({0: torch.export.Dim("b", min=1)},)).module()
    found = capture(exported, (x,), y, F.cross_entropy, name="exported")
    assert any("evaluation of GraphModule could not be compared" in words for words in found.warnings)


def test_a_model_in_evaluation_mode_is_trained_so_and_told() -> None:
    warnings = captured_of(Unused().eval()).warnings
    assert len(warnings) == 1 and "Unused is in evaluation mode" in warnings[0] and "model.train()" in warnings[0]
    assert captured_of(Plain().eval()).warnings == ()


def test_other_code_in_evaluation_is_told() -> None:
    (warning,) = captured_of(Guarded()).warnings
    assert "in evaluation loss of Guarded is" in warning and "Training is not affected" in warning


def test_noise_of_evaluation_is_not_taken_for_samples_that_see_each_other() -> None:
    class Noisy(Plain):
        def between(self, h: Tensor) -> Tensor:
            return h + 0.1 * torch.randn_like(h)

    class Centred(Plain):
        def between(self, h: Tensor) -> Tensor:
            return self.drop(h - h.mean(0))

    assert [captured_of(kind()).mixes for kind in (Noisy, Centred, Plain)] == [None, True, False]


def test_draws_whose_numbers_are_not_used_do_not_shift_the_others() -> None:
    found = captured_of(Unused())
    assert found.checked is not None and found.checked.unknown is None and found.warnings == ()


def test_what_cannot_be_compared_is_told() -> None:
    model, (x, y) = Plain().double(), example()
    found = capture_model(model, {"x": x}, y, lambda outputs, targets: (outputs.sum() - outputs.sum()).log().sqrt())
    assert found.checked is not None and "not finite" in str(found.checked.unknown)
    assert any("could not be compared with Plain" in words for words in found.warnings)


def test_a_planned_model_is_compared_when_its_weights_are_built() -> None:
    model = model_named("mlp")
    found = capture_settings(model, dtype="float64")
    assert found.checked is not None and found.checked.unknown == WITHOUT_WEIGHTS
    specs = {**model.inputs(), **{f"target:{name}": spec for name, spec in model.targets().items()}}
    kinds = {"float": lambda size, _: torch.rand(size, dtype=torch.float64), "int": lambda size, high: torch.randint(high, size)}
    rows = {name: kinds[spec.dtype]((4, *spec.shape), spec.high) for name, spec in specs.items()}
    network = built(model, seed=0, dtype="float64")
    checked = compare(model, found, network, rows, dtype="float64").checked
    assert checked is not None and checked.unknown is None
    network.register_forward_hook(lambda module, args, output: 1.001 * output)
    with pytest.raises(CaptureError, match="in the first step loss is"):
        compare(model, found, network, rows, dtype="float64")


def test_half_of_the_digits_are_compared() -> None:
    assert tolerance(torch.float64) == pytest.approx(1.5e-8, rel=0.01) and tolerance(torch.float32) == pytest.approx(
        3.5e-4, rel=0.02
    )


def test_workers_keep_a_frozen_encoder_in_evaluation_mode(tmp_path) -> None:
    call("tests.capture.test_faithful", "train_frozen", str(tmp_path))


def train_frozen(folder: str) -> None:
    model, plain, (x, y) = Frozen().double(), Frozen().double(), example()
    plain.load_state_dict(model.state_dict())
    strategy, run = Planning(strategy="even", microbatch_size=2), Run(folder=folder)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    with parallelize(model, x, y, loss=F.cross_entropy, strategy=strategy, optimizer=SGD(lr=0.1), run=run) as pipeline:
        assert "compared with the module itself in" in str(pipeline)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            optimizer.step()
            assert pipeline.step(x, y) == pytest.approx(float(loss.detach()), rel=1e-14)
        evaluated = pipeline.evaluate(x, y)["loss"]
    assert all(
        torch.allclose(a, b, rtol=1e-13, atol=0)
        for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert model.training and not model.encoder.training
    assert evaluated == pytest.approx(float(F.cross_entropy(plain.eval()(x), y).detach()), rel=1e-13)
