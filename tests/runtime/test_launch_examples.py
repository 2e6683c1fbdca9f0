"""The examples of docs/launch: what a tool would read in them, and that their commands compose to runs that fit."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.distributed.run import get_args_parser

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from gpp.app.command import as_mode
from gpp.runtime.controller.place import LaunchPlace
from tests.support.conf import CONF

FOLDER = CONF.parent / "docs" / "launch"


def check_command(words: list[str], processes: int) -> None:
    """The words after run.py describe a real run on as many devices as processes are started."""
    assert words[0] == "run.py" or words[:2] == ["python", "run.py"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=words[words.index("run.py") + 1 :])
    engine, cluster = (instantiate(cfg[group], _convert_="all") for group in ("engine", "cluster"))
    assert (engine.name, engine.launch, cluster.num_devices) == ("distributed", "env", processes)
    assert engine.interface != "lo" and len(set(cluster.nodes)) == 2
    assert cfg.minibatch_size % processes == 0


def command_of(script: str, name: str) -> list[str]:
    """The words of the one command `name` of a shell script, without its variables."""
    assert not subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr
    joined = script.replace("\\\n", " ")
    (line,) = (line for line in joined.splitlines() if line.startswith(f"{name} "))
    return shlex.split(re.sub(r"\"\$\(.*?\)\"|\"?\$\w+\"?", "2", line))


def test_the_slurm_script() -> None:
    script = (FOLDER / "slurm.sh").read_text()
    assert script.startswith("#!/bin/bash\n")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.M))
    assert len(asked) == script.count("#SBATCH")
    tasks = int(asked["nodes"]) * int(asked["ntasks-per-node"])
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    words = command_of(script, "srun")
    assert words[:2] == ["srun", "--kill-on-bad-exit=1"]
    check_command(words[2:], tasks)
    # What Slurm sets for the last of these tasks.
    env = {"SLURM_PROCID": str(tasks - 1), "SLURM_NTASKS": str(tasks), "SLURM_LOCALID": "3", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert LaunchPlace.of(env, interface="ib0", address=None, port=1).machines == int(asked["nodes"])


def torchrun(words: list[str]) -> Any:
    """What torchrun itself reads in a command line."""
    return get_args_parser().parse_args(words)


def test_the_task_of_skypilot() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert set(task) <= {"name", "num_nodes", "workdir", "resources", "setup", "run", "envs", "file_mounts"}
    cards = int(task["resources"]["accelerators"].partition(":")[2])
    for name in ("NUM_NODES", "NODE_RANK", "NUM_GPUS_PER_NODE", "NODE_IPS"):
        assert f"$SKYPILOT_{name}" in task["run"]
    words = command_of(task["run"], "torchrun")
    args = torchrun(words[1:])
    assert (args.nnodes, args.nproc_per_node, args.master_port) == ("2", "2", 29500)
    check_command([args.training_script, *args.training_script_args], task["num_nodes"] * cards)


def test_the_train_job_of_kubeflow(monkeypatch: pytest.MonkeyPatch) -> None:
    job = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"} and set(job["spec"]) == {"runtimeRef", "trainer"}
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    trainer = job["spec"]["trainer"]
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert all(isinstance(word, str) for word in [*trainer["command"], *trainer["args"]])
    # The runtime's variables; torchrun takes them in place of its options.
    for name, value in {"NNODES": 2, "NPROC_PER_NODE": 4, "NODE_RANK": 1, "MASTER_ADDR": "gpp-0", "MASTER_PORT": 29400}.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    args = torchrun([*trainer["command"][1:], *trainer["args"]])
    assert (args.nnodes, args.nproc_per_node, args.node_rank, args.master_addr) == ("2", "4", 1, "gpp-0")
    check_command([args.training_script, *args.training_script_args], trainer["numNodes"] * trainer["numProcPerNode"])


def test_the_two_containers_run_one_job() -> None:
    """Both machines give torchrun the same words, and what it starts is a real run on all their devices."""
    services = yaml.safe_load((CONF.parent / "compose.yaml").read_text())["services"]
    assert [services[name]["hostname"] for name in services] == list(services) == ["node0", "node1"]
    first, second = (torchrun(shlex.split(services[name]["command"])) for name in services)
    assert first == second and first.rdzv_endpoint.split(":")[0] == "node0"
    assert (first.nnodes, first.nproc_per_node, first.no_python, first.training_script) == ("2", "2", True, "gpp")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=as_mode(first.training_script_args))
    engine, cluster = (instantiate(cfg[group], _convert_="all") for group in ("engine", "cluster"))
    assert (cfg.mode, engine.launch, engine.interface, cluster.num_devices) == ("train", "env", "eth0", 4)
    assert cfg.minibatch_size % 4 == 0


def test_every_example_is_named_by_the_page() -> None:
    page = (FOLDER.parent / "launch.md").read_text()
    assert not [path.name for path in Path(FOLDER).iterdir() if f"`{path.name}`" not in page]
