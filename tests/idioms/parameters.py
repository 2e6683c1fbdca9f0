"""What users do to parameters."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.idioms.case import D, Made, batches, idiom, rows

on = partial(idiom, theme="Parameters")


class Between(nn.Module):
    """A layer between two linear ones."""

    def __init__(self, mid: nn.Module) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(D, D), mid, nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mid(torch.tanh(self.first(x)))))


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(rank, D)), nn.Parameter(torch.zeros(D, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (x @ self.down.T) @ self.up.T


@on("LoRA by hand: a frozen layer and two thin matrices", "equal")
def lora() -> Made:
    return Made(Between(LoRA(nn.Linear(D, D))))


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(D, D)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(D, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, D, bias=False)})
        self.scaling = {"default": 0.5}
        self.active = ["default"]

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        for name in self.active:
            out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out


@on("adapters in dicts, all else frozen by name (as peft has it)", "equal")
def peft() -> Made:
    model = Between(Adapters())
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    return Made(model)


@on("one bias trained, all else frozen (BitFit)", "equal")
def bitfit() -> Made:
    model = Between(nn.Linear(D, D)).requires_grad_(False)
    model.mid.bias.requires_grad_(True)
    return Made(model)


@on("`parametrizations.weight_norm`", "equal")
def weight_norm() -> Made:
    return Made(Between(parametrizations.weight_norm(nn.Linear(D, D))))


@on("`nn.utils.weight_norm`, the older one", "equal")
def old_weight_norm() -> Made:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Made(Between(nn.utils.weight_norm(nn.Linear(D, D))))


@on("`parametrizations.orthogonal`", "equal")
def orthogonal() -> Made:
    return Made(Between(parametrizations.orthogonal(nn.Linear(D, D), orthogonal_map="cayley")))


@on("`parametrizations.spectral_norm`", "warned", "updated by every micro-batch", "one micro-batch a mini-batch")
def spectral_norm() -> Made:
    return Made(Between(parametrizations.spectral_norm(nn.Linear(D, D))))


@on(
    "`parametrizations.spectral_norm`, a micro-batch a mini-batch",
    "warned",
    "evaluates what it trains",
    "evaluate by pipeline.state_dict()",
)
def spectral_norm_whole() -> Made:
    return Made(Between(parametrizations.spectral_norm(nn.Linear(D, D))), whole=True)


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm(dim=1, keepdim=True)


@on("a parametrization of one's own", "equal")
def own_parametrization() -> Made:
    layer = nn.Linear(D, D)
    nn.utils.parametrize.register_parametrization(layer, "weight", Scaled())
    return Made(Between(layer))


@on("`prune.l1_unstructured`", "equal")
def pruned() -> Made:
    return Made(Between(prune.l1_unstructured(nn.Linear(D, D), "weight", amount=0.5)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(10, D), nn.Linear(D, D), nn.Linear(D, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.embed(ids))))


def tokens() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(10, (8,)), torch.randint(10, (8,))) for _ in range(3)]


@on("weights tied by assignment, over two stages", "equal")
def tied() -> Made:
    return Made(Tied(), tokens(), F.cross_entropy)


class TiedByProperty(Tied):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    @property
    def out(self) -> Tensor:
        return self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.mid(self.embed(ids))), self.out)


@on("weights tied by a property", "equal")
def tied_by_property() -> Made:
    return Made(TiedByProperty(), tokens(), F.cross_entropy)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


@on("a submodule called twice", "equal")
def twice() -> Made:
    return Made(Twice())


@on("a submodule under two names", "equal")
def two_names() -> Made:
    model = Between(nn.Linear(D, D))
    model.add_module("same", model.mid)
    return Made(model)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.extra = [nn.Parameter(torch.randn(D, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) * self.extra[0]))


@on("a parameter in a plain list, of which no optimizer hears", "equal")
def listed() -> Made:
    return Made(Listed())


@on("a parameter in a plain list, given to the optimizer", "refused", "that are not the model's", "nn.ParameterList")
def listed_and_trained() -> Made:
    model = Listed()
    model.double()
    return Made(model, optimizer=torch.optim.SGD([*model.parameters(), *model.extra], lr=0.1))


class Branches(Between):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, D))
        self.unused = nn.Linear(D, D)


@on("parameters that nothing reads, with weight decay", "equal")
def unused() -> Made:
    return Made(Branches(), optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5))


class NoGradient(Between):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.first(x)
        return self.last(torch.tanh(self.mid(fixed)))


@on("parameters under `torch.no_grad()`, with weight decay", "equal")
def without_gradient() -> Made:
    model = NoGradient(nn.Linear(D, D))
    return Made(model, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5))


class Zeroed(Between):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mid(x) + 0 * self.first(x)))


@on("parameters whose gradient is zero, with weight decay", "equal")
def zero_gradient() -> Made:
    model = Zeroed(nn.Linear(D, D))
    return Made(model, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0, D))
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(D, D)) for _ in range(2)])
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(D, 3))})
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(x @ part) * self.scale
        x = torch.cat([x, self.nothing]) if self.bias is None else x
        return x @ self.named["last"]


@on("a scalar, an empty one, ParameterList and ParameterDict, one that is None", "equal")
def odd() -> Made:
    return Made(Odd())


class Clamped(Between):
    def forward(self, x: Tensor) -> Tensor:
        self.mid.weight.data.clamp_(-0.3, 0.3)  # pyright: ignore[reportCallIssue]
        return super().forward(x)


@on(
    "weights clamped in `forward` (`weight.data.clamp_`)",
    "warned",
    "updated by every micro-batch",
    "read `self.weight.clamp(-c, c)`",
)
def clamped() -> Made:
    return Made(Clamped(nn.Linear(D, D)))


@on("names such as `add`, `class`, `img-enc` and `a.b_c` beside `a_b.c`", "equal")
def names() -> Made:
    class Named(Between):
        def __init__(self) -> None:
            super().__init__(nn.Linear(D, D))
            self.add, self.cut, self.a, self.a_b = nn.Linear(D, D), nn.Linear(D, D), nn.Module(), nn.Module()
            self.a.b_c, self.a_b.c = nn.Linear(D, D), nn.Linear(D, D)
            self.towers = nn.ModuleDict({"img-enc": nn.Linear(D, D)})
            self.register_parameter("class", nn.Parameter(torch.ones(D)))

        def forward(self, batch: Tensor) -> Tensor:  # type: ignore[override]
            gain = self._parameters["class"]
            assert gain is not None
            for layer in (self.add, self.cut, self.a.b_c, self.a_b.c, self.towers["img-enc"]):
                batch = torch.tanh(layer(batch)) * gain  # pyright: ignore[reportCallIssue]
            return super().forward(batch)

    return Made(Named(), batches(lambda: {"batch": rows(D)}))


@on("`torch.func.functional_call` with weights of one's own", "equal")
def functional() -> Made:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.shift = Between(nn.Linear(D, D)), nn.Parameter(torch.ones(D, D))

        def forward(self, x: Tensor) -> Tensor:
            own = dict(self.net.named_parameters())
            own["mid.weight"] = own["mid.weight"] * self.shift  # pyright: ignore[reportArgumentType]
            return torch.func.functional_call(self.net, own, (x,))  # pyright: ignore[reportArgumentType]

    return Made(Called())


@on("lazy layers that have not seen a batch", "refused", "waits for a first batch", "call the model once before")
def lazy() -> Made:
    return Made(Between(nn.LazyLinear(D)))


@on("complex parameters", "equal")
def complex_numbers() -> Made:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.Parameter(torch.randn(D // 2 + 1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.gains), n=D)

    return Made(Between(Spectral()))


@on("weight EMA of `pipeline.state_dict()` by hand", "equal")
def ema() -> Made:
    kept: dict[str, Tensor] = {}

    def each(state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            kept.setdefault(f"ema.{name}", torch.zeros_like(tensor)).lerp_(tensor, 0.3)

    return Made(Between(nn.Linear(D, D)), each=each, kept=kept)  # pyright: ignore[reportArgumentType]
