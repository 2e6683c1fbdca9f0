"""Every setting of every class refuses what it cannot mean, with its own name and with a fix that works."""

from __future__ import annotations

import importlib
import inspect
import math
import pickle
import pkgutil
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from pydantic import Field

import gpp
from gpp import SGD, Analytical, Device, Even, Link, Loss, OneFOneB, Planning, Run, Simulate, Strategy, local
from gpp.cost.models.profiled import Profiled
from gpp.data.digits import DigitsData
from gpp.errors import InvalidConfig, written
from gpp.loggers.tensorboard import TensorBoard
from gpp.loggers.wandb import Wandb
from gpp.models.profile import Profile
from gpp.models.random_graph import RandomGraph
from gpp.runtime.cards import local as cards
from gpp.runtime.cards.local import Speeds
from gpp.runtime.controller.slurm import Slurm
from gpp.settings import Count, Natural, Positive, Text, arguments, declared, settings

ROOT = Path(__file__).resolve().parent.parent
HUGE = 10**5000
NASTY = [
    True,
    False,
    math.nan,
    math.inf,
    -math.inf,
    HUGE,
    -HUGE,
    3.0,
    0.5,
    "3",
    "",
    "x" * 5000,
    None,
    [],
    {},
    [True],
    {"a": math.nan},
    object(),
]
UNLIKELY = [-1, 0, 10**12, "graphpip", [0.5, "x"]]
"""Of a usual type, and hardly what any setting takes."""
LINK = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
DEVICE = Device(kind="cpu", memory_bytes=1e9, peak_flop_per_s={"float32": 1e9}, memory_bandwidth_bytes_per_s=1e9)
EVEN = Strategy(name="even", planner=Even(), schedule=OneFOneB())
OBJECTS = (
    Even(), OneFOneB(), LINK, DEVICE, RandomGraph(num_ops=3), DigitsData(), local(num_devices=1), Analytical(), Simulate(),
    TensorBoard(), SGD(lr=0.1), EVEN, RandomGraph(num_ops=3).captured(), Loss(), Planning(strategy=EVEN), Run(),
)  # fmt: skip
"""One of each class that fields of other classes hold."""


def modules() -> list[Any]:
    """Modules with settings; each is imported only if its text says that it has some."""
    paths = [path for top in ("gpp", "baselines") for path in sorted((ROOT / top).rglob("*.py"))]
    found = [path for path in paths if re.search(r"^@(settings|arguments)\(", path.read_text(), re.M)]
    return [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in found]


def prefix_of(text: str, name: str) -> str | None:
    """The prefix that a class or a function is decorated with, read from its module's text."""
    match = re.search(rf'^@(?:settings|arguments)\((\w+|"[\w.]*")[^\n]*\)\n(?:@final\n)?(?:class|def) {name}\b', text, re.M)
    return match.group(1) if match else None


def targets() -> list[tuple[Any, str]]:
    out = []
    for module in modules():
        text = Path(module.__file__).read_text()
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and (prefix := prefix_of(text, name)) is not None:
                out.append((value, prefix.strip('"') if prefix.startswith('"') else getattr(module, prefix)))
    return out


TARGETS = targets()


def hints_of(target: Any) -> dict[str, tuple[Any, Any]]:
    """Name -> (type, default) of each setting."""
    if not isinstance(target, type):
        hints = typing.get_type_hints(target, include_extras=True)
        given = inspect.signature(target).parameters
        return {name: (hints[name], MISSING if p.default is inspect.Parameter.empty else p.default) for name, p in given.items()}
    out = {}
    for f in fields(target):
        base = next(base for base in target.__mro__ if f.name in inspect.get_annotations(base))
        hint = eval(f.type, vars(sys.modules[base.__module__])) if isinstance(f.type, str) else f.type
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if f.init:
            out[f.name] = (hint, default)
    return out


