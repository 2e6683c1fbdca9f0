"""What every stretch of a chain of operators costs if it is one run, from all amounts of the stage at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpp.cost.tensors import StageTensors


class Segments(NamedTuple):
    """Amounts of a chain, bytes per sample. [a, b] is the run of the operators from a to b, both included.

    Args:
        exact: whether each operator hands tensors to the next one and to no other of the stage; else the tensors to later ones
            are taken to go to the next one.
        saved: [n] what each operator holds if it is kept.
        handed: [n] the part of it that is handed to other operators, which a boundary holds.
        links: [n] what it holds in addition if the next operator is computed again.
        moments: [n] what the backward of each operator takes beyond what is held.
        asking: [n] what is there beyond that when a run is computed again at the beginning of it.
        sent_kept, sent_gone: [n] of what leaves the stage, what is not held where the operator is kept, and where it is not.
        sent_links: [n] the part of `sent_kept` that `links` holds.
        needed: [n, n] whether anything of a run is computed again.
        again: [n, n] whose forward passes that takes: the number of the last operator, and one.
        peaks: [n, n] the most during a run's own backward beyond what is held below it.
        tails: [2, n, n] what it adds to the backward of the operator behind it, and what it takes when it is computed again there;
            minus infinity where it is not.
        ends: [2, n, n] of a run whose last operator is a boundary, in place of `peaks`: the most before that one's backward, and in
            it, beyond what is held below either.
    """

    exact: bool
    saved: np.ndarray
    handed: np.ndarray
    links: np.ndarray
    moments: np.ndarray
    asking: np.ndarray
    sent_kept: np.ndarray
    sent_gone: np.ndarray
    sent_links: np.ndarray
    needed: np.ndarray
    again: np.ndarray
    peaks: np.ndarray
    tails: np.ndarray
    ends: np.ndarray


def segments_of(stage: StageTensors, samples: int) -> Segments:
    """The stretches of a stage's operators in their order, with so many samples of a micro-batch on a device."""
    n = len(stage.ops)
    links, sent_kept, sent_gone, sent_links = np.zeros((4, n))
    saved_link, linked = np.zeros((2, n), dtype=bool)
    exact = True
    for made, readers, size, saved, leaves in stage.tensors:
        exact &= all(reader == made + 1 for reader in readers)
        linked[made] |= bool(readers)
        saved_link[made] |= saved and bool(readers)
        if leaves:
            sent_gone[made] += size
            sent_kept[made] += 0.0 if saved else size
        if readers and not saved:
            links[made] += size
            sent_links[made] += size if leaves else 0.0
    exact &= bool(linked[: n - 1].all())
    moments = stage.transient - stage.leaving + stage.pending + stage.fixed / samples
    asking = stage.pending + stage.arrived
    last = np.maximum.accumulate(np.where(stage.saved > 0, np.arange(n), -1))
    # Of the operators behind the last needed one of a run: the most that the backward of one takes.
    idle = np.full(n, -np.inf)
    for b in range(n):
        if last[b] < b:
            idle[b] = max(moments[b], idle[b - 1] if b and last[b - 1] == last[b] else -np.inf)
    needed, again = np.zeros((n, n), dtype=bool), np.zeros((n, n), dtype=int)
    peaks, tails = np.full((n, n), -np.inf), np.full((2, n, n), -np.inf)
    tails[0], ends = 0.0, np.full((2, n, n), -np.inf)
    for a in range(n):
        storages = np.cumsum(stage.saved[a:])
        between = np.concatenate([[0.0], links[a : n - 1]])
        most = np.maximum.accumulate(storages + stage.transient[a:] + between)
        alive = np.maximum.accumulate(moments[a:] + storages)
        ends[0, a, a + 1 :] = alive[:-1]
        ends[1, a, a:] = np.maximum(moments[a:] + storages - stage.handed[a:], asking[a:] + most)
        end = last[a:]
        needed[a, a:] = end >= a
        at = np.maximum(end - a, 0)
        # A run is there when a backward asks for it: that of its last operator, or the next one's, if somebody keeps the link.
        trigger = np.minimum(end + saved_link[end], n - 1)
        inside = trigger <= np.arange(a, n)
        asked = np.where(inside, np.maximum(moments[trigger] + storages[at], asking[trigger] + most[at]), -np.inf)
        asked = np.maximum(asked, asking[end] + most[at])
        own = np.maximum(np.maximum(alive[at], asked), idle[a:])
        peaks[a, a:] = np.where(needed[a, a:], own, np.maximum.accumulate(moments[a:]))
        outside = needed[a, a:] & ~inside
        tails[0, a, a:] = np.where(outside, storages[at], 0.0)
        tails[1, a, a:] = np.where(outside, most[at], -np.inf)
        again[a, a:] = np.where(needed[a, a:], end + 1, a)
    own = stage.saved, stage.handed, links, moments, asking, sent_kept, sent_gone, sent_links
    return Segments(exact, *own, needed, again, peaks, tails, ends)
