"""What docs/trust.md says, held to it: who listens where, what leaves the machine, who may read what, what is never obeyed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from gpp.errors import printable
from tests.support import cli, machines
from tests.support.cli import ROOT, run
from tests.support.machines import ADDRESS, island
from tests.support.warm import warm

KEY = "0123456789abcdef0123456789abcdefdeadbeef"
SMALL = [
    "model=mlp",
    "model.num_blocks=2",
    "cluster.num_devices=2",
    "steps=3",
    "cost=analytical",
    "minibatch_size=16",
    "baselines_s=0",
]
ALONE = pytest.mark.skipif(machines.why_not() is not None, reason=str(machines.why_not()))


def alone(run_dir: Path, *words: str, cold: bool = True, env: dict[str, str] | None = None) -> tuple[set[str], int]:
    """A run on a machine of its own: the addresses at which somebody listened, and the packets sent to other machines.

    Args:
        cold: whether its processes are started; else they are forks of the warm process.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    words = (*SMALL, *words, f"hydra.run.dir={run_dir}")
    with island() as here:
        if cold:
            done = here.run([sys.executable, "run.py", *words], cwd=ROOT, env=environment)
            code, said = done.returncode, done.stdout
        else:
            out = run_dir.with_name("out.txt")
            code = warm().run([*words], environment, out, network=here.name)
            said = out.read_text()
        assert code == 0, said
        return here.heard, here.sent()


@ALONE
@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_island_notices_who_listens_and_who_sends(cold: bool, tmp_path: Path) -> None:
    """The tests below are worth nothing if nothing could be found."""
    script = (
        "import socket, time; l = socket.socket(); l.bind(('0.0.0.0', 0)); l.listen(); time.sleep(0.3)\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('8.8.8.8', 53)); time.sleep(0.3)"
    )
    with island() as here:
        if cold:
            here.run([sys.executable, "-c", script])
        else:
            (tmp_path / "script.py").write_text(script)
            code = warm().run([], cli.environment(), tmp_path / "out", script=str(tmp_path / "script.py"), network=here.name)
            assert code == 0, (tmp_path / "out").read_text()
        assert here.heard == {"0.0.0.0"} and here.sent() > 0


@ALONE
@pytest.mark.dist
@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_with_its_tracker_listens_on_loopback_sends_nothing_and_keeps_secrets(cold: bool, tmp_path: Path) -> None:
    secrets = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_" + "x" * 30, "WANDB_MODE": "offline"}
    heard, sent = alone(tmp_path / "run", "logger=wandb", cold=cold, env=secrets)
    assert heard <= {"127.0.0.1"} and sent == 0
    assert cold or heard  # the forks' sockets are seen
    assert (tmp_path / "run" / "wandb").is_dir()
    for path in (tmp_path / "run").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret.encode() in content for secret in (KEY, secrets["HF_TOKEN"])), path
        closed = "wandb" in path.relative_to(tmp_path / "run").parts[:-1]  # wandb's own files lie in a closed folder
        assert path.is_symlink() or closed or not path.stat().st_mode & 0o077, path


FORMS = {
    "messages through gloo": ["engine.shared_memory=false"],
    "rivals measured": ["baselines_s=15"],
    "emulate": ["engine=emulate"],
    "reference": ["engine=reference"],
    "single": ["engine=single"],
    "data_parallel": ["engine=data_parallel"],
    "slurm": ["engine.launch=slurm", "engine.slurm.executor=local"],
}


@ALONE
@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_run_listens_on_loopback_and_sends_nothing(tmp_path: Path, form: str) -> None:
    heard, sent = alone(tmp_path / "run", "logger=none", *FORMS[form])
    assert heard <= {"127.0.0.1"}
    # torch's store, which only workers of other launchers use, asks for the name of every address, 127.0.0.1 too.
    assert sent == 0 or form == "slurm"


@ALONE
@pytest.mark.long
@pytest.mark.dist
def test_a_named_interface_is_the_only_one(tmp_path: Path) -> None:
    heard, sent = alone(tmp_path / "run", "logger=none", "engine.shared_memory=false", "engine.interface=gpp-out")
    assert heard == {ADDRESS} and sent == 0


EVIL = "\x1b[2J\x1b[31mred\x1b]0;title\x07<script>alert(1)</script>\u202e"


@pytest.mark.dist
def test_names_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    """Operators' names with sequences that a terminal obeys, and with markup that a browser runs, from a stranger's profile."""
    node = {"fwd_ms": 1.0, "bwd_ms": 2.0, "param_bytes": 10, "activation_bytes": 10}
    nodes = [{"id": i, "name": f"{EVIL}.{i}", **node} for i in range(6)]
    profile = {"nodes": nodes, "edges": [[i, i + 1, 5] for i in range(5)]}
    (tmp_path / "evil.json").write_text(json.dumps(profile))
    words = ("model=profile", f"model.path={tmp_path / 'evil.json'}", "cluster=flat", "cluster.num_devices=2", "logger=none")
    done = run(tmp_path / "run", *words, "mode=plan", "explain_s=0")
    assert done.code == 0, done.out
    assert printable(done.out) == done.out and "\\x1b" in done.out
    page = (tmp_path / "run" / "report.html").read_text()
    assert printable(page) == page and "<script>alert" not in page and "&lt;script&gt;" in page
    (tmp_path / "evil.json").write_text(json.dumps({**profile, "edges": [[0, EVIL, 1]]}))
    refused = run(tmp_path / "refused", *words, "mode=plan")
    assert refused.code == 2 and printable(refused.out) == refused.out