def fits(hint: Any, value: Any) -> bool:
    """Whether a value has a type, ranges apart: written without the code under test."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin is Annotated:
        return fits(args[0], value)
    if origin in (Union, UnionType):
        return any(fits(arg, value) for arg in args)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if hint in (None, NoneType):
        return value is None
    if hint is int:
        return type(value) is int and abs(value) < 2**32
    if hint is float:
        return type(value) in (int, float) and abs(value) < 1e308
    if origin in (tuple, list, Sequence):
        return isinstance(value, list | tuple) and all(fits(args[0], item) for item in value)
    if origin in (dict, Mapping) or typing.is_typeddict(hint):
        inner = args[1] if args else Any
        return isinstance(value, Mapping) and all(fits(inner, item) for item in value.values())
    if origin is not None:
        return callable(value)
    return isinstance(value, hint)


def example(hint: Any) -> Any:
    """A value for a setting that has no default."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return example(args[0])
    if origin in (Union, UnionType):
        return None if NoneType in args else example(args[0])
    if origin is Literal:
        return args[0]
    if typing.is_typeddict(hint):
        return {name: example(part) for name, part in typing.get_type_hints(hint, include_extras=True).items()}
    if origin in (tuple, Sequence, list):
        return [example(arg) for arg in args if arg is not Ellipsis]
    if origin in (dict, Mapping):
        return {"float32": 1.0}
    simple: dict[Any, Any] = {int: 1, float: 0.5, str: "word", bool: False, Any: 1}
    return simple[hint] if hint in simple else next(value for value in OBJECTS if isinstance(value, hint))


def usual(target: Any) -> dict[str, Any]:
    """Arguments that the target takes."""
    out = {name: example(hint) for name, (hint, default) in hints_of(target).items() if default is MISSING}
    return out | USUAL.get(f"{target.__module__}.{target.__name__}", {})


SPECS = {"input_specs": {"x": 4}, "target_specs": {"y": 4}}
PIPEEDGE = {
    "path": str(ROOT / "sweeps" / "pipeedge" / "models.yml"),
    "types": str(ROOT / "sweeps" / "pipeedge" / "device_types.yml"),
}
USUAL = {
    "gpp.cluster.Cluster": {"nodes": [0], "devices": [DEVICE]},
    "gpp.models.network.Network": {"network": "torch.nn.Linear", "arguments": {}, **SPECS},
    "gpp.models.imported.Imported": {"factory": "torch.nn.Linear", **SPECS},
    "gpp.models.blocks.Blocks": {"blocks": {"head": {"factory": "torch.nn.Linear", "inputs": ["x"]}}, **SPECS},
    "gpp.models.profile.Profile": {"path": __file__},
    "gpp.models.pipeedge.PipeEdge": {**PIPEEDGE, "entry": "google/vit-base-patch16-224"},
    "gpp.models.pipeedge.from_files": {**PIPEEDGE, "key": "google/vit-base-patch16-224"},
    "gpp.formats.pipeedge.graph.cluster": {
        "types": PIPEEDGE["types"],
        "devices": str(ROOT / "sweeps" / "pipeedge" / "devices_4_4.yml"),
    },
    "gpp.data.imported.ImportedData": {"factory": "torch.utils.data.TensorDataset"},
}
"""Arguments between which there are rules."""


SETTINGS = [
    pytest.param(target, prefix, name, id=f"{target.__module__}.{target.__name__}.{name}")
    for target, prefix in TARGETS
    for name in hints_of(target)
]


@pytest.fixture(autouse=True)
def _two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `local_gpus`, which asks for this machine's."""
    found = Speeds(flop_per_s={"float32": 1e13}, memory_bytes_per_s=1e12, kernel_latency_s=1e-6)
    monkeypatch.setattr(cards, "cuda_devices", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(name="card", total_memory=8e9))
    monkeypatch.setattr(cards, "speeds", lambda identity, cache_dir: found)


def test_settings_are_found() -> None:
    assert len({target for target, _ in TARGETS}) >= 45
    assert len(SETTINGS) >= 150


@pytest.mark.parametrize(("target", "prefix"), TARGETS, ids=lambda value: getattr(value, "__name__", value))
def test_an_unknown_setting_is_refused_and_the_usual_ones_pass(target: Any, prefix: str) -> None:
    made = target(**usual(target))
    assert not isinstance(target, type) or pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(TypeError, match="no_such_setting"):
        target(**usual(target), no_such_setting=1)


