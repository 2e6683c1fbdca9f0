"""The skeleton of a self-contained page: style, sections, tables. Nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
*{box-sizing:border-box}
html{color-scheme:light;-webkit-text-size-adjust:100%}
body{margin:0;background:#fff;color:#1f2937;font:14px/1.5 system-ui,-apple-system,'Segoe UI','DejaVu Sans',Roboto,sans-serif}
main{max-width:1400px;margin:0 auto;padding:24px 28px 48px}
svg{display:block;font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',Roboto,sans-serif}
h1{font-size:24px;line-height:1.25;margin:0 0 6px}
h2{font-size:17px;margin:34px 0 10px;padding-bottom:5px;border-bottom:1px solid #d1d5db}
p{margin:6px 0}
.sub{color:#4b5563}.sub b{color:#1f2937;font-weight:600}.sub span{margin-right:18px;white-space:nowrap}
.status{display:inline-block;padding:1px 10px;border-radius:10px;font-size:13px;font-weight:600;
vertical-align:middle;margin-left:8px}
.ok{background:#d8f3e6;color:#00513b}.infeasible{background:#fdecc8;color:#6b3f00}.failed{background:#fde0dc;color:#8b1a10}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:12px;margin-top:18px}
.card{border:1px solid #d1d5db;border-radius:8px;padding:10px 14px}
.card h3{margin:0 0 4px;font-size:13px;font-weight:600;color:#4b5563}
.card dl{display:grid;grid-template-columns:auto 1fr;gap:0 12px;margin:0;font-variant-numeric:tabular-nums}
.card dt{color:#4b5563}.card dd{margin:0;text-align:right}.card .big{font-size:17px;font-weight:600}
.scroll{overflow-x:auto}
.key{display:flex;flex-wrap:wrap;gap:2px 18px;margin:4px 0 10px;font-size:12.5px;color:#4b5563}
.key span{display:inline-flex;align-items:center;gap:6px;white-space:nowrap}
.note{border-left:4px solid #d99a3a;background:#fdf6e8;padding:8px 14px;margin:14px 0}
.bad{border-left-color:#b91c1c;background:#fdf0ee}
.pair{display:flex;flex-wrap:wrap;gap:20px}.pair>*{flex:1 1 max(420px,40%);min-width:0;max-width:660px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:5px 12px 5px 0;text-align:left;vertical-align:top;border-bottom:1px solid #e5e7eb}
th{font-weight:600;color:#4b5563;font-size:13px;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
.n+th:not(.n),.n+td:not(.n){padding-left:14px}
td.c,code,pre{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:12.5px}
td.c{word-break:break-word}
pre{background:#f3f4f6;border-radius:6px;padding:10px 14px;white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0}
ul{margin:6px 0;padding-left:22px}
a{color:#00568a}
@media print{
@page{size:A4 landscape;margin:10mm}
main{padding:0;max-width:none}body{-webkit-print-color-adjust:exact;print-color-adjust:exact;font-size:11px}
svg{min-width:0!important;max-width:100%!important}.scroll{overflow:visible}
section,.card,tr{break-inside:avoid}h2{break-after:avoid}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A table's column; `kind` is "" for words, "n" for numbers, "c" for code."""

    name: str
    kind: str = ""


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def section(heading: str, content: str) -> str:
    """A headed section; nothing at all where there is no content."""
    return f"<section><h2>{escape(heading)}</h2>{content}</section>\n" if content else ""


def scroll(content: str) -> str:
    """A box that scrolls sideways on its own, so that the page never does."""
    return f'<div class="scroll" tabindex="0">{content}</div>'


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are text, or `Html` where they are to be taken as they are."""

    def cell(column: Column, value: str) -> str:
        attribute = f' class="{column.kind}"' if column.kind else ""
        return f"<td{attribute}>{value if isinstance(value, Html) else escape(value)}</td>"

    head = "".join(
        f"<th{' class=n' if c.kind == 'n' else ''}>{escape(c.name)}</th>".replace("class=n", 'class="n"') for c in columns
    )
    lines = ["<tr>" + "".join(cell(c, v) for c, v in zip(columns, row, strict=True)) + "</tr>" for row in rows]
    return scroll(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>")


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def link(target: str, words: str) -> Html:
    """A link to a file beside the page."""
    return Html(f'<a href="{escape(target, quote=True)}">{escape(words)}</a>')


def status_mark(status: str) -> Html:
    """The coloured word for how a run ended."""
    kind = status if status in ("ok", "infeasible") else "failed"
    return Html(f'<span class="status {kind}" style="margin-left:0">{escape(status)}</span>')


def bullets(lines: Sequence[str]) -> str:
    """A plain list."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""
