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
from gpp.runtime.resume import Checkpoints
from gpp.schedules.gpipe import GPipe
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy

__all__ = [
    "SGD",
    "Adam",
    "Analytical",
    "Checkpoints",
    "Cluster",
    "Device",
    "Even",
    "GPipe",
    "GraphPipe",
    "LearningRate",
    "Link",
    "OneFOneB",
    "Profiled",
    "RMSprop",
    "Sequential",
    "Strategy",
    "capture_model",
    "local",
    "problem",
    "train",
    "uniform",
]