OUT_OF_RANGE: dict[Any, dict[str, Any]] = {
    gpp.Adam: {"betas": (0.9,)},
    gpp.Checkpoints: {"every": -1, "keep": 0},
    gpp.Distributed: {"launch": "ssh", "nodes": 0, "master_port": 99999, "startup_timeout_s": 0.0, "autocast": "int8"},
    gpp.Emulate: {"budget_s": 0.0, "overhead": 1.0, "time_scale": 0.0, "max_steps": 1},
    gpp.Optimal: {"limit": 0},
    gpp.PipeDream: {"states": "deep", "time_limit_s": 0, "activation_compression": 0, "max_states": 0},
    gpp.PipeDream2BW: {"replication": None, "max_candidates": 0},
    gpp.PipeOptim: {"offset": 2, "future": "none", "horizon_from": "guess"},
    gpp.Piper: {"linearize": "deep", "time_limit_s": 0, "max_states": 0},
    Profile: {"seconds": 0},
    Profiled: {"num_threads": 0, "budget_s": 0},
    gpp.RMSprop: {"alpha": 1.0, "momentum": -0.1, "weight_decay": -1.0, "clip_norm": 0, "lr": 0},
    RandomGraph: {"num_ops": 0},
    SGD: {"momentum": 1.0},
    gpp.Sequential: {"patience": 0},
    Slurm: {"executor": "pbs", "time_min": 0},
    gpp.SpecTrain: {"form": 3},
    gpp.Stash: {"accumulation": 0},
    Strategy: {"replicas": "maybe"},
    Wandb: {"mode": "sometimes", "project": ""},
}
"""Values of the right type that a setting cannot mean."""


