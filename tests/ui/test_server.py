"""The server: who is answered, what is shown, and that a question ends the one before."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from gpp.errors import InvalidConfig
from gpp.ui.app import application
from gpp.ui.command import main, serve
from gpp.ui.compare import _settings
from gpp.ui.runs import found_runs
from tests.support.page_check import parse

HOST, KEY = "127.0.0.1:8765", "the key"
BASE = f"http://{HOST}"
ORIGIN = {"Origin": BASE}


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    app = application(folder, hosts=frozenset({HOST, "localhost:8765"}), key=KEY)
    with TestClient(app, base_url=BASE, follow_redirects=False) as found:
        assert found.get("/", params={"key": KEY}).status_code == 303
        yield found


def test_only_who_has_the_key_at_the_right_address_is_answered(folder: Path) -> None:
    app = application(folder, hosts=frozenset({HOST}), key=KEY)
    fresh = TestClient(app, base_url=BASE, follow_redirects=False)
    assert fresh.get("/").status_code == fresh.get("/", params={"key": "wrong"}).status_code == 403
    given = fresh.get("/compare", params=[("run", "a b"), ("run", "c"), ("key", KEY)])
    assert given.status_code == 303 and given.headers["location"] == "/compare?run=a+b&run=c"
    assert {"HttpOnly", "SameSite=strict"} <= set(given.headers["set-cookie"].split("; "))
    page = fresh.get("/")
    assert page.status_code == 200 and page.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for host in ("evil.example", "127.0.0.1", "127.0.0.1:1", f"{HOST}.evil.example"):
        assert fresh.get("/", headers={"Host": host}).status_code == 421
    for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}):
        assert fresh.post("/plan?run=towers/graphpipe", content="{}", headers=headers).status_code == 403


def test_the_table_has_every_run_once(client: TestClient, folder: Path) -> None:
    page = client.get("/").text
    boxes = re.findall(r'<input type="checkbox" name="run" value="([^"]+)"', page)
    assert sorted(boxes) == ["towers/graphpipe", "towers/sequential"] == sorted(found_runs(folder))
    words = parse(page).words
    assert {"ok", "candle_uno_small", "summit_1x4", "graphpipe", "sequential"} <= set(words)
    assert page.count('href="run?run=towers%2F') == 2


def test_no_file_outside_a_run_is_served(client: TestClient, folder: Path, tmp_path: Path) -> None:
    report = client.get("/report", params={"run": "towers/graphpipe"})
    assert report.status_code == 200 and report.headers["content-security-policy"].startswith("sandbox allow-scripts;")
    for name in ("..", "../x", "/etc", str(folder), "latest", "towers", "towers/graphpipe/job", "towers/../towers/graphpipe", ""):
        assert client.get("/report", params={"run": name}).status_code == 404
        assert client.get("/run", params={"run": name}).status_code == 404
    for path in ("/report.html", "/towers/graphpipe/result.json", "/static/../app.py", "/docs"):
        assert client.get(path).status_code == 404
    copy = tmp_path / "copy"
    shutil.copytree(folder / "towers" / "graphpipe", copy)
    (tmp_path / "secret").write_text("<html>secret")
    (copy / "report.html").unlink()
    (copy / "report.html").symlink_to(tmp_path / "secret")
    (run,) = found_runs(copy).values()
    assert run.name == "." and run.inside("result.json") and run.inside("report.html") is None


def test_a_comparison_shows_what_differs_on_one_scale(client: TestClient) -> None:
    both = [("run", "towers/sequential"), ("run", "towers/graphpipe")]
    page = client.get("/compare", params=both).text
    words = " ".join(parse(page).words)
    assert "strategy.planner._target_" in words and "cache_dir" not in words and "iteration time, predicted" in words
    spans = {
        json.loads(data)["span_s"]
        for data in re.findall(r'<script type="application/json">(.*?)</script>', page)
        if "span_s" in data
    }
    assert len(re.findall(r"data-timeline", page)) >= 2 and len(spans) == 1
    assert re.search(r"\d operators? of s\d", words)
    same = " ".join(parse(client.get("/compare", params=[both[0], both[0]]).text).words)
    assert "None." in same and "→" not in same
    assert client.get("/compare", params=both[:1]).status_code == 400
    assert client.get("/compare", params=[both[0], ("run", "nowhere")]).status_code == 404


def test_a_runs_page_plans_moves_and_exports(client: TestClient, folder: Path) -> None:
    run = "towers/sequential"
    page = client.get("/run", params={"run": run})
    assert page.status_code == 200 and "gpp.look" in page.text
    assert {"input", "fieldset", "output"} <= set(parse(page.text).tags)

    def ask(question: object) -> dict[str, Any]:
        sent = question if isinstance(question, str) else json.dumps(question)
        answered = client.post("/plan", params={"run": run, "page": "p"}, content=sent, headers=ORIGIN)
        assert answered.status_code == 200
        return answered.json()

    state = [3, 0, 12, 1, 0]
    first = ask({"state": state, "whole": True})
    result = json.loads((folder / run / "result.json").read_text())
    assert first["status"] == "ok" and first["step_s"] == result["predicted"]["iteration_s"]
    state[1] = 1  # micro-batches of one sample, which no replicas share
    first = ask({"state": state, "whole": True})
    op, _, to, _ = first["moves"][0]
    assert ask({"state": state, "plan": first["json"], "move": [op, to]})["status"] == "ok"
    for wrong in ({"state": [0]}, "no JSON", {"state": state, "plan": "{}"}):
        assert ask(wrong)["status"] == "failed"
    asked = {"state": state, "plan": first["json"], "nearest": True}
    assert "export=torchtitan" in ask(asked | {"export": "torchtitan"})["reason"]
    written, out = ask(asked | {"export": "torch"}), folder / run / "export" / "torch"
    assert written["folder"] == str(out) and (out / "PLAN.md").read_text() == written["page"]
    assert json.loads((out / "plan.json").read_text()) == json.loads(first["json"])
    assert (out / "job" / "model.json").exists() and not list(out.rglob("*.safetensors"))
    late = {"run": run, "page": "p", "turn": "2"}
    assert client.post("/plan", params=late, content="{}", headers=ORIGIN).json()["status"] == "failed"
    sent_before = client.post("/plan", params=late | {"turn": "1"}, content="{}", headers=ORIGIN)
    assert sent_before.status_code == 204 and not sent_before.content
    assert client.post("/plan", params=late | {"turn": "-1"}, content="{}", headers=ORIGIN).status_code == 400
    too_long = client.post(f"/plan?run={run}", content=b"x" * (2**23 + 1), headers=ORIGIN)
    assert too_long.status_code == 413


def test_a_run_that_cannot_be_planned_again_says_why(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "towers" / "graphpipe", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("gpp.optimizers.", "elsewhere.optimizers."))
    with TestClient(application(tmp_path, hosts=frozenset({HOST}), key=KEY), base_url=BASE) as client:
        words = " ".join(parse(client.get("/run", params={"run": "run", "key": KEY}).text).words)
    assert "elsewhere.optimizers" in words and "--trust elsewhere" in words


def test_loggers_are_no_difference_between_runs() -> None:
    old, new = (SimpleNamespace(settings=each) for each in ({"logger.wandb.mode": "offline", "steps": 2}, {"steps": 3}))
    assert _settings(old, new).rows == [["steps", "2", "3"]]  # type: ignore[arg-type]


def test_a_run_under_way_is_named_by_its_settings(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "towers" / "graphpipe", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    monkeypatch.setattr("gpp.ui.runs.is_locked", lambda path: True)
    with TestClient(application(tmp_path, hosts=frozenset({HOST}), key=KEY), base_url=BASE) as client:
        page = client.get("/run", params={"run": "run", "key": KEY}).text
    assert {"candle_uno_small", "graphpipe", "summit_1x4", "simulate"} <= set(parse(page).words)
    assert page.count("under way") == 1 and 'class="status failed"' not in page


SLOW = """
import time
from gpp.ui.keeper import serve

