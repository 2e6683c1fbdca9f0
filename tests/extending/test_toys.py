"""A planner, a schedule, a weight policy, a cost model and a model of a user's own: one file and one YAML each, nothing in gpp/.

Each lies beside this, its YAML in `conf`, and is chosen from there on the command line, as docs/extending.md has it: it is listed,
plans, is proved, simulated, run on real workers, and named in the report, and a wrong value of it is refused with its field.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from baselines.reference.pipeline import run_reference
from gpp.app.vocabulary import CONF, ROOT, Vocabulary, help_text
from gpp.cluster import flat
from gpp.cost.models.constant import Constant
from gpp.errors import InvalidConfig, InvalidFile
from gpp.graph.random_graphs import equal_chain
from gpp.optimizers import SGD
from tests.extending.equally_late import EquallyLate
from tests.extending.listed_seconds import ListedSeconds
from tests.support.asynchronous import MINIBATCH, make_job
from tests.support.cli import Finished, run

HERE = Path(__file__).parent
TOYS = {
    "split_slowest": "strategy/planner",
    "eager_1f1b": "strategy/schedule",
    "equally_late": "strategy/weights",
    "listed_seconds": "cost",
    "two_eyes": "model",
}
"""The toys by name, and the group of each."""
TABLE = {"right.3.0": {"forward_s": 5e-6, "backward_s": 2e-5}}


def asked(folder: Path, *toys: str, devices: int = 2) -> list[str]:
    """The words that choose some of the toys, beside a small model and cost model where it is none of them."""
    words = [f"{TOYS[toy]}={toy}" for toy in toys]
    words += [] if "two_eyes" in toys else ["model=mlp", "model.width=16"]
    if "listed_seconds" in toys:
        (folder / "seconds.json").write_text(json.dumps(TABLE))
    words += [f"cost.path={folder / 'seconds.json'}"] if "listed_seconds" in toys else ["cost=analytical"]
    common = ["logger=none", "dtype=float64", "evaluate_every=0", "baselines_s=0", "optimizer=sgd"]
    return ["-cd", str(HERE / "conf"), *words, "cluster=local", f"cluster.num_devices={devices}", *common]


def test_a_planner_takes_less_than_eighty_lines() -> None:
    assert len((HERE / "split_slowest.py").read_text().splitlines()) < 80


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four of them at once, on three workers."""
    folder = tmp_path_factory.mktemp("toys")
    toys = [toy for toy in TOYS if toy != "equally_late"]
    return run(folder / "run", *asked(folder, *toys, devices=3), "microbatch_size=8", "steps=3")


def graph_and_stages(run_dir: Path) -> tuple[list[str], list[list[int]], list[list[int]]]:
    plan = json.loads((run_dir / "job" / "plan.json").read_text())
    names = [op["name"] for op in json.loads((run_dir / "job" / "graph.json").read_text())["ops"]]
    return names, [stage["ops"] for stage in plan["stages"]], plan["edges"]


def test_no_file_of_gpp_names_them() -> None:
    options = {toy: yaml.safe_load((HERE / "conf" / group / f"{toy}.yaml").read_text()) for toy, group in TOYS.items()}
    words = {str(option.get("network", option.get("_target_"))).rpartition(".")[2] for option in options.values()} | {*TOYS}
    files = [path for folder in ("gpp", "conf", "baselines") for path in (ROOT / folder).rglob("*") if path.is_file()]
    sources = [path for path in files if path.suffix in (".py", ".yaml", ".txt", ".html", ".js", ".css")]
    assert len(sources) > 400
    named = re.compile(rf"\b({'|'.join(words)})\b")
    naming = [path for path in sources if named.search(path.read_text())]
    assert len(words) == 2 * len(TOYS) and not naming, naming
    assert all((HERE / f"{toy}.py").is_file() for toy in TOYS)


