"""Graph pipeline parallelism: plan, simulate and run models with branches on several devices.

The names below are the whole public interface; `gpp.app.api` says how they fit together.
"""

from gpp.app.api import capture_model, problem, train
from gpp.cluster import Cluster, Device, Link, local, uniform
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.profiled import Profiled
from gpp.optimizers import SGD, Adam, LearningRate, Muon, NAdam, RMSprop
from gpp.planners.chains.even import Even
from gpp.planners.chains.sequential import Sequential
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.runtime.checkpoint.resume import Checkpoints
from gpp.runtime.engines.reference import Reference
from gpp.schedules.gpipe import GPipe
from gpp.schedules.no_flush import NoFlush
from gpp.schedules.one_f_one_b import OneFOneB
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
    "Checkpoints",
    "Cluster",
    "Device",
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
    "Profiled",
    "RMSprop",
    "Reference",
    "Sequential",
    "SpecTrain",
    "Stash",
    "Strategy",
    "VerticalSync",
    "capture_model",
    "local",
    "problem",
    "train",
    "uniform",
]