def answer(asked):
    if asked == b"slow":
        time.sleep(300)
    if asked == b"soon":
        time.sleep(0.5)
    if asked == b"wrong":
        raise ValueError("<no>")
    return asked.upper()

serve(answer, 0, 1)
"""


def test_a_question_ends_the_one_that_its_page_asked_before() -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert keeper.stdin is not None and keeper.stdout is not None

    def ask(number: int, page: str, asked: str) -> None:
        assert keeper.stdin is not None
        keeper.stdin.write(json.dumps({"number": number, "page": page, "asked": asked}).encode() + b"\n")
        keeper.stdin.flush()

    def answered() -> tuple[int, bytes]:
        assert keeper.stdout is not None
        number, size = map(int, keeper.stdout.readline().split())
        return number, keeper.stdout.read(size)

    begin = time.monotonic()
    ask(1, "a", "slow")
    ask(2, "b", "other page")
    assert answered() == (2, b"OTHER PAGE")
    ask(3, "a", "quick")
    assert answered() == (1, b"")  # ended, without an answer
    assert answered() == (3, b"QUICK")
    ask(4, "b", "wrong")
    number, said = answered()
    assert number == 4 and "this is a defect" in json.loads(said)["reason"]
    # An answer and a question are there in one turn: the pipe of the first is closed, and the second gets its number.
    ask(5, "b", "soon")
    time.sleep(0.2)
    keeper.send_signal(signal.SIGSTOP)
    time.sleep(0.8)
    ask(6, "b", "slow")
    keeper.send_signal(signal.SIGCONT)
    ask(7, "b", "quick")
    assert {answered(), answered(), answered()} & {(6, b""), (7, b"QUICK")} == {(6, b""), (7, b"QUICK")}
    ask(8, "b", "slow")
    keeper.stdin.close()  # the server has gone: what is being planned ends, too
    assert answered() == (8, b"") and keeper.wait(timeout=60) == 0 and keeper.stdout.read() == b""
    keeper.stdout.close()
    assert time.monotonic() - begin < 200


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    assert main([str(tmp_path)]) == 2 and "has no run" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2 and "is no folder" in capsys.readouterr().err
    for host, why in (("0.0.0.0", "every interface"), ("example.org", "must be an IP address"), ("::", "every interface")):
        assert main([str(folder), "--host", host]) == 2 and why in capsys.readouterr().err
    assert main([str(folder), "--port", "99999"]) == 2 and "cannot be listened at" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InvalidConfig, match=r"uvicorn.*gpp\[ui\]"):
        serve(folder, "127.0.0.1", 0, ())
