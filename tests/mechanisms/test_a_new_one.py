"""A whole mechanism in test code alone, `checksum` beside this: planned, proved, simulated, run, reported, and refused if wrong."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gpp.errors import InvalidConfig, InvalidFile, InvalidPlan
from gpp.graph.op_graph import OpGraph
from gpp.mechanism import use
from gpp.plan.plan import Plan
from gpp.serialization import from_json, read_json
from tests.support.call import call
from tests.support.cli import Finished, run
from tests.support.inprocess import few_layers

ASKED = "strategy.mechanisms=[{_target_: tests.mechanisms.checksum.settings.Checked}]"
DIGITS = [
    "model=digits",
    *few_layers("digits"),
    "cluster=local",
    "dtype=float64",
    "cost=analytical",
    "evaluate_every=0",
    "baselines_s=0",
]
LR = 0.5


def words(*more: str) -> list[str]:
    return [
        *DIGITS,
        "cluster.num_devices=3",
        "strategy=sequential",
        "optimizer=sgd",
        "optimizer.momentum=0.0",
        f"optimizer.lr={LR}",
        *more,
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("checksum") / "run", *words(ASKED, "engine=distributed", "steps=1"))


def told(folder: Path) -> list[float]:
    return [
        json.loads(line)["gradient_sum"] for line in (folder / "metrics.jsonl").read_text().splitlines() if "gradient_sum" in line
    ]


@pytest.mark.dist
def test_workers_sum_what_an_update_of_plain_sgd_takes_off_the_weights(trained: Finished) -> None:
    assert trained.code == 0, trained.out
    before = load_file(trained.run_dir / "job" / "weights.safetensors")
    files = sorted((trained.run_dir / "checkpoints" / "final").glob("stage_*.safetensors"))
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    moved = sum((before[name].double() - after[name].double()).sum().item() for name in after if name in before)
    (found,) = told(trained.run_dir)
    assert abs(moved) > 1e-3
    assert found == pytest.approx(moved / LR, rel=1e-9)


@pytest.mark.dist
def test_the_plan_the_program_and_the_report_say_it(trained: Finished) -> None:
    plan = json.loads((trained.run_dir / "job" / "plan.json").read_text())
    assert all(stage["mechanisms"] == {"checksum": {"to": 0}} for stage in plan["stages"])
    assert '"own_s"' in (trained.run_dir / "job" / "costs.json").read_text()
    program = (trained.run_dir / "job" / "program.txt").read_text()
    assert "s0.RK0<s1.d1[0:1]@d0" in program
    assert "s0.K0@d0 s0.U0@d0" in program
    page = (trained.run_dir / "report.html").read_text()
    assert "checksum to s0" in page
    assert "add up gradients" in page


@pytest.mark.dist
def test_a_plan_with_it_is_run_from_its_file(trained: Finished, tmp_path: Path) -> None:
    again = run(tmp_path / "run", *words(ASKED, f"plan={trained.run_dir / 'job' / 'plan.json'}", "engine=simulate", "steps=1"))
    assert again.code == 0, again.out
    stages = [json.loads((folder / "job" / "plan.json").read_text())["stages"] for folder in (trained.run_dir, again.run_dir)]
    assert stages[0] == stages[1]
    assert (again.run_dir / "job" / "program.txt").read_text() == (trained.run_dir / "job" / "program.txt").read_text()


def test_its_bill_is_in_the_prediction(trained: Finished, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", *words("engine=simulate"))
    assert plain.code == 0
    assert trained.result["predicted"]["iteration_s"] > plain.result["predicted"]["iteration_s"]
    assert '"own_s"' not in (plain.run_dir / "job" / "costs.json").read_text()


@pytest.mark.dist
def test_a_pipeline_that_does_not_drain_has_it_for_every_update(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *words(ASKED, "strategy=pipedream", "cluster.num_devices=2", "steps=4", "microbatch_size=16"))
    assert found.code == 0, found.out
    assert len(told(found.run_dir)) == 4
    assert all(told(found.run_dir))


@pytest.mark.long
@pytest.mark.dist
def test_emulated_devices_run_it(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *words(ASKED, "engine=emulate", "engine.budget_s=0.5", "steps=3"))
    assert found.code == 0, found.out
    assert found.result["emulation"]["virtual_iteration_s"] == pytest.approx(found.result["predicted"]["iteration_s"], rel=1e-6)


def refuse_values(path: str) -> None:
    """In a process of its own, in which the package is used."""
    use(["tests.mechanisms.checksum"])
    text = Path(path).read_text()
    for old, new, rule in (
        ('"to": 0', '"to": 9', "must be one of 3 stages"),
        ('"to": 0', '"two": 0', "'checksum', of which to is missing"),
        ("checksum", "other", "'other'"),
    ):
        with pytest.raises((InvalidFile, InvalidPlan), match=rule):
            from_json(Plan, text.replace(old, new)).check_stages(read_json(OpGraph, Path(path).with_name("graph.json")), 3)


def test_a_value_that_does_not_fit_is_refused(trained: Finished) -> None:
    call(__name__, "refuse_values", str(trained.run_dir / "job" / "plan.json"))


def test_a_package_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"strategy\.mechanisms.*must be a package"):
        use(["no.such.package"])


def test_a_package_with_the_last_name_of_another_is_refused() -> None:
    """Plans know a mechanism by that name, so one of the two would be read as the other."""
    with pytest.raises(InvalidConfig, match=r"=tests\.mechanisms\.helpers.*last name of gpp\.mechanisms\.helpers"):
        use(["tests.mechanisms.helpers"])
