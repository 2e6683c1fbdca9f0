"""Graph pipeline parallelism: plan, simulate and run models with branches on several devices.

The names below are the whole public interface; `gpp.app.api` says how they fit together. They are imported when they
are first used, because every worker imports this package, and needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpp.app.api import capture_model, problem, train
    from gpp.app.optimizer_factory import ByFactory
    from gpp.app.pipeline import Pipeline, parallelize
    from gpp.cluster import Cluster, Device, Link, local, uniform
    from gpp.cost.models.analytical import Analytical
    from gpp.cost.models.profiled import Profiled
    from gpp.optimizers import SGD, Adam, LearningRate, Muon, NAdam, RMSprop
    from gpp.planners.chains.even import Even
    from gpp.planners.chains.sequential import Sequential
    from gpp.planners.graphpipe.graphpipe import GraphPipe
    from gpp.runtime.checkpoint.resume import Checkpoints
    from gpp.runtime.engines.distributed import Distributed
    from gpp.runtime.engines.reference import Reference
    from gpp.schedules.gpipe import GPipe
    from gpp.schedules.no_flush import NoFlush
    from gpp.schedules.one_f_one_b import OneFOneB
    from gpp.schedules.split_1f1b import Split1F1B
    from gpp.schedules.zero_bubble_h1 import ZeroBubbleH1
    from gpp.schedules.zero_bubble_h2 import ZeroBubbleH2
    from gpp.strategy import Strategy
    from gpp.weights.double_buffer import DoubleBuffer
    from gpp.weights.flush import Flush
    from gpp.weights.naive import Naive
    from gpp.weights.pipemare import PipeMare
    from gpp.weights.pipeoptim import PipeOptim
    from gpp.weights.spectrain import SpecTrain
    from gpp.weights.stash import Stash
    from gpp.weights.vertical_sync import VerticalSync

__all__ = [
    "SGD",
    "Adam",
    "Analytical",
    "ByFactory",
    "Checkpoints",
    "Cluster",
    "Device",
    "Distributed",
    "DoubleBuffer",
    "Even",
    "Flush",
    "GPipe",
    "GraphPipe",
    "LearningRate",
    "Link",
    "Muon",
    "NAdam",
    "Naive",
    "NoFlush",
    "OneFOneB",
    "PipeMare",
    "PipeOptim",
    "Pipeline",
    "Profiled",
    "RMSprop",
    "Reference",
    "Sequential",
    "SpecTrain",
    "Split1F1B",
    "Stash",
    "Strategy",
    "VerticalSync",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "capture_model",
    "local",
    "parallelize",
    "problem",
    "train",
    "uniform",
]

_HOME = {
    "Adam": "gpp.optimizers",
    "Analytical": "gpp.cost.models.analytical",
    "ByFactory": "gpp.app.optimizer_factory",
    "Checkpoints": "gpp.runtime.checkpoint.resume",
    "Cluster": "gpp.cluster",
    "Device": "gpp.cluster",
    "Distributed": "gpp.runtime.engines.distributed",
    "DoubleBuffer": "gpp.weights.double_buffer",
    "Even": "gpp.planners.chains.even",
    "Flush": "gpp.weights.flush",
    "GPipe": "gpp.schedules.gpipe",
    "GraphPipe": "gpp.planners.graphpipe.graphpipe",
    "LearningRate": "gpp.optimizers",
    "Muon": "gpp.optimizers",
    "NAdam": "gpp.optimizers",
    "Link": "gpp.cluster",
    "Naive": "gpp.weights.naive",
    "NoFlush": "gpp.schedules.no_flush",
    "OneFOneB": "gpp.schedules.one_f_one_b",
    "PipeMare": "gpp.weights.pipemare",
    "PipeOptim": "gpp.weights.pipeoptim",
    "Pipeline": "gpp.app.pipeline",
    "Profiled": "gpp.cost.models.profiled",
    "RMSprop": "gpp.optimizers",
    "Reference": "gpp.runtime.engines.reference",
    "SGD": "gpp.optimizers",
    "Sequential": "gpp.planners.chains.sequential",
    "SpecTrain": "gpp.weights.spectrain",
    "Split1F1B": "gpp.schedules.split_1f1b",
    "Stash": "gpp.weights.stash",
    "Strategy": "gpp.strategy",
    "VerticalSync": "gpp.weights.vertical_sync",
    "ZeroBubbleH1": "gpp.schedules.zero_bubble_h1",
    "ZeroBubbleH2": "gpp.schedules.zero_bubble_h2",
    "capture_model": "gpp.app.api",
    "local": "gpp.cluster",
    "parallelize": "gpp.app.pipeline",
    "problem": "gpp.app.api",
    "train": "gpp.app.api",
    "uniform": "gpp.cluster",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
