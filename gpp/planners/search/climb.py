"""A walk over plans whose devices may hold several stages: from a plan to one that differs in one thing, up and down.

A move takes operators from a stage to another one or to a new one, joins two stages, gives a stage other devices, or exchanges two
stages' devices. It is made if the step gets shorter, or longer by no more than a threshold that falls to nothing while the walk
goes on (threshold accepting: Dueck and Scheuer, 1990). The draws come from a seed, so a walk is the same everywhere. As
`gpp.planners.search.step` this file is compiled, and does the same as plain Python.
"""

from __future__ import annotations

from array import array
from typing import Final

from gpp.planners.search.memory import MissingMemory
from gpp.planners.search.numbers import KEPT, MANY

INF: Final = float("inf")
STRICT: Final = 10.0
"""How many times its seconds a plan counts at the end of a walk for each time that its devices' memory is missing; 1 at first."""

FACTOR: Final = 25214903917
STATES: Final = (1 << 48) - 1
"""Of the draws. Both stand in the .pxd file: of a number that is too large for a processor's short one, compiled code makes a
Python number wherever it stands by itself, and reckons on with it."""

ONE: Final = 1
"""One as wide as a set of devices: a processor's short one cannot be shifted so far."""


class Climber:
    """Walks over the plans of one problem and micro-batch size.

    Args:
        facts: the numbers of the problem (`gpp.planners.search.numbers.ProblemNumbers`).
        room: the arrays of the timer (`gpp.planners.search.numbers.PlanArrays`).
        timer: the `StepTimer` of the same problem.
    """

    def __init__(self, facts, room, timer) -> None:
        self.timer, self.work, self.of, self.sets = timer, facts.work, room.stage_of, room.devices
        self.n, self.num_devices, self.most, self.scarce = facts.num_ops, facts.num_devices, facts.most_stages, facts.scarce
        self.old_of, self.old_sets, self.size = array("q", room.stage_of), array("q", room.devices), 0
        self.allowed, self.missing = facts.allowed, MissingMemory(facts, room)
        self.first_next, self.next, self.first_prior, self.prior = facts.neighbours
        self.taken, self.stack = array("q", room.stage_of), array("q", room.stage_of)
        self.state, self.kept, self.over = 1, [], 0.0

    def walk(self, plan, seed: int, threshold: float, passes: int, apart: bool = False, deals: bool = False):
        """The best plans of a walk that fit, where it begins among them, those with the shortest steps first.

        Each is (seconds, stage of each operator, devices of each stage). A plan that does not fit counts as a longer step, so the
        walk may begin at one and lead through others.

        Args:
            plan: where it begins: the stage of each operator, and the devices of each stage as bits. From a plan of more stages
                than the arrays have room for there is no walk: compiled code does not look whether it writes behind their ends.
            threshold: share of a step by which it may become longer at first.
            passes: that are timed until the walk ends.
            apart: whether every device keeps to one stage; the walk then begins at such a plan.
            deals: whether two stages get any devices at once in half of the moves, in place of all other changes of devices: ways
                to share may lie behind worse ones. Not with `apart`.
        """
        self.apart, self.deals = apart, deals
        idle = 0
        stage_of, devices = plan
        if len(devices) > self.most:
            return []
        self.size = len(devices)
        for i in range(self.n):
            self.of[i] = stage_of[i]
        for i in range(self.size):
            self.sets[i] = devices[i]
        self.state, self.kept = (seed * 2654435761 + 12345) & STATES, []
        first = self.work[0]
        now = self._step_s(INF, 0.0)
        if now == INF:
            return []
        over = self.over
        best = INF
        self.hot = self.timer.shape.busiest()
        if over == 0.0:
            self._keep(now)
            best = now
        while self.work[0] - first < passes and idle < 4096:
            left = 1.0 - float(self.work[0] - first) / passes
            self._save()
            idle += 1
            # Two changes at once lead past plans that are worse than both.
            if not self._moved() or (self._draw(4) == 0 and not self._moved()):
                self._back()
                continue
            # A plan that is as good goes on, so that the walk gets over plateaus.
            strict = 1.0 + STRICT * (1.0 - left)
            limit = now * (1.0 + strict * over) * (1.0 + threshold * left * left * self._share()) * (1.0 + 1e-12)
            took = self._step_s(limit, strict)
            if took * (1.0 + strict * self.over) >= limit:
                self._back()
                continue
            idle = 0
            now = took
            over = self.over
            self.hot = self.timer.shape.busiest()
            if over == 0.0 and took < best * (1.0 - 1e-9):
                self._keep(took)
                if len(self.kept) == KEPT:
                    best = self.kept[KEPT - 1][0]
        return self.kept

    def _step_s(self, below_s: float, strict: float) -> float:
        """Seconds of a step; infinity if there is none or it counts as `below_s` or more. `over` gets the memory that is missing.

        Where memory is scarce it is asked first: most plans that lack some count as too long before any pass is timed.
        """
        self.over = 0.0
        if not self.scarce:
            return self.timer.step_s(self.size, below_s)
        if not self.timer.prepare(self.size, below_s, False):
            return INF
        self.over = self.missing.excess(self.size)
        if self.over > 0.0:
            below_s = below_s / (1.0 + strict * self.over) * (1.0 + 1e-12)
            if self.timer.shape.load[self.timer.shape.busiest()] >= below_s:
                self.work[0] += self.timer.passes()  # as if they had been timed: a walk ends by them
                return INF
        return self.timer.timed_s(below_s)

    def _keep(self, took: float) -> None:
        found = (took, tuple([self.of[i] for i in range(self.n)]), tuple([self.sets[i] for i in range(self.size)]))
        for other in self.kept:
            if abs(other[0] - took) <= 1e-9 * took:
                return  # the same plan by other names, nearly always
        self.kept.append(found)
        self.kept.sort()
        del self.kept[KEPT:]

    def _save(self) -> None:
        for i in range(self.n):
            self.old_of[i] = self.of[i]
        for i in range(self.size):
            self.old_sets[i] = self.sets[i]
        self.old_size = self.size

    def _back(self) -> None:
        for i in range(self.n):
            self.of[i] = self.old_of[i]
        self.size = self.old_size
        for i in range(self.size):
            self.sets[i] = self.old_sets[i]

    def _draw(self, count: int) -> int:
        """A number below `count`."""
        self.state = (self.state * FACTOR + 11) & STATES
        return (self.state // 131072) % count

    def _share(self) -> float:
        """A number from 0 to 1."""
        return self._draw(1048576) / 1048576.0

    def _an_operator(self) -> int:
        """Any operator; of a plan of many stages, as often one of those on the device that has most to do."""
        op = self._draw(self.n)
        if self.size > MANY and self._draw(2):
            for _ in range(self.n):
                if self.sets[self.of[op]] >> self.hot & 1:
                    return op
                op = (op + 1) % self.n
        return op

    def _moved(self) -> bool:
        """Change one thing; False if that led nowhere."""
        if self.deals:
            return self._shift() if self._draw(2) else self._dealt()
        what = self._draw(100)
        if what < 50:
            return self._shift()
        if what < 62:
            return self._join()
        if what < 88:
            return self._resized() if self.apart else self._other_devices()
        return self._exchange()

    def _shift(self) -> bool:
        """Some operators of a stage to another, or to a new one."""
        op = self._an_operator()
        s = self.of[op]
        t = -1
        how = self._draw(3)
        count = 1
        self.stack[0] = op
        if how == 1:
            count = self._reached(op, s, self.first_next, self.next)
        elif how == 2:
            count = self._reached(op, s, self.first_prior, self.prior)
        where = self._draw(10)
        if where < 6:
            t = self._beside(op, s)
        elif where < 7 and self.size > 1:
            t = self._draw(self.size)
        if t < 0:
            if self.size == self.most:
                return False
            t = self.size
            self.sets[t] = self._own_devices(s) if self.apart else self._some_devices(s)
            if self.sets[t] == 0:
                return False
            self.size += 1
        if t == s:
            return False
        for i in range(count):
            self.of[self.stack[i]] = t
        return self._tidy(s)

    def _reached(self, op: int, s: int, first: array[int], other: array[int]) -> int:
        """Put an operator and all that it reaches within its stage on the stack; returns how many these are."""
        count = 1
        for i in range(self.n):
            self.taken[i] = 0
        self.taken[op] = 1
        i = 0
        while i < count:
            for k in range(first[self.stack[i]], first[self.stack[i] + 1]):
                to = other[k]
                if self.of[to] == s and not self.taken[to]:
                    self.taken[to] = 1
                    self.stack[count] = to
                    count += 1
            i += 1
        return count

    def _beside(self, op: int, s: int) -> int:
        """The stage of one of the operator's neighbours; -1 if that is its own."""
        before = self.first_prior[op + 1] - self.first_prior[op]
        after = self.first_next[op + 1] - self.first_next[op]
        if before + after == 0:
            return -1
        at = self._draw(before + after)
        at = self.of[self.prior[self.first_prior[op] + at] if at < before else self.next[self.first_next[op] + at - before]]
        return at if at != s else -1

    def _some_devices(self, s: int) -> int:
        """Devices for a new stage beside stage s."""
        how = self._draw(4)
        if how == 0:
            return self.sets[s]
        if how == 1:
            return self.sets[self._draw(self.size)]
        if how == 2:
            d = self._idle()
            if d:
                return d
        d = self._draw(self.num_devices)
        return ONE << d

    def _idle(self) -> int:
        """The first device without a stage; 0 if there is none."""
        used = 0
        for i in range(self.size):
            used |= self.sets[i]
        for d in range(self.num_devices):
            if not used >> d & 1:
                return ONE << d
        return 0

    def _join(self) -> bool:
        """Two stages as one, on the devices of one of them."""
        if self.size < 2:
            return False
        s = self._draw(self.size)
        t = self._beside(self._draw(self.n), s) if self._draw(2) else self._draw(self.size)
        if t < 0 or s == t:
            return False
        for i in range(self.n):
            if self.of[i] == s:
                self.of[i] = t
        if self.apart and self._may(self.sets[s] | self.sets[t]):
            self.sets[t] |= self.sets[s]
        return self._tidy(s)

    def _other_devices(self) -> bool:
        """A stage on other devices."""
        s = self.of[self._an_operator()]
        how = self._draw(5)
        own = self.sets[s]
        if how == 0:
            self.sets[s] = self.sets[self._draw(self.size)]
        elif how == 1:
            d = self._draw(self.num_devices)
            self.sets[s] = ONE << d
        else:
            one = ONE << self._draw(self.num_devices)
            if how != 3:
                own |= one
            if how != 2:
                d = self._draw(self.num_devices)
                own &= ~(ONE << d)
            self.sets[s] = own
        own = self.sets[s]
        return own != self.old_sets[s] and self._may(own)

    def _may(self, own: int) -> bool:
        """Whether a stage may have as many devices."""
        count = 0
        while own:
            own &= own - 1
            count += 1
        return self.allowed[count]

    def _own_devices(self, s: int) -> int:
        """A device for a new stage beside stage s that no other stage keeps; 0 if there is none."""
        if self._draw(2):
            d = self._idle()
            if d:
                return d
        d = ONE << self._draw(self.num_devices)
        for i in range(self.size):
            own = self.sets[i]
            if own & d:
                own &= ~d
                if own == 0 or not self._may(own):
                    return 0
                self.sets[i] = own
        return d

    def _resized(self) -> bool:
        """A stage with more devices, idle ones or others', or with fewer."""
        s = self.of[self._an_operator()]
        own = self.sets[s]
        less = self._draw(3) == 0
        for _ in range(self.num_devices):
            if less:
                own &= own - 1
                if own == 0:
                    return False
            else:
                d = self._own_devices(s)
                if d == 0 or d & own:
                    return False
                own |= d
                self.sets[s] = own
            if self._may(own):
                self.sets[s] = own
                return True
        return False

    def _exchange(self) -> bool:
        """Two stages with each other's devices, or two devices with each other's stages."""
        if self.apart and self._draw(2):
            a = self._draw(self.num_devices)
            b = self._draw(self.num_devices)
            changed = False
            for i in range(self.size):
                own = self.sets[i]
                if (own >> a & 1) != (own >> b & 1):
                    self.sets[i] = own ^ (ONE << a) ^ (ONE << b)
                    changed = True
            return changed
        s = self._draw(self.size)
        t = self._draw(self.size)
        if self.sets[s] == self.sets[t]:
            return False
        self.sets[s], self.sets[t] = self.sets[t], self.sets[s]
        return True

    def _dealt(self) -> bool:
        """Two stages on any devices, as many as a stage may have."""
        for _ in range(2):
            s = self._draw(self.size)
            count = 1 + self._draw(self.num_devices)
            while not self.allowed[count]:
                count = 1 + self._draw(self.num_devices)
            own = 0
            while count:
                d = self._draw(self.num_devices)
                if not own >> d & 1:
                    own |= ONE << d
                    count -= 1
            self.sets[s] = own
        return True

    def _tidy(self, s: int) -> bool:
        """Leave stage s out if it has no operators: the last one takes its number."""
        last = self.size - 1
        for i in range(self.n):
            if self.of[i] == s:
                return True
        for i in range(self.n):
            if self.of[i] == last:
                self.of[i] = s
        self.sets[s] = self.sets[last]
        self.size = last
        return True
