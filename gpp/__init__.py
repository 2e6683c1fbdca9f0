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
    from gpp.cluster import Cluster, Device, Link, local, mixed, uniform
    from gpp.cost.models.analytical import Analytical
    from gpp.cost.models.profiled import Profiled
    from gpp.mechanisms.helpers.layerpipe import LayerPipe
    from gpp.mechanisms.marks.dawnpiper import DawnPiper
    from gpp.mechanisms.marks.policies import Auto, Offload, Recompute
    from gpp.mechanisms.marks.tail import Tail
    from gpp.mechanisms.marks.vpipe import VPipe
    from gpp.mechanisms.serving.edgepipe.edgepipe import EdgePipe
    from gpp.mechanisms.split_backward.schedules.dualpipe_v import DualPipeV
    from gpp.mechanisms.split_backward.schedules.optimal import OptimalOrder
    from gpp.mechanisms.split_backward.schedules.split_1f1b import Split1F1B
    from gpp.mechanisms.split_backward.schedules.v_half import VHalf
    from gpp.mechanisms.split_backward.schedules.v_min import VMin
    from gpp.mechanisms.split_backward.schedules.zero_bubble_auto import ZeroBubbleAuto
    from gpp.mechanisms.split_backward.schedules.zero_bubble_h1 import ZeroBubbleH1
    from gpp.mechanisms.split_backward.schedules.zero_bubble_h2 import ZeroBubbleH2
    from gpp.mechanisms.split_backward.schedules.zero_bubble_v import ZeroBubbleV
    from gpp.mechanisms.weight_versions.double_buffer import DoubleBuffer
    from gpp.mechanisms.weight_versions.naive import Naive
    from gpp.mechanisms.weight_versions.pipemare import PipeMare
    from gpp.mechanisms.weight_versions.pipeoptim import PipeOptim
    from gpp.mechanisms.weight_versions.spectrain import SpecTrain
    from gpp.mechanisms.weight_versions.stash import Stash
    from gpp.mechanisms.weight_versions.vertical_sync import VerticalSync
    from gpp.memory import Keep
    from gpp.optimizers import SGD, Adam, LearningRate, Muon, NAdam, RMSprop
    from gpp.plan.plan import Plan
    from gpp.planners.bounds.optimal import Optimal
    from gpp.planners.chains.data_parallel import DataParallel
    from gpp.planners.chains.even import Even
    from gpp.planners.chains.pipedream import PipeDream
    from gpp.planners.chains.pipedream_2bw import PipeDream2BW
    from gpp.planners.chains.piper import Piper
    from gpp.planners.chains.sequential import Sequential
    from gpp.planners.chains.single import Single
    from gpp.planners.graphpipe.graphpipe import GraphPipe
    from gpp.planners.graphpipe.same_microbatch import SameMicrobatch
    from gpp.runtime.cards.local import local_gpus
    from gpp.runtime.checkpoint.resume import Checkpoints
    from gpp.runtime.engine import Progress
    from gpp.runtime.engines.distributed import Distributed
    from gpp.runtime.engines.emulate import Emulate
    from gpp.runtime.engines.simulate import Simulate
    from gpp.schedules.gpipe import GPipe
    from gpp.schedules.interleaved_1f1b import Interleaved1F1B
    from gpp.schedules.no_flush import NoFlush
    from gpp.schedules.one_f_one_b import OneFOneB
    from gpp.strategy import Strategy
    from gpp.weights.flush import Flush

__all__ = [
    "SGD",
    "Adam",
    "Analytical",
    "Auto",
    "ByFactory",
    "Checkpoints",
    "Cluster",
    "DataParallel",
    "DawnPiper",
    "Device",
    "Distributed",
    "DoubleBuffer",
    "DualPipeV",
    "EdgePipe",
    "Emulate",
    "Even",
    "Flush",
    "GPipe",
    "GraphPipe",
    "Interleaved1F1B",
    "Keep",
    "LayerPipe",
    "LearningRate",
    "Link",
    "Muon",
    "NAdam",
    "Naive",
    "NoFlush",
    "Offload",
    "OneFOneB",
    "Optimal",
    "OptimalOrder",
    "PipeDream",
    "PipeDream2BW",
    "PipeMare",
    "PipeOptim",
    "Pipeline",
    "Piper",
    "Plan",
    "Profiled",
    "Progress",
    "RMSprop",
    "Recompute",
    "SameMicrobatch",
    "Sequential",
    "Simulate",
    "Single",
    "SpecTrain",
    "Split1F1B",
    "Stash",
    "Strategy",
    "Tail",
    "VHalf",
    "VMin",
    "VPipe",
    "VerticalSync",
    "ZeroBubbleAuto",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "capture_model",
    "local",
    "local_gpus",
    "mixed",
    "parallelize",
    "problem",
    "train",
    "uniform",
]

