"""One layer writes (`gpp/files.py`): nothing else in gpp/ opens a file for writing, and what the layer promises holds."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpp import files
from gpp.errors import InvalidConfig
from gpp.private import SECRETS, apart, hidden, keep, masked, masked_json, masked_value, secret_settings, shown

GPP = Path(files.__file__).parent

WRITERS = frozenset(
    (
        *("write_text", "write_bytes", "save_file", "save", "mkdir", "makedirs", "touch", "FileHandler"),
        *("mkdtemp", "mkstemp", "mktemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "SpooledTemporaryFile"),
        *("symlink_to", "symlink", "hardlink_to", "copy2", "copyfile", "copytree"),
    )
)
"""Names of functions of Python and of libraries that make a file or a folder."""
NAMED = re.compile(rf"\b({'|'.join(WRITERS)}|open|fdopen)\b")

EXCEPTIONS = {
    "app/new_project.py": {"mkdir", "write_text"},  # the files of a new project are the user's own, to be shared as they like
    "app/streams.py": {"open"},  # /dev/null
    "report/run/result.py": {"write_text"},  # /proc/self/clear_refs
    "runtime/transport/shared_memory.py": {"open"},  # memory of another worker, which has no name
}


def writes(path: Path) -> set[str]:
    """Names of the calls of a module that open something for writing, but for those of the layer."""
    text, found = path.read_text(), set[str]()
    if not NAMED.search(text):  # parsing all files takes seconds
        return found
    tree = ast.parse(text)
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("gpp.files", "gpp.report.run.result")
        for alias in node.names
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = call.func
        name = function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
        if name in ours and isinstance(function, ast.Name):
            continue
        if name in ("open", "fdopen"):
            words = [ast.unparse(word) for word in (*call.args, *(keyword.value for keyword in call.keywords))]
            modes = [word for word in words if word[:1] in "'\"" and set(word.strip("'\"")) <= set("rwaxbt+U")]
            creates = any("O_CREAT" in word or "O_WRONLY" in word or "O_RDWR" in word for word in words)
            if creates or any(set(mode) & set("wax+") for mode in modes):
                found.add(name)
        elif name in WRITERS and (name != "save" or ast.unparse(function) == "torch.save"):  # any other is a method of ours
            found.add(name)
    return found


def test_nothing_else_opens_a_file_for_writing() -> None:
    wrong = {
        str(path.relative_to(GPP)): sorted(extra)
        for path in sorted(GPP.rglob("*.py"))
        if path != Path(files.__file__) and (extra := writes(path) - EXCEPTIONS.get(str(path.relative_to(GPP)), set()))
    }
    assert not wrong


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    """The test above is worth nothing if nothing could be found."""
    (tmp_path / "a.py").write_text(
        "open(p, 'w'); p.open('ab'); os.open(p, os.O_CREAT | os.O_WRONLY); p.write_text(t); torch.save(x, p); p.mkdir()\n"
        "tempfile.mkdtemp(); save_file(x, p); job.save(p); open(p); p.open('rb'); os.open(p, os.O_RDONLY)"
    )
    assert writes(tmp_path / "a.py") == {"open", "write_text", "save", "mkdir", "mkdtemp", "save_file"}


def test_files_and_folders_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write_text(tmp_path / "run" / "a" / "x.json", "{}")
        files.write_bytes(tmp_path / "run" / "a" / "b", b"b")
        with files.open_lines(tmp_path / "run" / "lines") as lines:
            lines.write("1\n")
        files.open_binary(tmp_path / "run" / "c").close()
        os.close(files.descriptor(tmp_path / "run" / "d", os.O_RDWR))
        assert files.claim_text(tmp_path / "run" / "e", "1") and not files.claim_text(tmp_path / "run" / "e", "2")
        files.copy(tmp_path / "run" / "a", tmp_path / "run" / "z")
    finally:
        os.umask(before)
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "run" / "z" / "b").read_bytes() == b"b" and (tmp_path / "run" / "e").read_text() == "1"


def test_others_see_a_file_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x"
    files.write_text(path, "old")
    with pytest.raises(ZeroDivisionError), files.fresh(path) as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with files.fresh(path) as part:
        part.write_text("new")
        assert path.read_text() == "old" and part.name.startswith(".")
    assert path.read_text() == "new"
    (tmp_path / f".y.1.0{files.NEW}").write_text("of a process that was killed")
    files.drop_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_of_one_memory_are_written_by_each_name(tmp_path: Path) -> None:
    """Inputs that are the targets, too, and a buffer that is a part of another one."""
    whole = torch.arange(6.0)
    tensors = {"part": whole[2:4], "same": whole, "whole": whole, "none": whole[:0], "other": torch.ones(2)}
    files.write_tensors(tmp_path / "x", tensors)
    torch.testing.assert_close(load_file(tmp_path / "x"), tensors)


HOLDER = """
import sys, time
from gpp.files import TemporaryFolder
folder = TemporaryFolder("test")
(folder.path / "x").touch()
print(folder.path, flush=True)
"""


@pytest.mark.parametrize(
    ("end", "number"),
    [("time.sleep(60)", signal.SIGKILL), ("time.sleep(60)", signal.SIGTERM), ("1 / 0", 0), ("sys.exit(1)", 0)],
    ids=["SIGKILL", "SIGTERM", "exception", "exit"],
)
def test_a_temporary_folder_is_gone_however_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, number: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", HOLDER + end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    if number:
        assert folder.stat().st_mode & 0o777 == 0o700
        files.sweep()
        assert (folder / "x").exists(), "its process lives"
        process.send_signal(number)
    process.wait()
    process.stdout.close()
    mine = files.TemporaryFolder("test")  # the next start
    assert sorted(tmp_path.iterdir()) == [mine.path]
    mine.close()
    assert not list(tmp_path.iterdir())


def test_folders_that_are_not_ours_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "gpp-cache").mkdir()
    (tmp_path / "gpp-feed-abc").mkdir()
    (tmp_path / f"gpp-x{files.HELD}").symlink_to(tmp_path / "gpp-cache")
    files.sweep()
    assert len(list(tmp_path.iterdir())) == 3


SECRET = "s3cr\"et'&<pä ss\\word"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "ab")
    monkeypatch.setenv("DIGITS_KEY", "12345678")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", sys.executable)
    monkeypatch.delenv(SECRETS, raising=False)
    return monkeypatch


def test_a_secret_is_masked_however_it_is_written(environment: pytest.MonkeyPatch) -> None:
    import html
    import shlex
    from urllib.parse import quote

    from markupsafe import escape

    written = [
        SECRET,
        json.dumps(SECRET),
        json.dumps(SECRET, ensure_ascii=False),
        repr(SECRET),
        html.escape(SECRET),
        str(escape(SECRET)),
    ]
    for text in (*written, quote(SECRET, safe=""), f"ValueError: bad key {SECRET}!"):
        assert "word" not in masked(text) and "***" in masked(text), text
    assert "word" not in masked(shlex.quote(SECRET))
    assert masked("about absolute labels") == "about absolute labels"
    assert masked(f"in {sys.executable}") == f"in {sys.executable}", "a path is no secret"
    assert masked("postgres://u:PASSWORD@db and redis://:hunter2@h") == "postgres://u:***@db and redis://:***@h"
    assert (
        masked("http://www.w3.org/2000/svg a@b.org:x https://me@host/a:b@c")
        == "http://www.w3.org/2000/svg a@b.org:x https://me@host/a:b@c"
    )
    assert masked("task-" + "a" * 30) == "task-" + "a" * 30


def test_a_number_that_holds_a_secret_stays_a_number(environment: pytest.MonkeyPatch) -> None:
    text = json.dumps({"loss": 0.123456789, "why": "12345678 was wrong"})
    assert json.loads(masked_json(text)) == {"loss": 0.123456789, "why": "*** was wrong"}
    lines = '{"step": 12345678}\n{"warning": "12345678"}\n'
    assert [json.loads(line) for line in masked_json(lines).splitlines()] == [{"step": 12345678}, {"warning": "***"}]
    assert masked("0.123456789") == "0.***9"


SETTINGS = {
    "data": {
        "factory": "mine.data",
        "arguments": {
            "github_token": "0123456789abcd",
            "dsn": "postgres://u:PASSW0RD@db",
            "pad_token": "<padding>",
            "num_tokens": "44444444",
        },
        "mirror": "https://me:a/b@c@host/x",
    }
}


def test_secret_settings_are_held_apart_and_put_back(environment: pytest.MonkeyPatch) -> None:
    places = ("data.arguments.github_token", "data.arguments.dsn", "data.mirror")
    assert tuple(secret_settings(SETTINGS)) == places == keep(SETTINGS)
    keep(SETTINGS)  # a second time changes nothing
    text = json.dumps(SETTINGS)
    assert len(json.loads(os.environ[SECRETS])) == 3
    assert not any(secret in hidden(text) for secret in ("0123456789abcd", "PASSW0RD", "a/b@c"))
    assert json.loads(shown(hidden(text))) == SETTINGS
    assert masked("connect to db with PASSW0RD as 0123456789abcd") == "connect to db with *** as ***"
    assert masked_value(SETTINGS)["data"]["arguments"] == {
        "github_token": "***",
        "dsn": "***",
        **{k: SETTINGS["data"]["arguments"][k] for k in ("pad_token", "num_tokens")},
    }
    text_apart, known = hidden(text), json.loads(os.environ[SECRETS])
    environment.setenv(SECRETS, json.dumps(known[::-1]))
    assert apart(SETTINGS)["data"]["mirror"] == "***" and apart(SETTINGS) == json.loads(re.sub(r"secret \d\*\*\*", "", text_apart))
    environment.delenv(SECRETS)
    with pytest.raises(InvalidConfig, match=r"GPP_SECRETS.*start workers from the run's own command"):
        shown(text_apart)


def test_a_setting_with_a_form_of_a_secret_is_one() -> None:
    for value in ("hf_" + "a" * 34, "https://me:ghp_" + "a" * 36 + "@github.com", "sk-" + "b" * 30):
        assert secret_settings({"model": {"name": [value]}}) == {"model.name[0]": value}
    assert not secret_settings({"model": {"num_tokens": "4", "pad_token": "<pad>", "arguments": {"key": "k"}}, "password": None})
