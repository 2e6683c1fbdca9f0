// Timelines that can be zoomed: data in, drawing out.
//
//   const view = gpp.timeline(element, data, { viewport })
//
// element   becomes the drawing: its content is replaced. Links to other drawings are those of its plan (links.js).
// data      what `gpp.report.draw.packed.pack_timelines` makes, parsed from JSON:
//             tick_s, span_s   seconds of a tick, and of the whole width
//             rows             [{device, stages: [number]}]
//             stages           {number: {tone: "trunk" | "hue0".., hatched, names?: "modules in words"}}
//             kinds            [{text: "F", meaning: "forward", track: pass | message | out | in, fill}]
//             panels           [{name, words, bubbles: [text of each row], table: [[stage, kind, bytes]], packed}]
//             memory           null, or {name, words, fills, rows: [{device, stages, limit, most}], table, packed}
//             left_out         words on what is not in it, or ""
// viewport  (optional) a `gpp.viewport(span_s)` that several drawings share; they zoom together.
//
// The returned view has
//   ready       a promise: what is packed has been read, and the first drawing is there
//   viewport    the stretch of time shown: .show(from_s, to_s), .zoom(factor), .pan(seconds), .reset(), .from, .to, .scale
//   panels      [{name, canvas, labels, place}]: labels are the boxes of the words in the canvas, in its pixels
//   show(data)  draws other data in place of these (a new viewport, unless one was given)
//
// Colours are tokens of the style sheet, so that a page needs `tokens_css()` and style.css.

function timeline(element, data, { viewport = null } = {}) {
  const result = { panels: [], viewport: null, ready: null };
  let build = 0;
  result.show = (newData) => {
    const mine = ++build;
    const view = (result.viewport = viewport ?? makeViewport(newData.span_s));
    result.ready = readPanels(newData).then((panels) => {
      if (mine !== build) return; // other data came meanwhile
      element.replaceChildren(toolbar(view), ...panels.map((panel) => panelElement(panel, element, view)));
      if (newData.left_out) element.append(paragraph(newData.left_out, "sub"));
      result.panels = panels;
      panels.forEach((panel) => panel.draw());
    });
    return result.ready;
  };
  result.show(data).catch((error) => {
    element.replaceChildren(paragraph(`This browser cannot draw the timelines (${error.message}); trace.json has them.`, "note"));
  });
  return result;
}

function paragraph(words, look) {
  return Object.assign(document.createElement("p"), { textContent: words, className: look });
}

// Columns as they are drawn: seconds, and a search for the first entry that a window shows.
function inSeconds(row, tick) {
  const start = row.start.map((at) => at * tick), length = row.length?.map((ticks) => ticks * tick);
  const longest = length ? length.reduce((most, each) => Math.max(most, each), 0) : 0;
  const after = (seconds) => { // the first entry that starts later
    let low = 0, high = row.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] > seconds) high = middle;
      else low = middle + 1;
    }
    return low;
  };
  return { ...row, start, length, after, firstAt: (seconds) => Math.max(0, after(seconds - longest) - 1) };
}

async function readPanels(data) {
  const rowName = ({ device, stages }) => `s${stages.join("+")} d${device}`;
  const toneOf = (stage) => data.stages[stage] ?? { tone: "trunk", hatched: false };
  const panels = await Promise.all(data.panels.map(async (panel) => {
    const rows = data.rows.map((row, n) => ({ ...row, name: rowName(row), words: panel.bubbles[n] }));
    const events = (await unpackEvents(panel, rows.length)).map((row) => inSeconds(row, data.tick_s));
    const copies = data.kinds.some(({ track }) => track === "out" || track === "in");
    return { ...panel, kinds: data.kinds, rows, events, toneOf, copies, labels: [] };
  }));
  if (data.memory) {
    const levels = (await unpackLevels(data.memory)).map((row) => inSeconds(row, data.tick_s));
    const ofLimit = (row) => (row.limit ? row.most / row.limit : 0);
    // A limit of more than four times what is held is out of sight: it would flatten the drawing.
    const limitsInSight = data.memory.rows.some((row) => ofLimit(row) > 0.25);
    const rows = data.memory.rows.map((row) => {
      const share = row.limit ? `${(100 * ofLimit(row)).toFixed(1)} %` : "";
      const words = !row.limit ? bytes(row.most) : limitsInSight ? `${bytes(row.most)}, ${share}` : `${bytes(row.most)} of ${bytes(row.limit)}`;
      return { ...row, name: rowName(row), words, short: bytes(row.most) };
    });
    const highest = Math.max(...rows.map(({ most }) => most));
    panels.push({ ...data.memory, rows, levels, toneOf, limitsInSight, highest, labels: [] });
  }
  const longest = Math.max(0, ...panels.flatMap(({ rows }) => rows.map(({ name }) => name.length)));
  for (const panel of panels) Object.assign(panel, { longest, withMemory: Boolean(data.memory) });
  return panels;
}