_HOME = {
    "Adam": "gpp.optimizers",
    "Analytical": "gpp.cost.models.analytical",
    "Auto": "gpp.mechanisms.marks.policies",
    "ByFactory": "gpp.app.optimizer_factory",
    "Checkpoints": "gpp.runtime.checkpoint.resume",
    "Cluster": "gpp.cluster",
    "DataParallel": "gpp.planners.chains.data_parallel",
    "DawnPiper": "gpp.mechanisms.marks.dawnpiper",
    "Device": "gpp.cluster",
    "Distributed": "gpp.runtime.engines.distributed",
    "DoubleBuffer": "gpp.mechanisms.weight_versions.double_buffer",
    "DualPipeV": "gpp.mechanisms.split_backward.schedules.dualpipe_v",
    "EdgePipe": "gpp.mechanisms.serving.edgepipe.edgepipe",
    "Emulate": "gpp.runtime.engines.emulate",
    "Even": "gpp.planners.chains.even",
    "Flush": "gpp.weights.flush",
    "GPipe": "gpp.schedules.gpipe",
    "GraphPipe": "gpp.planners.graphpipe.graphpipe",
    "Interleaved1F1B": "gpp.schedules.interleaved_1f1b",
    "Keep": "gpp.memory",
    "LayerPipe": "gpp.mechanisms.helpers.layerpipe",
    "LearningRate": "gpp.optimizers",
    "Link": "gpp.cluster",
    "Muon": "gpp.optimizers",
    "NAdam": "gpp.optimizers",
    "Naive": "gpp.mechanisms.weight_versions.naive",
    "NoFlush": "gpp.schedules.no_flush",
    "Offload": "gpp.mechanisms.marks.policies",
    "OneFOneB": "gpp.schedules.one_f_one_b",
    "Optimal": "gpp.planners.bounds.optimal",
    "OptimalOrder": "gpp.mechanisms.split_backward.schedules.optimal",
    "PipeDream": "gpp.planners.chains.pipedream",
    "PipeDream2BW": "gpp.planners.chains.pipedream_2bw",
    "PipeMare": "gpp.mechanisms.weight_versions.pipemare",
    "PipeOptim": "gpp.mechanisms.weight_versions.pipeoptim",
    "Pipeline": "gpp.app.pipeline",
    "Piper": "gpp.planners.chains.piper",
    "Plan": "gpp.plan.plan",
    "Profiled": "gpp.cost.models.profiled",
    "Progress": "gpp.runtime.engine",
    "RMSprop": "gpp.optimizers",
    "Recompute": "gpp.mechanisms.marks.policies",
    "SGD": "gpp.optimizers",
    "SameMicrobatch": "gpp.planners.graphpipe.same_microbatch",
    "Sequential": "gpp.planners.chains.sequential",
    "Simulate": "gpp.runtime.engines.simulate",
    "Single": "gpp.planners.chains.single",
    "SpecTrain": "gpp.mechanisms.weight_versions.spectrain",
    "Split1F1B": "gpp.mechanisms.split_backward.schedules.split_1f1b",
    "Stash": "gpp.mechanisms.weight_versions.stash",
    "Strategy": "gpp.strategy",
    "Tail": "gpp.mechanisms.marks.tail",
    "VHalf": "gpp.mechanisms.split_backward.schedules.v_half",
    "VMin": "gpp.mechanisms.split_backward.schedules.v_min",
    "VPipe": "gpp.mechanisms.marks.vpipe",
    "VerticalSync": "gpp.mechanisms.weight_versions.vertical_sync",
    "ZeroBubbleAuto": "gpp.mechanisms.split_backward.schedules.zero_bubble_auto",
    "ZeroBubbleH1": "gpp.mechanisms.split_backward.schedules.zero_bubble_h1",
    "ZeroBubbleH2": "gpp.mechanisms.split_backward.schedules.zero_bubble_h2",
    "ZeroBubbleV": "gpp.mechanisms.split_backward.schedules.zero_bubble_v",
    "capture_model": "gpp.app.api",
    "local": "gpp.cluster",
    "local_gpus": "gpp.runtime.cards.local",
    "mixed": "gpp.cluster",
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
