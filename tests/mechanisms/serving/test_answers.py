"""answers.safetensors of a stream that did not come to its end: what is no answer is marked, counted, and judged by nobody."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gpp.mechanisms.serving.answers import Answers, finish
from gpp.runtime.run_dir import ANSWERS, ANSWERS_UNDER_WAY, RUN, RunDir
from gpp.runtime.transport.form import Form

FORMS = {
    "logits": Form((3, 2), torch.float32),
    "half": Form((), torch.bfloat16),
    "small": Form((2,), torch.float16),
    "wide": Form((1,), torch.float64),
    "class_id": Form((), torch.int64),
    "empty": Form((0,), torch.float32),
}
SAMPLES = 1000


def rows(name: str, count: int) -> torch.Tensor:
    form = FORMS[name]
    return torch.full((count, *form.shape), 7, dtype=form.dtype)


def write(folder: Path, spans: dict[str, list[tuple[int, int]]]) -> None:
    """As several workers do, one for each answer."""
    for name, own in spans.items():
        answers = Answers(folder / ANSWERS_UNDER_WAY, FORMS, SAMPLES)
        for lo, hi in own:
            answers.write(name, lo, rows(name, hi - lo))
        answers.close()


def test_rows_that_are_no_answers_are_marked_and_counted(tmp_path: Path) -> None:
    everywhere = {name: [(0, 500), (700, 800)] for name in FORMS}
    write(tmp_path, everywhere | {"logits": [(0, 400), (700, 800), (400, 402)]})
    assert not (tmp_path / ANSWERS).exists()
    assert finish(tmp_path) == {"samples": SAMPLES, "answered": 502}
    found = load_file(tmp_path / ANSWERS)
    for name, form in FORMS.items():
        there = found[f"answered.{name}"]
        assert there.dtype == torch.bool and int(there.sum()) == (502 if name == "logits" else 600)
        assert torch.equal(found[name][there], rows(name, int(there.sum())))
        rest = found[name][~there]
        assert rest.isnan().all() if form.dtype.is_floating_point else not rest.any()
    with safe_open(tmp_path / ANSWERS, framework="pt") as file:
        assert file.metadata() == {"samples": "1000", "answered": "502"}
    assert finish(tmp_path) is None and not (tmp_path / ANSWERS_UNDER_WAY).exists()


def test_workers_of_another_plan_go_on_where_those_before_ended(tmp_path: Path) -> None:
    write(tmp_path, {name: [(0, 300)] for name in FORMS})
    write(tmp_path, {name: [(250, SAMPLES)] for name in FORMS})
    assert finish(tmp_path) == {"samples": SAMPLES, "answered": SAMPLES}
    assert not any(
        tensor.isnan().any() for name, tensor in load_file(tmp_path / ANSWERS).items() if not name.startswith("answered.")
    )


def test_answers_of_an_earlier_run_are_set_aside_whole_or_not(tmp_path: Path) -> None:
    for name in (ANSWERS, ANSWERS_UNDER_WAY):
        with RunDir(tmp_path) as directory:
            directory.claim()
            directory.begin()
            assert not (tmp_path / ANSWERS).exists() and not (tmp_path / ANSWERS_UNDER_WAY).exists()
            (tmp_path / name).write_text(json.dumps(name))
    with RunDir(tmp_path) as directory:
        directory.claim()
        directory.begin()
    assert [(tmp_path / "earlier" / str(n + 1) / name).exists() for n, name in enumerate((ANSWERS, ANSWERS_UNDER_WAY))] == [
        True,
        True,
    ]
    assert (tmp_path / RUN).exists()


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_file_of_few_rows(tmp_path: Path, count: int) -> None:
    answers = Answers(tmp_path / ANSWERS_UNDER_WAY, {"a": Form((2,), torch.float32)}, count)
    answers.close()
    assert finish(tmp_path) == {"samples": count, "answered": 0}
    assert load_file(tmp_path / ANSWERS)["a"].isnan().all()
