"""mode=export and layouts on the command line, with an exporter of a user's own: one file and one YAML, nothing in gpp/."""

from __future__ import annotations

from pathlib import Path

from tests.support.cli import run

OWN = Path(__file__).parent / "conf"
MODEL = ("model=gpt_small", "model.num_layers=2", "cluster=summit_1x4", "minibatch_size=32", "microbatch_size=4", "explain_s=0")


def test_a_layout_is_read_and_written_by_an_exporter_of_ones_own(tmp_path: Path) -> None:
    given = tmp_path / "stages.txt"
    given.write_text("stage: embed layers.0\nstage: layers.1 norm head\n")
    out = run(tmp_path / "run", "-cd", str(OWN), *MODEL, "export=stage_list", "strategy=even", "mode=export", f"plan={given}")
    assert out.code == 0, out.out
    folder = tmp_path / "run" / "export" / "stage_list"
    assert (folder / "stages.txt").read_text() == given.read_text()
    page = (folder / "PLAN.md").read_text()
    assert "for an engine of mine" in page and "## Memory of each rank" in page and "tokens a second" in page


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for words, said in (
        (("mode=export",), "mode=export writes for one engine"),
        (("mode=plan", "export=megatron"), "mode=plan writes no files for it"),
        (("mode=plan", "plan='Et|t|ttL'"), "has 4 layers, and the model has 2"),
    ):
        out = run(tmp_path / "refused", *MODEL, *words)
        assert out.code == 2 and said in out.out, out.out