@pytest.mark.parametrize(
    ("target", "name", "value"), [(target, *wrong) for target, own in OUT_OF_RANGE.items() for wrong in own.items()]
)
def test_values_out_of_range_are_refused(target: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as caught:
        target(**{**usual(target), name: value})
    assert caught.value.field == f"{dict(TARGETS)[target]}.{name}"


@cache
def read_by_hydra(word: str) -> Any:
    """The value of a word of the command line; most wrong values of a setting have one fix."""
    return OverridesParser.create().parse_override(word).value()


@pytest.mark.parametrize(("target", "prefix", "name"), SETTINGS)
def test_wrong_values_are_refused_by_name_with_a_fix_that_works(target: Any, prefix: str, name: str) -> None:
    """`set FIELD=VALUE` is what Hydra reads, and the setting takes the value."""
    hint, _ = hints_of(target)[name]
    dotted = f"{prefix}.{name}" if prefix else name
    others = usual(target)
    for value in [*NASTY, *UNLIKELY]:
        try:
            made = target(**{**others, name: value})
        except InvalidConfig as error:
            if not fits(hint, value):
                assert error.field == dotted or error.field.startswith((f"{dotted}.", f"{dotted}[")), error
            assert error.rule and error.fix
            message = str(error)
            assert len(message) < 900 and "\n" not in message
            assert pickle.loads(pickle.dumps(error)).fix == error.fix
            if error.fix.startswith(f"set {dotted}="):
                fix = read_by_hydra(error.fix.removeprefix("set "))
                try:
                    target(**{**others, name: fix})
                except InvalidConfig as again:
                    assert again.rule != error.rule, f"{error} -> {again}"  # a rule between fields may be next
        else:
            assert fits(hint, value), f"{dotted} takes {written(value)}"
            if isinstance(target, type):
                kept = getattr(made, name)
                assert kept is value or kept == value or list(kept) == list(value)


UNCONVERTED = ("gpp.models.network.flat", "gpp.models.specs.", "gpp.app.multirun.")  # they hand on to those that declare


def test_whatever_the_configuration_builds_declares_its_settings() -> None:
    named = {word for path in (ROOT / "conf").rglob("*.yaml") for word in re.findall(r"_target_: *([\w.]+)", path.read_text())}
    known = [target for target, _ in TARGETS]
    built = {name: pkgutil.resolve_name(name) for name in named if not name.startswith(UNCONVERTED)}
    assert sorted(name for name, target in built.items() if target not in known) == []


@settings("example")
class Example:
    """Shapes of types that no class has yet."""

    count: Count = 6
    rate: Annotated[float, Field(gt=0, examples=[0.01])] = 1.0
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    word: Literal["train", "plan", "compare"] = "train"
    either: Literal[False, True, "auto"] = False
    pair: tuple[Positive, Natural] = (1.0, 0)
    counts: tuple[Count, ...] = ()
    peaks: Mapping[str, Positive] | None = None
    note: Text = ""
    amount: Positive = 1.0
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if self.count == 5:
            raise InvalidConfig("example.count", 5, "must not be five", "set example.count=6")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", True, "example.count=true: must be an integer of at least 1. Fix: set example.count=6."),
        ("count", 0, "example.count=0: must be an integer of at least 1. Fix: set example.count=1."),
        ("count", 3.0, "example.count=3.0: must be an integer of at least 1. Fix: set example.count=3."),
        ("count", "3", "example.count='3': must be an integer of at least 1. Fix: set example.count=3."),
        ("count", 5, "example.count=5: must not be five. Fix: set example.count=6."),
        ("count", 10**10, "example.count=10000000000: must be an integer from 1 to 1000000000. Fix: set example.count=6."),
        ("rate", math.nan, "example.rate=nan: must be a positive finite number. Fix: set example.rate=1.0."),
        ("amount", -1, "example.amount=-1: must be a positive number. Fix: set example.amount=1.0."),
        ("amount", 1e-300, "example.amount=1e-300: must be a number of at least 1e-36. Fix: set example.amount=1.0."),
        ("amount", 1e300, "example.amount=1e+300: must be a number above 0 and at most 1e+36. Fix: set example.amount=1.0."),
        (
            "links",
            [{"latency_s": 0}],
            "example.links[0]={latency_s:0}: must be an object of the class gpp.links.Link. Fix: write _target_: gpp.links.Link "
            "beside its other settings.",
        ),
        ("share", 1, "example.share=1: must be a number above 0 and below 1. Fix: set example.share=0.5."),
        ("word", "plam", "example.word=plam: must be one of train, plan, compare. Fix: set example.word=plan."),
        ("either", 1, "example.either=1: must be one of false, true, auto. Fix: set example.either=false."),
        ("counts", [2, 0.5], "example.counts=[2,0.5]: must be a list of integers of at least 1. Fix: set example.counts=[2,1]."),
        ("peaks", {"a": -1}, "example.peaks.a=-1: must be a positive number. Fix: set example.peaks.a=1.0."),
        ("note", None, "example.note=null: must be a text. Fix: set example.note=''."),
    ],
)
def test_messages(name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Example(**{name: value})
    assert str(caught.value) == message


def test_what_is_kept() -> None:
    """Lists become tuples and integers numbers; objects are not copied; the file form and copies stay equal."""
    inner = {"a": 1.0}
    made = Example(counts=[1, 2], rate=2, peaks=inner)  # pyright: ignore[reportArgumentType]
    assert made.counts == (1, 2) and made.rate == 2.0 and type(made.rate) is float
    assert is_dataclass(made) and made == Example(counts=(1, 2), rate=2.0, peaks=inner)
    planner = Even()
    assert Strategy(name="even", planner=planner, schedule=OneFOneB()).planner is planner
    with pytest.raises(AttributeError):
        made.count = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_unknown_types_are_a_mistake_of_the_programmer() -> None:
    @settings("wrong")
    class Wrong:
        field: set[int]

    assert declared(Wrong) and not declared(Wrong).kinds["field"].allows([1])

    @arguments("f")
    def function(*, count: Count = 1) -> int:
        return count

    assert function(count=3) == 3
    with pytest.raises(InvalidConfig, match=r"f\.count=0"):
        function(count=0)


BAD = [
    "steps=true", "steps='3'", "minibatch_size=inf", f"seed={10**30}", "dtype=float16", "optimizer.lr=[1]",
    "strategy.planner.patience=0", f"steps={'9' * 5000}", f"name={'x' * 5000}", "cluster.device.memory_bytes={a:1}",
]  # fmt: skip


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hydra.core.global_hydra import GlobalHydra

    from gpp.app import cli

    monkeypatch.setenv("GPP_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for word in BAD:
        GlobalHydra.instance().clear()
        usual = ["run.py", "mode=plan", "model=mlp", "cluster=summit_1x4", "cost=analytical", f"hydra.run.dir={tmp_path}"]
        monkeypatch.setattr(sys, "argv", [*usual, "logger=none", word])
        with pytest.raises(SystemExit) as ended:
            cli.main(lambda experiment, recorder: pytest.fail("it was taken"))
        out, err = capsys.readouterr()
        assert ended.value.code == 2, word
        assert err.startswith(f"error: {word.partition('=')[0]}=") and ". Fix: " in err and err.count("\n") == 1, err
        assert "Traceback" not in out + err and len(err) < 500
