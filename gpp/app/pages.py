"""The pages of a run by its mode: a run's own page, or the one that compares strategies.

A mode imports the modules of its own page alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpp.report.run.console import SafeConsole
    from gpp.report.run.record import RunRecord


def page_of(run: RunRecord) -> str:
    """report.html of a run."""
    if run.explored:
        from gpp.report.explore.page import explore_report

        return explore_report(run, run.explored)
    if run.attempts:
        from gpp.report.compare.page import compare_report

        return compare_report(run)
    from gpp.report.run.page import run_report

    return run_report(run)


def show_compared(console: SafeConsole, run: RunRecord) -> None:
    """Show several strategies, or the largest micro-batch of each where those were looked for."""
    if run.boundaries:
        from gpp.report.compare.boundaries import show_boundaries

        show_boundaries(console, run)
        return
    from gpp.report.compare.terminal import show_comparison

    show_comparison(console, run)
