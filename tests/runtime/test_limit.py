"""A worker under `engine.enforce_memory`, in a process of its own: one device, whose stage is a chain of linear layers.

What the limit says is compared with the plan's bill, and its words with where the fullest moment of this chain must be.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpp import Adam, Distributed, OneFOneB
from gpp.data.synthetic import Synthetic
from gpp.errors import Exhausted, InvalidConfig, OutOfMemory
from gpp.graph.captured import Captured, Node
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.stage import marked
from gpp.plan.build import make_plan
from gpp.program.program import reduce_groups
from gpp.runtime.hang_detection.status import NoStatus
from gpp.runtime.job import Job
from gpp.runtime.worker import allocator
from gpp.runtime.worker.limit import Limit
from gpp.runtime.worker.main import course
from gpp.runtime.worker.seat import Seat
from gpp.runtime.worker.worker import Worker
from tests.support import inprocess
from tests.support.call import call
from tests.support.conf import model_named
from tests.support.fake_transport import FakeNetwork, FakeTransport

WIDTH, SAMPLES, MICROBATCH = 512, 4096, 2048


def made(folder: Path) -> tuple[Job, int]:
    """A saved job of one stage, and the bytes that its plan asks for."""
    model, data = (
        model_named("digits_deep", f"model.width={WIDTH}", "model.num_layers=4"),
        Synthetic(num_samples=SAMPLES, num_test_samples=1),
    )
    captured, weights = inprocess.capture(model, "float32")
    problem = inprocess.problem_of(captured, 1, SAMPLES)
    plan = make_plan(problem, "whole", [(problem.graph.all_mask, 1)], MICROBATCH)
    optimizer = Adam(lr=1e-3)
    problem = replace(problem, optimizer_state_factor=optimizer.state_factor)
    settings = {"model": model, "data": data, "optimizer": optimizer, "steps": 2, "dtype": "float32", "enforce_memory": True}
    job = inprocess.make_job(captured, problem, plan, OneFOneB(), **settings)
    job.save(folder, weights)
    return job, round(plan.device_memory(problem, {0: MICROBATCH})[0])


def end_of(folder: Path, memory_bytes: float) -> str:
    """How the worker of the saved job ends that has so much memory: `ok`, or its error."""
    # Not forked from this process, whose heap has holes that no limit counts.
    call(__name__, "work", str(folder), str(memory_bytes))
    return (folder / "said").read_text()


def work(folder: str, memory_bytes: str) -> None:
    """The process of that worker."""
    run_dir, job = Path(folder), Job.load(Path(folder))
    devices = tuple(replace(device, memory_bytes=float(memory_bytes)) for device in job.cluster.devices)
    job = replace(job, cluster=replace(job.cluster, devices=devices))
    try:
        limit = Limit(job, 0, NoStatus())
        with limit.explained():
            network = FakeNetwork(reduce_groups(job.plan, job.graph), 1)
            seat = Seat(device_id=0, device=torch.device("cpu"), transport=FakeTransport(network, 0), status=limit)
            worker = Worker(job, run_dir, seat)
            limit.watch(worker)
            (run_dir / "ranks").mkdir(exist_ok=True)
            with open(run_dir / "ranks" / "rank_0.jsonl", "w") as out:
                course(worker, out)
        said = "ok"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    (run_dir / "said").write_text(said)


@pytest.mark.dist
def test_a_plan_that_fits_runs_and_one_that_does_not_is_stopped(tmp_path: Path) -> None:
    _, planned = made(tmp_path)
    assert end_of(tmp_path, planned * 1.02) == "ok"
    said = end_of(tmp_path, planned * 0.75)
    # Where exactly depends on what libraries have taken for themselves, so any action will do.
    found = re.search(
        r"device 0 is out of memory: in s0\.\w+@d0 \([\w ]+\) in step \d.*? it asked for ([\d,]+) bytes and held ([\d,]+) of the "
        rf"([\d,]+) that engine.enforce_memory leaves it, and the plan says that it needs ({planned:,})\. Fix: use a "
        rf"microbatch_size below {MICROBATCH}",
        said,
    )
    assert said.startswith("OutOfMemory") and found, said
    asked, held, limit = (int(text.replace(",", "")) for text in found.groups()[:3])
    # What fails is an activation's gradient, a weight's, or the state of the optimizer, beyond what there was room for.
    assert asked % (4 * WIDTH) == 0 and limit == round(planned * 0.75)
    assert 0 < held < planned
    at_once = end_of(tmp_path, 1e6)
    assert at_once.startswith("OutOfMemory: device 0 is out of memory: before its first action it held"), at_once


def test_what_cannot_be_bounded_is_refused(tmp_path: Path) -> None:
    job, _ = made(tmp_path)
    engine = Distributed(enforce_memory=True)
    engine.refuse(job)
    moved = replace(job.plan, stages=(marked(job.plan.stages[0], offload=(0,)),))
    for other, says in (
        (replace(job, plan=moved, settings=replace(job.settings, enforce_memory=True)), "stage 0 has operators on the host"),
        (replace(job, settings=replace(job.settings, device_kind="cuda")), "a card's allocator has"),
        (replace(job, settings=replace(job.settings, compile="inductor")), "cannot tell a stage's memory"),
    ):
        with pytest.raises(InvalidConfig, match=rf"{says}.*Fix: "):
            engine.refuse(other)


def test_an_end_of_memory_that_was_explained_stays_as_it_is() -> None:
    ours = OutOfMemory("device 0 is out of memory")
    assert Exhausted.of(ours) is ours
    wrapped = RuntimeError("a worker failed")
    wrapped.__cause__ = ours
    assert Exhausted.of(wrapped) is ours


def test_a_line_of_generated_code_is_found_among_the_nodes_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        Node(name=name, kind="call", target=target, module=module, free=free)
        for name, target, module, free in (
            ("mask", "aten.zeros.default", "net", True),
            ("up", "aten.linear.default", "net.up", False),
            ("elsewhere", "aten.relu.default", "net.other", False),
            ("act", "aten.relu.default", "net.act", False),
            ("down", "aten.linear.default", "net.down", False),
        )
    ]
    captured = Captured(name="net", inputs=(), graph=OpGraph(name="net", ops=(), tensors=()), nodes=tuple(nodes), results={})
    code = [
        "def forward(self, batch, x, w):\n",
        "    is_grad_enabled = torch.is_grad_enabled()\n",
        "    linear = torch._C._nn.linear(x, w, None)\n",
        "    relu = torch.relu(linear);  linear = None\n",
        "    mul = batch * 2\n",
        "    linear_1 = torch.ops.aten.linear.default(relu, w, None)\n",
    ]
    monkeypatch.setattr(allocator.linecache, "getlines", lambda file: code)

    def at(line: int) -> str | None:
        found = allocator.operator_at(captured, ["up", "act", "down"], ("<eval_with_key>.0", line))
        return found.name if found else None

    assert [at(line) for line in range(1, 7)] == [None, None, "up", "act", None, "down"]
    assert allocator.place_of(["torch/x.py(3): f", "<eval_with_key>.7(12): forward", "a.py(1): g"]) == ("<eval_with_key>.7", 12)
    assert allocator.place_of(["torch/x.py(3): f"]) is None
