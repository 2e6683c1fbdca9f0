"""Graph pipeline parallelism: plan, simulate and run models with branches on several devices.

The names below are the whole public interface; `gpp.api` says how they fit together.
"""

from gpp.api import capture_model, problem, train
from gpp.cluster import Cluster, Device, Link, local, uniform
from gpp.cost.analytical import Analytical
from gpp.cost.profiled import Profiled
from gpp.optimizers import SGD, Adam, LearningRate, RMSprop
from gpp.planners.even import Even
from gpp.planners.graphpipe import GraphPipe
from gpp.planners.sequential import Sequential
from gpp.runtime.lockstep import Lockstep
from gpp.runtime.resume import Checkpoints
from gpp.schedules.gpipe import GPipe
from gpp.schedules.no_flush import NoFlush
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from gpp.weights.double_buffer import DoubleBuffer
from gpp.weights.flush import Flush
from gpp.weights.naive import Naive
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
    "Lockstep",
    "Naive",
    "NoFlush",
    "OneFOneB",
    "PipeOptim",
    "Profiled",
    "RMSprop",
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