@pytest.mark.parametrize("toy", TOYS)
def test_it_is_listed_among_the_choices(toy: str) -> None:
    vocabulary = Vocabulary(folders=(CONF, HERE / "conf"))
    (line,) = [line for line in help_text(vocabulary).splitlines() if line.split()[:1] == [toy]]
    assert (HERE / "conf" / TOYS[toy] / f"{toy}.yaml").read_text().startswith(f"# {line.split(maxsplit=1)[1]}\n")
    assert toy in vocabulary.choose(TOYS[toy], f"{toy[:-1]}x")


@pytest.mark.dist
def test_they_are_planned_run_and_named_in_the_report(synchronous: Finished) -> None:
    assert synchronous.code == 0, synchronous.out
    result = synchronous.result
    assert result["model"] == "two_eyes"
    assert len(result["loss"]) == 3 and all(0 < loss < 4 for loss in result["loss"])
    assert set(result["loss_terms"]) == {"label", "apart"}
    assert result["measured"]["communication_bytes"] == result["predicted"]["communication_bytes"]
    assert result["measured"]["max_in_flight_samples"] == result["predicted"]["max_in_flight_samples"]
    page = (synchronous.run_dir / "report.html").read_text()
    for toy in ("split_slowest", "eager_1f1b", "listed_seconds", "two_eyes"):
        assert toy in page


@pytest.mark.dist
def test_the_planner_puts_the_branches_side_by_side(synchronous: Finished) -> None:
    """Neither waits for the other, so three stages are a pipeline of two."""
    names, stages, edges = graph_and_stages(synchronous.run_dir)
    found = [{names[op].partition(".")[0] for op in ops} for ops in stages]
    (left, right, joined) = (found.index({"left"}), found.index({"right"}), found.index({"right", "cat", "head", "loss"}))
    assert sorted(edges) == sorted([[left, joined], [right, joined]])
    assert synchronous.result["plan"]["depth"] == 2


@pytest.mark.dist
def test_the_schedule_warms_up_as_far_as_it_says(synchronous: Finished, tmp_path: Path) -> None:
    """Every stage holds 1 + 2 (distance - 1) micro-batches; at ahead=1 the program is that of 1F1B."""
    plan = json.loads((synchronous.run_dir / "job" / "plan.json").read_text())
    distance = [1] * len(plan["stages"])
    for start, end in sorted(plan["edges"], reverse=True):
        distance[start] = max(distance[start], distance[end] + 1)
    program = (synchronous.run_dir / "job" / "program.txt").read_text()
    for s, stage in enumerate(plan["stages"]):
        kinds = re.findall(rf"\bs{s}\.([FB])\d+@", program)
        held = max(accumulate(1 if kind == "F" else -1 for kind in kinds))
        assert held * 8 == stage["in_flight"] == min(8 * (1 + 2 * (distance[s] - 1)), 64)
    words = asked(tmp_path, "eager_1f1b", devices=3)
    same = ["engine=simulate", "strategy=even", "microbatch_size=8"]
    one = run(tmp_path / "one", *words, *same, "strategy.schedule.ahead=1")
    other = run(tmp_path / "other", *[word.replace("eager_1f1b", "1f1b") for word in words], *same)
    assert one.code == other.code == 0, one.out + other.out
    first, second = ((found.run_dir / "job" / "program.txt").read_text() for found in (one, other))
    assert first == second
    assert one.result["predicted"] == other.result["predicted"]


@pytest.mark.dist
def test_the_cost_model_has_the_seconds_of_the_file(synchronous: Finished, tmp_path: Path) -> None:
    """The same plan by the other cost model: only the stage with the listed operator takes another time."""
    plan = synchronous.run_dir / "job" / "plan.json"
    words = [*asked(tmp_path, "two_eyes", devices=3), f"plan={plan}", "strategy/schedule=eager_1f1b", "engine=simulate"]
    other = run(tmp_path / "other", *words)
    assert other.code == 0, other.out
    names, stages, _ = graph_and_stages(synchronous.run_dir)
    own, others = ([(bill["forward_s"], bill["backward_s"]) for bill in bills_of(done)] for done in (synchronous, other))
    assert [names.index("right.3.0") in ops for ops in stages] == [a != b for a, b in zip(own, others, strict=True)]


def bills_of(done: Finished) -> list[dict[str, float]]:
    return json.loads((done.run_dir / "job" / "costs.json").read_text())


