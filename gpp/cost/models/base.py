"""The promise of a cost model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpp.settings import file_word

if TYPE_CHECKING:
    import numpy as np

    from gpp.cluster import Device
    from gpp.graph.op_graph import OpGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """Seconds of every operator of a graph for one micro-batch: arrays of shape [num_ops].

    Args:
        weight_s: the part of the backward's seconds that makes gradients of weights, where a backward can leave these for later.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray


class AbstractCostModel(ABC):
    """Seconds of operators on a device. Transfers and collectives belong to `Cluster`."""

    @property
    def name(self) -> str:
        """The word that chooses it (`cost=analytical`): the name of its file, unless it says another."""
        return file_word(self)

    @abstractmethod
    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        """Times of one forward and one backward of every operator on `samples` samples.

        Args:
            graph: the operators, amounts per sample.
            samples: micro-batch size on one replica, at least 1.
            device: where they run; its `speed_factor` is honoured.
            degree: devices that share the work (`OpGraph.shares`).
        """

    @abstractmethod
    def update_s(self, num_bytes: float, device: Device) -> float:
        """Seconds of the optimizer step over `num_bytes` of trainable parameters."""

    @abstractmethod
    def move_s(self, num_bytes: float, device: Device) -> float:
        """Seconds to read or write `num_bytes` of a device's own memory, in one pass; a copy of a tensor moves its bytes twice."""

    def whole_ops(self, graph: OpGraph, device: Device) -> tuple[int, ...]:
        """Operators whose gradients of weights are not left for later, although they could be: both passes take too long."""
        return ()

    def product_type(self, graph: OpGraph) -> str:
        """The floating-point type in which products are computed."""
        return graph.dtype

    def launch_s(self, device: Device) -> float:
        """Seconds to start an operator's kernel, however little it does."""
        return device.kernel_latency_s / device.speed_factor


class AbstractTable(AbstractCostModel):
    """A cost model that has times of operators alone: all else takes none."""

    def update_s(self, num_bytes: float, device: Device) -> float:
        return 0.0

    def move_s(self, num_bytes: float, device: Device) -> float:
        return 0.0

    def launch_s(self, device: Device) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class AbstractDerived(AbstractCostModel):
    """A cost model whose operators' times follow from another's, and which has all other times from it.

    Args:
        cost: the other one.
    """

    cost: AbstractCostModel

    def update_s(self, num_bytes: float, device: Device) -> float:
        return self.cost.update_s(num_bytes, device)

    def product_type(self, graph: OpGraph) -> str:
        return self.cost.product_type(graph)

    def move_s(self, num_bytes: float, device: Device) -> float:
        return self.cost.move_s(num_bytes, device)

    def whole_ops(self, graph: OpGraph, device: Device) -> tuple[int, ...]:
        return self.cost.whole_ops(graph, device)

    def launch_s(self, device: Device) -> float:
        return self.cost.launch_s(device)
