"""Process of `engine=reference`, which writes the files of all workers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from baselines.reference.pipeline import Pipeline
from gpp.files import write_text
from gpp.runtime.checkpoint.checkpoint import Checkpointer
from gpp.runtime.checkpoint.final import save_final
from gpp.runtime.checkpoint.state import job_weights
from gpp.runtime.engine import VERSIONS
from gpp.runtime.job import Job
from gpp.runtime.worker.process import guarded, open_lines, write_line


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    settings, ranks = job.settings, run_dir / "ranks"
    out = open_lines(run_dir, rank)
    with job_weights(run_dir) as weights:
        pipeline = Pipeline(job, dict(weights), warn=lambda words: write_line(out, {"warning": words}))
    named = pipeline.named()
    checkpoints = Checkpointer(
        job, run_dir, rank=rank, world=world, weights=named, optimizers=pipeline.optimizers, owned=frozenset(named)
    )
    checkpoints.restore()
    with out:
        for first, count in pipeline.stretches():
            start = time.perf_counter()
            for step, results in enumerate(pipeline.train(first, count), first):
                end = time.perf_counter()
                write_line(out, {"step": step, "start": start, "end": end, **results})
                start = end
            done = first + count
            due = done == settings.steps or (settings.evaluate_every and done % settings.evaluate_every == 0)
            if job.evaluation and due:
                write_line(out, {"evaluated": done, **pipeline.evaluate()})
            if checkpoints.due(done):
                checkpoints.save(done)
        checkpoints.wait()
        pipeline.check_weights()
    tables = {s: stage.table for s, stage in enumerate(pipeline.stages) if stage.table}
    counted = {
        "weight_versions": {s: table.policy.copies(table.position) for s, table in tables.items()},
        "staleness": {s: table.staleness for s, table in tables.items()},
    }
    write_text(ranks / VERSIONS, json.dumps(counted), exact=True)
    if settings.final_weights:
        for stage, state in pipeline.final_state().items():
            save_final(run_dir, stage, state)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, _run)