def test_listed_seconds_are_those_of_a_sample(tmp_path: Path) -> None:
    graph, device = equal_chain(3), flat(num_devices=1, bandwidth_bytes_per_s=1e9, memory_bytes=1e9).devices[0]
    (tmp_path / "seconds.json").write_text(json.dumps({"op1": {"forward_s": 2.0, "backward_s": 5.0}}))
    times = ListedSeconds(cost=Constant(), path=str(tmp_path / "seconds.json")).op_times(graph, 4, device)
    other = Constant().op_times(graph, 4, device)
    assert [times.forward_s[1], times.backward_s[1]] == [8.0, 20.0]
    assert [times.forward_s[0], times.backward_s[2]] == [other.forward_s[0], other.backward_s[2]]
    wrong = ({"op1": {"forward_s": -1, "backward_s": 1}}, "forward_s"), ({"op1": {"forward_s": 1}}, "backward_s")
    for table, says in (*wrong, (TABLE, "no operator of this name")):
        (tmp_path / "seconds.json").write_text(json.dumps(table))
        with pytest.raises((InvalidConfig, InvalidFile), match=rf"cost\.path=.*{says}"):
            ListedSeconds(cost=Constant(), path=str(tmp_path / "seconds.json")).op_times(graph, 4, device)


@pytest.mark.dist
def test_real_workers_train_with_the_policy_as_one_process_does(tmp_path: Path) -> None:
    """Bit for bit in float64: the losses of every step, and the weights that are left."""
    words = [*asked(tmp_path, "equally_late", devices=3), "strategy=even", "minibatch_size=8", "steps=12", "optimizer.lr=0.05"]
    found = {engine: run(tmp_path / engine, *words, f"engine={engine}") for engine in ("distributed", "reference")}
    assert all(one.code == 0 for one in found.values()), [one.out for one in found.values()]
    workers, process = found["distributed"], found["reference"]
    assert workers.result["loss"] == process.result["loss"] and len(set(workers.result["loss"])) == 12
    assert process.result["versions"]["staleness"] == {"0": 2, "1": 2, "2": 2}
    ends = [weights_of(one.run_dir) for one in (workers, process)]
    assert ends[0].keys() == ends[1].keys() and ends[0]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    page = (workers.run_dir / "report.html").read_text()
    assert "equally_late" in page


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    files = sorted((run_dir / "checkpoints" / "final").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("delay", [2, 3])
def test_the_policy_has_the_closed_form_of_its_delay(delay: int) -> None:
    """The gradient of w^2 / 2 is w, so w(t+1) = w(t) - lr w(t-delay) at every stage."""
    lr, steps = 0.2, 20
    policy = EquallyLate(delay=delay)
    size = MINIBATCH // policy.least_accumulation(4)
    _, state = run_reference(*make_job("Springs", policy, SGD(lr=lr, momentum=0.0), steps=steps, sizes=size))
    _, start = make_job("Springs", policy, SGD(lr=lr, momentum=0.0), steps=steps, sizes=size)
    for s in range(4):
        w = [start[f"s{s}.w"].item()]
        for t in range(steps):
            w.append(w[-1] - lr * w[max(0, t - delay)])
        assert state[f"s{s}.w"].item() == pytest.approx(w[-1], abs=1e-12)


@pytest.mark.parametrize(
    ("toy", "word", "field"),
    [
        ("split_slowest", "strategy.planner.slack=0.5", "strategy.planner.slack"),
        ("eager_1f1b", "strategy.schedule.ahead=0", "strategy.schedule.ahead"),
        ("equally_late", "strategy.weights.delay=1.5", "strategy.weights.delay"),
        ("listed_seconds", "cost.path=nowhere.json", "cost.path"),
        ("two_eyes", "model.depth=none", "model.depth"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(toy: str, word: str, field: str, tmp_path: Path) -> None:
    found = run(tmp_path / "run", *asked(tmp_path, toy), word, "engine=simulate")
    assert found.code == 2, found.out
    assert field in found.out and "Fix: " in found.out and "Traceback" not in found.out
