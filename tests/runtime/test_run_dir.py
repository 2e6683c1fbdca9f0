"""One run at a time in a directory, and nothing lost of the earlier ones."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpp.errors import InvalidConfig
from gpp.runtime.run_dir import EARLIER, LOCK, RunDir, is_locked, run_of, under_way

HOLDER = """
import sys, time
from pathlib import Path
from gpp.runtime.run_dir import RunDir
RunDir(Path(sys.argv[1]), command="python run.py steps=7").claim()
print("held", flush=True)
time.sleep(600)
"""


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file below a folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    }


def finished(path: Path, word: str) -> None:
    """A run that has ended well, with `word` in all its files."""
    with RunDir(path) as directory:
        directory.claim()
        directory.begin()
        for name in (
            "checkpoints/step_4/rank_0",
            "checkpoints/final/stage_0",
            "job/plan.json",
            "ranks/rank_0.jsonl",
            "report.html",
        ):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(word)
        (path / "result.json").write_text(json.dumps({"status": "ok", "word": word}))


def test_a_second_run_is_refused_at_once_and_told_who_is_there(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        assert is_locked(tmp_path)
        with pytest.raises(InvalidConfig, match="is in use by process") as caught:
            RunDir(tmp_path).claim()
        run = under_way(tmp_path)
        assert run is not None
        said = (f"process {process.pid} on {socket.gethostname()} since {run.started}", "(python run.py steps=7)")
        assert all(words in str(caught.value) for words in (*said, f"kill {process.pid}", f"hydra.run.dir={tmp_path}"))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_locked(tmp_path) and (tmp_path / LOCK).exists()
        RunDir(tmp_path).claim()  # the lock has ended with its process, though its file is there
    finally:
        process.kill()
        process.communicate()


def test_what_does_not_begin_leaves_no_trace(tmp_path: Path) -> None:
    with RunDir(tmp_path / "a" / "b" / "c") as directory:
        directory.claim()
        assert (tmp_path / "a" / "b" / "c" / LOCK).exists()
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    with RunDir(tmp_path / "empty") as directory:
        directory.claim()
    assert not list((tmp_path / "empty").iterdir())
    finished(tmp_path / "old", "first")
    before = files_of(tmp_path / "old")
    with RunDir(tmp_path / "old") as directory:
        directory.claim()
    assert files_of(tmp_path / "old") == before


def test_a_refused_command_does_not_hide_what_a_killed_run_went_on_from(tmp_path: Path) -> None:
    killed = RunDir(tmp_path)
    killed.claim(tmp_path.parent / "source" / "checkpoints" / "step_3", 3)
    os.close(killed._handle or 0)
    before = (tmp_path / LOCK).read_bytes()
    with RunDir(tmp_path) as directory:
        directory.claim()
        assert (tmp_path / LOCK).read_bytes() != before
    assert (tmp_path / LOCK).read_bytes() == before


def test_nothing_is_lost_whatever_runs_one_after_the_other(tmp_path: Path) -> None:
    rng, words = random.Random(0), []
    path = tmp_path / "run"
    for number in range(30):
        match rng.choice(["ends", "is refused", "goes on and ends", "goes on and is refused"]):
            case "ends":
                finished(path, words.append(f"word {number}") or words[-1])
            case "is refused":
                with RunDir(path) as directory:
                    directory.claim()
            case how if words:
                with RunDir(path) as directory:
                    directory.claim(path / "checkpoints" / "step_4", 4)
                    if how == "goes on and ends":
                        owner = run_of(path)
                        directory.begin()
                        assert owner is not None and directory.run is not None and directory.run.id == owner.id
                        words.append(f"word {number}")
                        (path / "result.json").write_text(json.dumps({"status": "ok", "word": words[-1]}))
                        (path / "checkpoints" / "final").mkdir()
                        (path / "checkpoints" / "final" / "stage_0").write_text(words[-1])
            case _:
                pass
        for name in ("result.json", "checkpoints/final/stage_0"):
            kept = [file.read_text() for file in [path / name, *path.glob(f"{EARLIER}/*/{name}")] if file.exists()]
            assert sum(any(f"{word}" in text for text in kept) for word in words) == len(words) == len(kept)
    assert len(words) > 10
    began = {file.read_text() for file in path.glob("**/checkpoints/step_4/rank_0")}
    assert len(began) == len(list(path.glob("**/checkpoints/step_4/rank_0")))


def test_files_of_others_stay_where_they_are(tmp_path: Path) -> None:
    """A directory in which no run was is somebody's own, whatever its files are called."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "mine.txt").write_text("mine")
    (tmp_path / "report.html").write_text("mine")
    with RunDir(tmp_path) as directory:
        directory.claim()
        directory.begin()
    assert (tmp_path / "job" / "mine.txt").exists() and not (tmp_path / EARLIER).exists()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("file", "is a file, not a directory"),
        ("file/below", "file is a file, not a directory"),
        ("dangling", "leads to nowhere, which is not there"),
        ("dangling/below", "which is not there"),
        ("nul\0", "is no path"),
        ("l\udcc3", "characters that the locale's encoding"),
        ("x" * 300, "File name too long"),
        ("/proc/run", "cannot be written"),
    ],
)
def test_a_path_that_is_no_directory_is_refused(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidConfig, match=says) as caught:
        RunDir(tmp_path / path).claim()
    assert caught.value.field == "hydra.run.dir" and caught.value.fix.startswith(("name a directory", "set PYTHONUTF8"))
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "kept"


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    finished(tmp_path / "Läufe 模型 'x'", "one")
    assert run_of(tmp_path / "Läufe 模型 'x'") is not None
