"""Command lines whose results a refactoring must keep, and the differences that somebody meant.

A case is its command line, which is its name too. `{profiles}` is the folder of operator profiles among the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

TESTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """A difference that a commit means to make: patterns (`re.search`) of the case and of the field, and the reason."""

    case: str
    field: str
    reason: str


MEANT: tuple[Meant, ...] = ()


def words_for(case: str) -> list[str]:
    """The command line of a case."""
    return case.replace("{profiles}", str(next(TESTS.rglob("b2x16.piper.json")).parent)).split()


_SMALL = (
    "bridge_tower_small",
    "candle_uno_small",
    "char_gpt_small",
    "clip_small",
    "digits",
    "digits_deep",
    "digits_tasks",
    "dlrm_small",
    "evoformer_small",
    "flava_small",
    "gnmt_small",
    "gpt_small",
    "imagebind_small",
    "inception_small",
    "llava_small",
    "mlp",
    "mmt_small",
    "residual_lstm_small",
    "resnet_small",
    "translator_small",
    "unet_small",
    "vgg_small",
)
_PAPER = (
    "alexnet",
    "bridge_tower",
    "candle_uno",
    "case_study",
    "clip",
    "dlrm",
    "evoformer",
    "flava",
    "gnmt8",
    "googlenet",
    "gpt",
    "imagebind",
    "inception",
    "llava",
    "mmt",
    "random",
    "residual_lstm",
    "resnet101",
    "transformer",
    "translator",
    "unet",
    "vgg16",
)
MODELS: Final = (*_SMALL, *_PAPER)

_LOCAL = "cluster=local cluster.memory_bytes=4e9"  # of the machine at hand, which may have more
_HERE = f"{_LOCAL} cluster.num_devices=4"
_CLUSTERS = (
    "cluster=mixed_2x4",
    "cluster=summit_1x4",
    "cluster=summit_4x4",
    "cluster=dgx_h100",
    f"{_LOCAL} cluster.num_devices=2",
    "cluster=summit_2x4",
    f"{_LOCAL} cluster.num_devices=6",
)
_STRATEGIES = (
    "sequential",
    "pipedream_flush",
    "even",
    "pipedream_2bw",
    "gpipe",
    "piper",
    "pipedream",
    "graphpipe strategy.planner.colocate=auto",
    "spectrain",
    "pipeoptim",
)


def _of_models() -> list[str]:
    """Every model: the graph planner where the model is at home, and one more pair of cluster and strategy."""
    homes = [(model, _HERE if model in _SMALL else "cluster=summit_2x4") for model in MODELS]
    cases = [f"model={model} {home} strategy=graphpipe" for model, home in homes]
    for i, model in enumerate(MODELS):  # Apart from the first, so that two cases at a time do not both capture a model.
        cluster, strategy = _CLUSTERS[(i + i // 7) % len(_CLUSTERS)], _STRATEGIES[i % len(_STRATEGIES)]
        cases.append(f"model={model} {cluster} strategy={strategy}")
    return cases


_DEFAULTS = (("engine=", "engine=simulate"), ("cost=", "cost=analytical"), ("logger=", "logger=none"))


def _with_defaults(case: str) -> str:
    """A case with what all have in common, unless it says otherwise: simulated, at times that are the same everywhere."""
    more = [word for start, word in _DEFAULTS if not any(given.startswith(start) for given in case.split())]
    return " ".join([case, *more])


def matrix() -> list[str]:
    """All simulated cases: those of `options.txt`, and every model."""
    return [_with_defaults(case) for case in dict.fromkeys([*_lines("options.txt"), *_of_models()])]


_DRAWN = "data=imported data.factory=same_samples.Samples"
_NAMES = {
    "{local}": _LOCAL,
    "{here}": _HERE,
    "{free}": "cluster.link={_target_:gpp.cluster.Link,latency_s:0.0,bandwidth_bytes_per_s:1e12}",
    "{mlp}": f"model=mlp model.width=32 {_DRAWN} +data.args.inputs={{x:[32]}} +data.args.targets={{y:[32]}}",
    "{branches}": (
        "model=mmt model.num_branches=2 model.num_layers=2 model.hidden=16 model.sequence=4 model.num_heads=2 model.ffn=32 "
        f"{_DRAWN} +data.args.inputs={{branch_0:[4,16],branch_1:[4,16]}} +data.args.targets={{score:[1]}}"
    ),
}


def _lines(file: str) -> list[str]:
    """The cases of a file, its names written out."""
    cases = [line for line in Path(__file__).with_name(file).read_text().splitlines() if line and not line.startswith("#")]
    for name, words in _NAMES.items():
        cases = [case.replace(name, words) for case in cases]
    return cases


def runs() -> list[str]:
    """Cases that train, of `runs.txt`: eight steps in float64, of real processes unless the engine says otherwise."""
    common = "dtype=float64 steps=8 evaluate_every=0 minibatch_size=32 final_weights=false"
    cases = []
    for case in _lines("runs.txt"):
        engine = "" if "engine=" in case or "strategy=data_parallel" in case else " engine=distributed"
        cases.append(f"{case} {common}{engine} cost=analytical logger=none")
    return cases
