// The page of a run whose planner answers: the entries of settings.js come from the server, operators go over borders, and plans are
// taken along. It stands before settings.js.

gpp.page = Math.random().toString(36).slice(2); // which page asks: a question ends the one that it asked before
{
  const address = `plan?${new URLSearchParams({ run: new URLSearchParams(location.search).get("run"), page: gpp.page })}`;
  const at = (id) => document.getElementById(id);
  let asked = 0;
  let undo = []; // entries before the changes by hand

  // The answer to a question; null where another one was asked meanwhile.
  const ask = async (question) => {
    const mine = ++asked;
    try {
      const response = await fetch(`${address}&turn=${mine}`, { method: "POST", body: JSON.stringify(question) });
      if (mine !== asked || response.status === 204) return null;
      if (response.headers.get("content-type") === "application/json") return await response.json();
      throw new Error(`the server answers ${response.status}`);
    } catch (error) {
      return mine === asked ? { status: "failed", reason: `${error.message}. Is gpp ui still running?` } : null;
    }
  };

  let near; // the micro-batch size of the plan that is shown, by which a quick search is quick
  gpp.look = (data) => {
    near = data.near;
    return async (state, edited) => {
      if (edited?.entry) return edited.entry;
      const { before, ...question } = edited ?? {};
      const entry = await ask({ state, near, ...question });
      if (entry && !edited) undo = [];
      return entry;
    };
  };

  const moves = ({ entry }) => {
    const rows = new Map();
    for (const [op, from, to, name] of entry.moves) {
      if (!rows.has(from)) rows.set(from, []);
      const words = name.length > 40 ? `…${name.slice(-39)}` : name;
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: `${words} → s${to}`, title: name });
      button.addEventListener("click", () => edit(op, to));
      rows.get(from).push(button);
    }
    const table = document.createElement("table");
    for (const [stage, buttons] of rows) {
      const row = table.insertRow();
      row.dataset.stage = stage;
      row.insertCell().textContent = `s${stage}`;
      row.insertCell().append(...buttons);
    }
    at("moves").replaceChildren(rows.size ? table : paragraph("No operator of this plan can go to a stage beside its own.", "sub"));
    at("back").disabled = !undo.length;
  };

  const edit = async (op, to) => {
    const { now, go } = await gpp.planned;
    undo.push(now.entry);
    await go(now.state, { plan: now.entry.json, move: [op, to] });
    if (now.entry === (await gpp.planned).now.entry) undo.pop(); // another question came between
  };

  // Where a drag goes: the stage beside this one in whose direction the pointer is, and how many operators go along: as great a share
  // of those that the stage can spare as the pointer has made of the way between the middles of the two.
  gpp.dragged = (entry, middles, from, by) => {
    const own = middles.get(from), most = entry.operators[from] - 1;
    const found = { share: 0 };
    for (const to of new Set(entry.moves.filter(([, source]) => source === from).map(([, , to]) => to))) {
      const other = middles.get(to), x = other.x - own.x, y = other.y - own.y;
      const share = (by.x * x + by.y * y) / (x * x + y * y);
      if (share > found.share) Object.assign(found, { share, to });
    }
    const count = Math.round(Math.min(found.share, 1) * most);
    return count ? [from, found.to, count] : null;
  };

  // Why a drag that has gone some way takes nothing along.
  const refusal = (entry, from) => {
    if (entry.operators[from] === 1) return `s${from} has one operator, and a stage must keep one.`;
    const ways = [...new Set(entry.moves.filter(([, source]) => source === from).map(([, , to]) => `s${to}`))];
    if (ways.length) return `Operators of s${from} can go to ${ways.join(" or ")}: drag it there.`;
    return `No operator of s${from} can go to a stage beside it: one that reads it would come before it, or one that it reads after it.`;
  };
  const SOME_WAY = 24; // pixels: less may be a click

  // A stage that is dragged in the drawing. What it began from is kept: after each answer the drawing is another one.
  const drawing = at("drawing");
  let drag = null;

  const follow = async (mine) => {
    const page = await gpp.planned, { entry, state } = mine.base;
    if (mine.busy) return;
    mine.busy = true;
    const done = () => String(mine.wanted) === String(mine.shown);
    while (!done() || (mine.dropped && mine.shown && page.now.entry.status !== "ok")) {
      if (done()) { // it was let go where the plan cannot run
        mine.wanted = null;
        mine.refused = page.now.entry.reason;
      }
      const shift = (mine.shown = mine.wanted);
      await page.go(state, shift ? { plan: entry.json, shift, before: mine.base } : { entry: { ...entry, more: false } });
    }
    mine.busy = false;
    if (!mine.dropped || mine.ended) return;
    mine.ended = true;
    if (mine.refused) at("refused").textContent = `Taken back: ${mine.refused}`;
    if (mine.shown) undo.push(entry);
    at("back").disabled = !undo.length;
  };

  const drop = (keep) => {
    if (!drag) return;
    const mine = drag;
    drag = null;
    mine.dropped = true;
    if (!keep) mine.wanted = null;
    follow(mine);
  };

  drawing.addEventListener("pointerdown", async (event) => {
    const number = (each) => (/^\d+$/.test(each?.dataset.stage ?? "") ? Number(each.dataset.stage) : null);
    const from = number(event.target.closest("[data-stage]"));
    if (event.button || from === null) return;
    event.preventDefault(); // of a selection of text
    at("refused").textContent = "";
    const middles = new Map();
    for (const each of drawing.querySelectorAll("[data-stage]")) {
      const box = each.getBoundingClientRect();
      if (number(each) !== null) middles.set(number(each), { x: box.x + box.width / 2, y: box.y + box.height / 2 });
    }
    document.documentElement.setPointerCapture(event.pointerId); // what was grabbed is drawn anew meanwhile
    drag = { from, x: event.clientX, y: event.clientY, middles, base: (await gpp.planned).now, wanted: null, shown: null };
  });

  document.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const by = { x: event.clientX - drag.x, y: event.clientY - drag.y };
    drag.wanted = gpp.dragged(drag.base.entry, drag.middles, drag.from, by);
    at("refused").textContent = drag.wanted || Math.hypot(by.x, by.y) < SOME_WAY ? "" : refusal(drag.base.entry, drag.from);
    follow(drag);
  });
  document.addEventListener("pointerup", () => drop(true));
  document.addEventListener("pointercancel", () => drop(false));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") drop(false); });

  // Shows what belongs to a plan, and has a search that was quick go on.
  gpp.shown = (now, refine) => {
    at("exported").replaceChildren();
    if (now.entry.status === "ok") {
      near = now.entry.size;
      document.querySelectorAll("#found .key").forEach((key, n) => { key.innerHTML = now.entry.legends[n]; });
      moves(now);
    }
    if (now.entry.more) ask({ state: now.state, whole: true }).then((entry) => entry && refine(entry));
  };

  at("back").addEventListener("click", async () => {
    const { now, go } = await gpp.planned, entry = undo.pop();
    go(now.state, undo.length || entry.change ? { entry: { ...entry, more: false } } : { entry: { ...entry, more: false, change: undefined } });
  });

  at("save").addEventListener("click", async () => {
    const { now } = await gpp.planned;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([now.entry.json], { type: "application/json" }));
    link.download = "plan.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  for (const button of document.querySelectorAll("[data-export]")) {
    button.addEventListener("click", async () => {
      const { now } = await gpp.planned;
      at("exported").replaceChildren(paragraph("Writing ...", "sub"));
      const found = await ask({ state: now.state, plan: now.entry.json, export: button.dataset.export, nearest: at("nearest").checked });
      if (!found) return;
      const page = Object.assign(document.createElement("pre"), { textContent: found.page ?? found.reason });
      const said = found.folder ? [paragraph(`Written to ${found.folder}. It is started there with: ${found.command}`)] : [];
      at("exported").replaceChildren(...said, page);
    });
  }
}
