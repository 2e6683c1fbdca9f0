"""No process holds the whole: workers that make the weights of their stages alone, and the most memory that each of them takes.

    python -m tests.checks.shares                      a model of 7 billion parameters in bfloat16, by 4 workers
    python -m tests.checks.shares gpt --dtype float32

The model is captured and its constructor recorded without numbers; then workers, one after the other, fill a quarter of its
operators each. None may take more than its share and `MOST_BYTES`; nor may the process that starts them.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpp.app.capturing import to_make
from gpp.capture.examples import capture_model
from gpp.capture.stage import StageModule, build_stage
from gpp.graph.captured import Captured
from gpp.runtime.checkpoint.origin import ToMake, fill, origin_of
from gpp.runtime.checkpoint.state import job_weights
from gpp.serialization import read_json, write_value
from tests.support.conf import model_named

MOST_BYTES = 1.5e9
SEVEN_BILLION = ("gpt", "model.num_layers=32", "model.hidden=4096", "model.num_heads=32")


def main() -> int:
    """Run the check; 1 where a process took more than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", default=SEVEN_BILLION, help="words of the command line that name the model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int, default=4)
    asked = parser.parse_args()
    model = model_named(*asked.model)
    began = time.perf_counter()
    captured = capture_model(model, dtype=asked.dtype)
    captured_s = time.perf_counter() - began
    making = to_make(model, captured, None, seed=0, dtype=asked.dtype)
    total = sum(param.num_bytes for param in captured.graph.params)
    took_s = time.perf_counter() - began - captured_s
    print(f"{model.name}: weights of {total / 1e9:.2f} GB; captured in {captured_s:.1f} s, recorded in {took_s:.1f} s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, captured, making)
        said = [_measured(folder, rank, asked.workers) for rank in range(asked.workers)]
    own = peak_bytes()
    print(f"the process that starts them: {own / 1e9:.2f} GB")
    over = own > MOST_BYTES
    for rank, (share, peak, seconds) in enumerate(said):
        over |= peak > share + MOST_BYTES
        above = (peak - share) / 1e9
        print(f"worker {rank}: share {share / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB, {above:.2f} above, {seconds:.0f} s")
    return int(over)


def save(folder: Path, captured: Captured, making: ToMake) -> None:
    """Write what a worker needs for its stage."""
    making.save(folder / "job")
    write_value(folder / "job" / "model.json", captured)


def parts(captured: Captured, count: int) -> list[list[str]]:
    """The nodes of so many stages with about as many bytes of parameters each, along the operators' order."""
    size = {param.name: param.num_bytes for param in captured.graph.params}
    total, before = sum(size.values()), 0
    out: list[list[str]] = [[] for _ in range(count)]
    for op in captured.graph.ops:
        out[min(count - 1, before * count // max(total, 1))] += op.nodes
        before += sum(size.get(name, 0) for name in op.params)
    return out


def filled(folder: Path, rank: int, count: int) -> StageModule:
    """The stage of a worker with its weights."""
    captured, origin = read_json(Captured, folder / "job" / "model.json"), origin_of(folder)
    assert origin is not None
    stage = build_stage(captured, parts(captured, count)[rank], device="cpu")
    with job_weights(folder) as given:
        fill({0: stage}, {}, origin, given, {})
    return stage


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(folder: Path, rank: int, count: int) -> None:
    """Print the bytes of a worker's share, its peak, and the seconds that its weights took."""
    began = time.perf_counter()
    share = sum(tensor.nbytes for tensor in filled(folder, rank, count).wants().values())
    print(share, peak_bytes(), time.perf_counter() - began)


def _measured(folder: Path, rank: int, count: int) -> tuple[int, int, float]:
    code = f"from pathlib import Path; from tests.checks.shares import worker; worker(Path({str(folder)!r}), {rank}, {count})"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return int(out[0]), int(out[1]), float(out[2])


if __name__ == "__main__":
    raise SystemExit(main())
