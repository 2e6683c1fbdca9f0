"""The pages and questions of the server: Starlette's routes, each one function."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from gpp.errors import GppError, counted
from gpp.report.draw.packed import squeeze
from gpp.report.draw.page import render
from gpp.ui.compare import comparison
from gpp.ui.guard import Guard
from gpp.ui.kept import KeptRuns
from gpp.ui.runs import RunFiles, found_runs, table
from gpp.ui.views import Control

TEMPLATES = Path(__file__).resolve().parent / "templates"
MOST_BYTES = 2**23
"""Of a question: a plan of the largest models has less."""
SANDBOX = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""A run's own report is a file of the folder: its scripts draw, and can ask this server for nothing."""


def application(folder: Path, *, hosts: frozenset[str], key: str, trusted: Sequence[str] = ()) -> Starlette:
    """The server of a folder of runs, or of one run.

    Args:
        hosts, key: as `Guard` has them.
        trusted: packages beside gpp whose classes a run's config.yaml may name.
    """
    keepers = KeptRuns(trusted)

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        yield
        await keepers.close()

    async def runs(_: Request) -> Response:
        found = await run_in_threadpool(found_runs, folder)
        rows = await run_in_threadpool(table, found)
        title = f"{counted(len(found), 'run')} of {folder}"
        return HTMLResponse(_page("runs.html", title=title, folder=str(folder), runs=rows, count=len(found)))

    async def run(request: Request) -> Response:
        asked = await _run(request)
        page = json.loads(await (await keepers.of(asked.path)).page())
        return HTMLResponse(_run_page(asked, page))

    async def report(request: Request) -> Response:
        path = (await _run(request)).inside("report.html")
        if path is None:
            raise HTTPException(404, "the run has no report.html")
        return FileResponse(path, media_type="text/html", headers={"Content-Security-Policy": SANDBOX})

    async def compare(request: Request) -> Response:
        chosen = request.query_params.getlist("run")
        if len(chosen) != 2:
            raise HTTPException(400, f"choose two runs to compare, not {len(chosen)}")
        both = [await _run(request, name) for name in chosen]
        found = await run_in_threadpool(comparison, *both)
        return HTMLResponse(_page("compare.html", title="Two runs", **found))

    async def plan(request: Request) -> Response:
        asked = await _run(request)
        if int(request.headers.get("content-length") or MOST_BYTES + 1) > MOST_BYTES:
            raise HTTPException(413, "the question is too long")
        body = await request.body()
        page, turn = (request.query_params.get(name, "0") for name in ("page", "turn"))
        if not re.fullmatch("[0-9]{1,9}", turn):
            raise HTTPException(400, f"turn={turn} is no number")
        answer = await (await keepers.of(asked.path)).ask(page, int(turn), body.decode(errors="replace"))
        return Response(answer, 200 if answer else 204, media_type="application/json")

    async def _run(request: Request, name: str | None = None) -> RunFiles:
        """A run by its name. Only what is found below the folder has one."""
        name = request.query_params.get("run", "") if name is None else name
        found = (await run_in_threadpool(found_runs, folder)).get(name)
        if found is None:
            raise HTTPException(404, f"the folder has no run {name}")
        return found

    routes = [
        Route("/", runs),
        Route("/run", run),
        Route("/report", report),
        Route("/compare", compare),
        Route("/plan", plan, methods=["POST"]),
    ]
    handlers: Any = {HTTPException: _wrong, GppError: _wrong}
    guard = Middleware(Guard, hosts=hosts, key=key)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=life)


def _page(template: str, *, scripts: Sequence[str] = (), **values: Any) -> str:
    return render(template, scripts=scripts, beside=TEMPLATES, **values)


def _run_page(run: RunFiles, page: dict[str, Any]) -> str:
    """The page of a run with a planner behind it; without one, why."""
    result, reason = run.result, page.get("reason", "")
    return _page(
        "live.html",
        scripts=("live", "settings") if not reason else (),
        title=f"{run.name} · gpp",
        model=result.get("model") or run.name,
        status="under way" if run.under_way else result["status"],
        facts=[("run", run.name), *((name, result.get(name)) for name in ("strategy", "cluster", "engine") if result.get(name))],
        reason=reason or ("" if run.under_way else result.get("reason")) or "",
        warnings=(),
        command=run.identity.command,
        files=(),
        report=run.link("report") if run.has_report else "",
        live=not reason,
        rules=page.get("rules"),
        controls=[Control(**each) for each in page.get("controls", ())],
        exporters=page.get("exporters", ()),
        data=squeeze(json.dumps(page, separators=(",", ":")).encode()),
    )


async def _wrong(_: Request, error: Exception) -> Response:
    """A page that says what is wrong with a request."""
    status = error.status_code if isinstance(error, HTTPException) else 422
    words = error.detail if isinstance(error, HTTPException) else str(error)
    return HTMLResponse(_page("wrong.html", title="gpp", words=words), status)
