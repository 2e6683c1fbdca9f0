"""Graph pipeline parallelism: plan, simulate and run models with branches on several devices.

The names below are the whole public interface; `gpp.app.api` says how they fit together. They are imported when they
are first used, because every worker imports this package, and needs few of them.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpp.app.api import capture_model, problem, train
    from gpp.app.optimizer_factory import ByFactory
    from gpp.app.parallel import parallelize
    from gpp.app.pipeline import Pipeline
    from gpp.app.values import Data, Loss, Planning, Run
    from gpp.cluster import Cluster, Device, Link, local, mixed, uniform
    from gpp.cost.models.analytical import Analytical
    from gpp.cost.models.profiled import Profiled
    from gpp.cost.uneven import UnevenSamples
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


def _homes() -> dict[str, str]:
    """Public name -> the module that has it: what the imports above say, which only type checkers run."""
    found = [each for each in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(each, ast.ImportFrom)]
    return {name.name: each.module for each in found if each.module and each.module.startswith("gpp.") for name in each.names}


_HOME = _homes()
__all__ = sorted(_HOME, key=lambda name: (not name.isupper(), not name[0].isupper(), name))  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