const HINT = "Drag to move; Ctrl + wheel or pinch to zoom (the wheel alone after a click). Click a block to mark its stage "
  + "everywhere. Keys: + − zoom, arrows go from block to block, Shift + arrows move, 0 shows the whole.";

function toolbar(view) {
  const bar = document.createElement("div");
  bar.className = "zoom";
  bar.setAttribute("role", "toolbar");
  bar.setAttribute("aria-label", "Stretch of time that is shown");
  const button = (words, name, act) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: words, title: name });
    made.setAttribute("aria-label", name);
    made.addEventListener("click", act);
    return made;
  };
  const shown = document.createElement("output");
  const show = () => {
    shown.textContent = `${seconds(view.from)} to ${seconds(view.to)} of ${seconds(view.span)}, ${significant(view.scale, 2)}×`;
  };
  view.watch(show);
  show();
  bar.append(
    button("+", "Zoom in", () => view.zoom(2)),
    button("−", "Zoom out", () => view.zoom(1 / 2)),
    button("◀", "Earlier", () => view.pan((view.from - view.to) / 4)),
    button("▶", "Later", () => view.pan((view.to - view.from) / 4)),
    button("Reset", "Show the whole time", () => view.reset()),
    shown,
  );
  bar.append(paragraph(HINT, "hint"));
  return bar;
}

function panelElement(panel, element, view) {
  const section = document.createElement("div");
  section.className = "panel";
  const heading = document.createElement("p");
  heading.append(Object.assign(document.createElement("b"), { textContent: panel.name }), panel.words ? `: ${panel.words}` : "");
  const canvas = (panel.canvas = document.createElement("canvas"));
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "timeline");
  canvas.setAttribute("aria-label", `${panel.name}${panel.words ? `: ${panel.words}` : ""}. ${HINT}`);
  heading.append(Object.assign(document.createElement("span"), { className: "right", textContent: panel.levels ? "" : "idle" }));
  section.append(heading, canvas);
  panel.links = linksOf(element);
  panel.draw = () => drawPanel(panel, view);
  addPointing(panel, view);
  view.watch(panel.draw);
  panel.links.watch(panel.draw);
  themeWatchers.push(panel.draw);
  new ResizeObserver(panel.draw).observe(canvas);
  return section;
}

function drawPanel(panel, view) {
  const { canvas } = panel;
  if (!canvas.clientWidth) return; // not on the page, or folded away
  const place = (panel.place = geometry(canvas, panel, view)), density = window.devicePixelRatio || 1;
  const size = [Math.round(place.width * density), Math.round(place.height * density)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.height = `${place.height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, place.width, place.height);
  panel.labels.length = 0;
  const write = writer(context, panel.labels);
  paintFrame(context, panel, place, write);
  if (panel.levels) paintLevels(context, panel, view, place, panel.links.lit);
  else paintEvents(context, panel, view, place, panel.links.lit, write);
  paintAxis(context, view, place, write);
  if (panel.here) paintCursor(context, panel, place);
}

function paintCursor(context, panel, place) {
  const box = boxOf(panel, panel.here, place);
  context.strokeStyle = token("focus");
  context.lineWidth = 2;
  context.strokeRect(box.x - 1, box.y - 1, Math.max(2, box.width) + 2, box.height + 2);
}
