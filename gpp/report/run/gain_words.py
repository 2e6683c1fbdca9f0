"""What a run gained, and why a plan is one stage, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpp.analysis.gains import Gain, Gains
from gpp.report.draw import text

if TYPE_CHECKING:
    from gpp.analysis.one_stage import OneStage

FELT = 0.1
"""A share of one device's time, taken by other programs or by small micro-batches, from which on it is worth saying."""

TIGHT = 0.9
"""A share of a device's memory from which on it is said that the memory is nearly full."""


def gain_lines(gains: Gains) -> list[str]:
    """What was gained in one sentence, then why not, and how it was measured; empty without anything to compare with."""
    if not gains.gains:
        return []
    how = " (measured)" if gains.measured else "" if all(gain.same for gain in gains.gains) else " (predicted)"
    what = "Gained" if any(gain.surely_faster and not gain.same for gain in gains.gains) else "Nothing gained"
    if all(gain.rival_s is None for gain in gains.gains):
        what = "Nothing to compare with"
    lines = [f"{what}{how}: {'; '.join(_gain(gain, gains.one) for gain in gains.gains)}."]
    beaten_by = [gain.over for gain in gains.gains if not gain.same and gain.rival_s is not None and not gain.surely_faster]
    if beaten_by and (why := _why_not(gains)):
        lines.append(why)
    if gains.measured:
        turns = f"{gains.rounds} turns each of {gains.steps} steps or more"
        lines.append(f"For the gain all plans took turns on the same workers, {turns}, apart from the run above.")
    return lines


def _gain(gain: Gain, one: str) -> str:
    """One rival, as in `26.0 % faster than one device (64.0 ms a step against 80.6 ms)`."""
    if gain.same:
        return f"{gain.over} has the same plan"
    if gain.speedup is None:
        return f"{gain.over} has no plan ({(gain.reason or 'no reason given').rstrip('.')})"
    both = f"{text.seconds(gain.own_s)} a {one} against {text.seconds(gain.rival_s)}"
    if gain.surely_faster:
        return f"{_apart(gain.speedup, 'faster', 'as fast')} {gain.over} ({both})"
    if gain.surely_slower:
        return f"{_apart(1 / gain.speedup, 'slower', 'as slow')} {gain.over} ({both})"
    spread = "" if gain.low == gain.high else f", {text.ratio(gain.low)} to {text.ratio(gain.high)} by turns"
    return f"as fast as {gain.over} ({both}{spread})"


def _apart(factor: float, more: str, times: str) -> str:
    """`26 % faster than`, or from a factor of two on `2.31 times as fast as`."""
    if factor >= 2.0:
        return f"{text.significant(factor)} times {times} as"
    share = 100 * (factor - 1)
    return f"{text.significant(share, 2 if share >= 10 else 1)} % {more} than"


def _why_not(gains: Gains) -> str:
    """Why nothing was gained over a rival; empty where nothing says why."""
    if gains.taken is not None and gains.taken > FELT:
        share = f"{round(100 * gains.taken)} %"
        return f"Other programs had this machine for {share} of one device's time meanwhile: compare again when it is quiet."
    if gains.cores and gains.workers > gains.cores:
        return f"{gains.workers} workers share {gains.cores} cores, so they cannot all compute at once."
    if gains.work is not None and gains.pieces is not None and gains.work > 1 + FELT and gains.pieces[0] < gains.pieces[1]:
        small, large = gains.pieces
        longer = f"{round(100 * (gains.work - 1))} %"
        return (
            f"The plan cuts a mini-batch into micro-batches of {small} samples, which compute for {longer} longer in all than one "
            f"device with {large} at once, by the prediction: larger micro-batches or a larger model gain more."
        )
    missed = [gain for gain in gains.gains if not gain.surely_faster and not gain.same and (gain.foreseen or 0.0) > 1 + FELT]
    if gains.measured and missed:
        expected = " and ".join(f"{text.ratio(gain.foreseen)} as fast as {gain.over}" for gain in missed)
        return (
            f"The prediction was {expected}. Either the machine is busier now than when operators were timed, or the prediction "
            "is wrong: compare again while nothing else runs."
        )
    waits = f"{round(100 * gains.waits)} %"
    if waits == "0 %":
        return ""
    return f"By the prediction devices wait for {waits} of a step, more than sharing the work saves: larger models gain more."


def gain_dicts(gains: Gains) -> list[dict[str, Any]]:
    """`gains` of result.json."""
    return [
        {
            "over": gain.over,
            "measured": gains.measured and not gain.same and gain.rival_s is not None,
            "iteration_s": gain.own_s,
            "rival_iteration_s": gain.rival_s,
            "speedup": gain.speedup,
            "least": gain.low,
            "largest": gain.high,
            "same_plan": gain.same,
            "reason": gain.reason,
        }
        for gain in gains.gains
    ]


def one_stage_lines(found: OneStage, command: str) -> tuple[str, str]:
    """Why a plan is one stage, and the command that shows a pipeline.

    Args:
        command: the command line at hand.
    """
    stage, count = found.plan.stages[0], len(found.pipeline.stages)
    own_idle_s, idle_s = (metrics.bubble_fraction * metrics.iteration_s for metrics in (found.own, found.other))
    own_busy_s, busy_s = found.own.iteration_s - own_idle_s, found.other.iteration_s - idle_s
    copies = len(stage.devices)
    what = f"One stage, copied to {copies} devices (data parallel)," if copies > 1 else "One stage on one device"
    times = f"{what} takes {text.seconds(found.own.iteration_s)} a step; the best pipeline found, of {count} stages, "
    times += f"{text.seconds(found.other.iteration_s)}"
    if idle_s - own_idle_s >= busy_s - own_busy_s:
        why = f"its devices compute nothing for {text.seconds(idle_s)} of that (the single stage: {text.seconds(own_idle_s)})"
    else:
        why = f"its devices compute for {text.seconds(busy_s)} of that (the single stage: {text.seconds(own_busy_s)})"
        size, whole = min(one.microbatch_size for one in found.pipeline.stages), stage.microbatch_size
        why += f", as micro-batches of {size} samples cost more each than those of {whole}" if size < whole else ""
    memory = (
        "memory is no limit"
        if found.memory < TIGHT
        else f"the single stage fills {text.percent(found.memory)} of a device's memory"
    )
    return f"{times}, because {why}; {memory}.", f"To see a pipeline: {pipeline_command(command, found.word)}"


def pipeline_command(command: str, word: str) -> str:
    """The command line with a word that asks for another plan.

    Example:
        >>> pipeline_command("python run.py strategy=data_parallel mode=plan", "strategy=even")
        'python run.py mode=plan strategy=even'
    """
    replaces = word.startswith("strategy=")
    kept = [
        one for one in command.split() if not (replaces and one.lstrip("+").startswith(("strategy=", "strategy.", "strategy/")))
    ]
    return " ".join([*kept, word])
