"""A stream of requests through a pipeline: the program of one request, repeated, with buffers of bounded size.

A request is a mini-batch: samples that come together, and whose answers go together. Its program has forwards and messages only
(`gpp.schedules.forward_only`), and every device repeats its own list for each request without a barrier in between. What bounds how
far devices run ahead of each other are the buffers of the edges. With n of them on each side:

* The messages of a device's pass p are sent when its pass p - n has begun: it has taken its own messages out of the buffers.
* A device begins pass q when what its pass q - n - 1 has made has left.

So beside the messages of the pass under way no more than n on each edge lie with the reader, and n with the maker. Both rules wait
for passes of earlier micro-batches, so nothing can wait for itself where all stages cut requests alike (`check_served`): with other
sizes a reader may need more messages for one pass than an edge has room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

from gpp.errors import InvalidPlan
from gpp.plan.plan import Plan
from gpp.program.kinds import COMPUTE, RECEIVES, SENDS, Action
from gpp.program.steady_state import moved
from gpp.runtime.hang_detection.status import COURSE, AbstractStatus


def stream_of(
    actions: Sequence[Action], ahead: int, counts: Mapping[int, int], samples: int, requests: int, first: int = 0
) -> Iterator[list[Action]]:
    """A device's actions, request by request: its list, repeated, with receives posted some passes ahead, across requests.

    Args:
        actions: the device's actions for one request.
        ahead: passes before the one that needs a message at which its receive is posted.
        counts: micro-batches of a request, by stage.
        samples: the number of samples of a request.
        first, requests: number of the first one, and how many there are with those before it.
    """
    passes = [action for action in actions if action.kind in COMPUTE]
    receives = {(a.stage, a.microbatch): [b for b in actions if b.kind in RECEIVES and b[1:3] == a[1:3]] for a in passes}
    sends = {(a.stage, a.microbatch): [b for b in actions if b.kind in SENDS and b[1:3] == a[1:3]] for a in passes}

    def posts(number: int) -> list[Action]:
        request, place = divmod(number, len(passes))
        return [moved(a, counts, samples, request) for a in receives[passes[place][1:3]]] if request < requests else []

    begin = first * len(passes)
    for request in range(first, requests):
        own = [a for number in range(begin, begin + ahead) for a in posts(number)] if request == first else []
        for place, one in enumerate(passes):
            own += posts(request * len(passes) + place + ahead)
            own.append(moved(one, counts, samples, request))
            own += [moved(a, counts, samples, request) for a in sends[one[1:3]]]
        yield own


def places(actions: Sequence[Action], request: Sequence[Action], counts: Mapping[int, int]) -> list[int]:
    """The place in the program's list of each action of a request, and the place of its end.

    A receive that is posted ahead stands with the pass before which it is posted: nobody waits in it.

    Args:
        actions, counts: as `stream_of` has them.
        request: one of those that it gives.
    """
    place = {(a.kind, a.stage, a.microbatch, a.peer_stage, a.peer_device): n for n, a in enumerate(actions)}
    out = [len(actions)]
    for a in reversed(request):
        key = (a.kind, a.stage, a.microbatch % counts[a.stage], a.peer_stage, a.peer_device)
        out.append(out[-1] if a.kind in RECEIVES else place[key])
    return out[::-1]


def check_served(plan: Plan) -> None:
    """Refuse a plan that no stream of requests can run through.

    Raises:
        InvalidPlan: names the stage, and what it does that a stream cannot.
    """
    size = plan.stages[0].microbatch_size
    for s, stage in enumerate(plan.stages):
        if stage.microbatch_size != size or plan.minibatch_size % size:
            raise InvalidPlan(
                f"stage {s}: micro-batch {stage.microbatch_size} must be the same in all stages and divide the request, "
                f"{plan.minibatch_size} samples, or an edge with few buffers would block. Fix: set microbatch_size={size}"
            )
        for value in stage.mechanisms:
            value.check_pipeline(s, trains=False)
    if plan.shares_devices:
        raise InvalidPlan("a device holds several stages, which mode=inference would have to interleave. Fix: one stage a device")


@final
class StreamStatus(AbstractStatus):
    """Tells where in the program of one request a worker is, whose lists of actions are those of a stream.

    Args:
        status: that of the worker.
        actions, counts: as `gpp.mechanisms.serving.stream.stream_of` has them.
    """

    def __init__(self, status: AbstractStatus, actions: Sequence[Action], counts: Mapping[int, int]) -> None:
        super().__init__(status)
        self._actions, self._counts = actions, counts
        self._places: Sequence[int] = ()

    def told(self, requests: Iterable[list[Action]], first: int) -> Iterator[tuple[int, list[Action]]]:
        """Number and actions of each request, as its turn comes.

        Args:
            first: number of the first one; below 0 for those of the warm-up.
        """
        known = dict[int, list[int]]()
        for number, request in enumerate(requests, first):
            # The first one posts receives for others. Of the rest, those of one length are alike.
            if number == first:
                self._places = places(self._actions, request, self._counts)
            else:
                if len(request) not in known:
                    known[len(request)] = places(self._actions, request, self._counts)
                self._places = known[len(request)]
            self.begin(COURSE, number)
            yield number, request

    def at(self, index: int) -> None:
        super().at(self._places[index])
