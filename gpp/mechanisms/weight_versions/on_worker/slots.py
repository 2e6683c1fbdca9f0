"""One set of leaves, whose memory is exchanged before every pass (PipeOptim, SpecTrain's first form) or never (the naive control).

A graph keeps no weights: where autograd would save a view of one, it is told which one and which view, and the backward
gets that view of the weights that are its own. So a prediction is needed during its forward only, the backward on the
real weights reads the optimizer's memory, and nothing is copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

from torch import Tensor, nn

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.on_worker.base import AbstractVersions, alias
from gpp.mechanisms.weight_versions.on_worker.prediction import copied
from gpp.weights.base import PipelinePosition


class _WeightView(NamedTuple):
    """The stand-in for a tensor that shares memory with weight number `weight`."""

    weight: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@final
class Slots(AbstractVersions):
    """Passes on the real weights, and on one prediction at a time."""

    def __init__(self, policy: AbstractVersionPolicy, position: PipelinePosition, module: nn.Module, **settings: Any) -> None:
        super().__init__(policy, position, module, **settings)
        self._extrapolates, self._behind = policy.copies(position) > 1, policy.backward_horizon(position)
        self._real = [m.data for m in self.masters]
        self._leaves, self._shown = alias(self.masters), self._real
        self._index: dict[int, int] = {}
        self._drop()

    def scratch(self) -> list[list[Tensor]]:
        # No graph refers to the prediction.
        return []

    def reset(self) -> None:
        self._drop()
        self._saved: dict[int, list[Tensor]] = {}

    def history(self) -> dict[str, list[Tensor]]:
        first = self.version * self.position.accumulation
        saved, self._saved = self._saved, {}
        return {str(number - first): tensors for number, tensors in saved.items() if number >= first}

    def ready(self, microbatch: int) -> int:
        number, known = self.number(microbatch), self.remembered.pop(str(microbatch), None)
        horizon = self.policy.horizon(self.position, number, self.start)
        if known is not None and self._extrapolates:
            self._hold(0, known)
        else:
            self._use(horizon)
        if self.in_flight_at_save(number):
            # The prediction will be gone by then.
            self._saved[number] = copied(self._shown)
        self.hooks = (self._pack, self._unpack) if self._shown is not self._real or self._behind else None
        self.install(self._leaves)
        return self.policy.forward_version(self.position, number, self.start)

    def prepare(self, microbatch: int) -> int:
        self._use(self._behind)
        return self.version

    def leaves(self, microbatch: int) -> list[Tensor]:
        return self._leaves

    def release(self, microbatch: int) -> None:
        pass

    def make_room(self) -> None:
        # A prediction from the version that is about to go.
        self._drop()

    def _use(self, horizon: int) -> None:
        """Let passes compute with the weights so many updates ahead."""
        if not self._extrapolates or not horizon:
            self._show(self._real)
        elif self._ahead == horizon:
            self._show(self._prediction)
        else:
            self._drop()
            self._hold(horizon, self.extrapolated(horizon))

    def _hold(self, horizon: int, values: list[Tensor]) -> None:
        """Keep values, those for a horizon (0: for nobody else), and use them."""
        self._ahead, self._prediction, self.most = horizon, values, 1
        self._index = {_memory(t): i for tensors in (self._real, values) for i, t in enumerate(tensors)}
        self._show(values)

    def _drop(self) -> None:
        """Forget the prediction."""
        self._show(self._real)
        self._ahead, self._prediction = 0, self._real
        self._index = {_memory(t): i for i, t in enumerate(self._real)}

    def _show(self, tensors: list[Tensor]) -> None:
        if self._shown is not tensors:
            self._shown = tensors
            for leaf, tensor in zip(self._leaves, tensors, strict=True):
                leaf.data = tensor

    def _pack(self, tensor: Tensor) -> Tensor | _WeightView:
        weight = self._index.get(_memory(tensor))
        return tensor if weight is None else _WeightView(weight, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _WeightView) -> Tensor:
        if not isinstance(saved, _WeightView):
            return saved
        return self._shown[saved.weight].as_strided(saved.size, saved.stride, saved.offset)


def _memory(tensor: Tensor) -> int:
    """The identity of a tensor's memory. Its address would not do, as tensors without elements share one."""
    return tensor.untyped_storage()._cdata
