// Pointing at an event or a level of a timeline, with a pointer or with keys: its words, its stage, its box.

// Where an entry {row, index} of a panel is on the canvas, cut to what is seen.
function boxOf(panel, { row, index }, place) {
  const entries = (panel.levels ?? panel.events)[row], start = entries.start[index];
  const end = panel.levels ? entries.start[index + 1] ?? start : start + entries.length[index];
  const x = Math.min(Math.max(place.left, place.x(start)), place.left + place.inner);
  const to = Math.min(Math.max(place.left, place.x(end)), place.left + place.inner);
  return { x, y: row * place.pitch, width: to - x, height: place.row };
}

// The entry at a pixel of the canvas; null between rows, beside the drawing, and where a device is idle.
function entryAt(panel, x, y, place) {
  const row = place.rowAt(y), inRow = y - row * place.pitch;
  if (row < 0 || row >= panel.rows.length || x < place.left || x > place.left + place.inner) return null;
  const at = place.seconds(x);
  if (panel.levels) {
    const index = panel.levels[row].after(at) - 1;
    return index < 0 ? null : { row, index };
  }
  const entries = panel.events[row], slack = 1.5 / place.scale;
  const wanted = inRow <= place.row - 1 ? ["pass"] : ["message", "out", "in"];
  let found = null;
  for (let i = entries.firstAt(at - slack); i < entries.count && entries.start[i] <= at + slack; i++) {
    const [, kind] = panel.table[entries.code[i]], end = entries.start[i] + entries.length[i];
    if (!wanted.includes(panel.kinds[kind].track) || end < at - slack) continue;
    const exact = entries.start[i] <= at && at < end;
    if (exact || found === null) found = { row, index: i };
    if (exact) break;
  }
  return found;
}

function wordsOf(panel, { row, index }) {
  const { device } = panel.rows[row];
  if (panel.levels) return levelWords(panel, row, index);
  const entries = panel.events[row], [stage, kind, size] = panel.table[entries.code[index]];
  const from = entries.start[index], length = entries.length[index], { names } = panel.toneOf(stage);
  return [
    `stage ${stage}: ${panel.kinds[kind].meaning}, micro-batch ${entries.microbatch[index]}, device ${device}`,
    `${seconds(length)}: from ${seconds(from)} to ${seconds(from + length)}`,
    ...(size ? [bytes(size)] : []),
    ...(names ? [names] : []),
  ].join("\n");
}

function levelWords(panel, row, index) {
  const { device, limit, stages } = panel.rows[row], entries = panel.levels[row];
  const amounts = panel.table[entries.code[index]], total = amounts.reduce((sum, each) => sum + each, 0);
  const share = limit ? `, ${((100 * total) / limit).toFixed(1)} % of ${bytes(limit)}` : "";
  const until = index + 1 < entries.count ? ` to ${seconds(entries.start[index + 1])}` : " on";
  return [
    `device ${device}, stage ${stages.join(", ")}: ${bytes(total)}${share}`,
    `from ${seconds(entries.start[index])}${until}`,
    ...Object.keys(panel.fills).map((name, n) => `${name}: ${bytes(amounts[n])}`),
  ].join("\n");
}

function stagesAt(panel, { row, index }) {
  return panel.levels ? panel.rows[row].stages : [panel.table[panel.events[row].code[index]][0]];
}

function addPointing(panel, view) {
  const { canvas } = panel;
  const point = (entry, aloud) => {
    panel.here = entry;
    if (!entry) {
      hideTip();
      panel.links.point(null);
    } else {
      if (aloud) {
        const entries = (panel.levels ?? panel.events)[entry.row], start = entries.start[entry.index];
        view.reveal(start, start + (entries.length?.[entry.index] ?? 0));
      }
      panel.links.point(stagesAt(panel, entry));
    }
    panel.draw();
    if (entry) showTip(wordsOf(panel, entry), () => onPage(panel, entry), aloud);
  };
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return entryAt(panel, event.clientX - box.left, event.clientY - box.top, panel.place);
  };
  canvas.addEventListener("pointermove", (event) => { if (!event.buttons) point(at(event), false); });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keyed(event, panel, view, point)) return;
    event.preventDefault();
    event.stopPropagation();
  });
  addGestures(canvas, view, {
    secondsAt: (x) => panel.place.seconds(x),
    perPixel: () => 1 / panel.place.scale,
    clicked(event) {
      const entry = at(event);
      panel.links.toggle(entry && stagesAt(panel, entry));
      point(entry, false);
    },
  });
}

function onPage(panel, entry) {
  const { left, top } = panel.canvas.getBoundingClientRect(), { x, y, width, height } = boxOf(panel, entry, panel.place);
  return { left: left + x, width, top: top + y, bottom: top + y + height };
}

// Carries a key out; false where it means nothing here.
function keyed(event, panel, view, point) {
  const quarter = (view.to - view.from) / 4, { key } = event;
  const zoom = { "+": 2, "=": 2, "-": 1 / 2, "−": 1 / 2 }[key];
  const side = { ArrowRight: 1, ArrowLeft: -1 }[key], row = { ArrowDown: 1, ArrowUp: -1 }[key];
  if (zoom) view.zoom(zoom);
  else if (key === "0") view.reset();
  else if (side && event.shiftKey) view.pan(side * quarter);
  else if (side || row) point(neighbour(panel, view, side ?? 0, row ?? 0), true);
  else if (key === "Enter" && panel.here) panel.links.toggle(stagesAt(panel, panel.here));
  else return false;
  return true;
}

// The entry beside the current one, in its row or in another; at first, the first one that is seen.
function neighbour(panel, view, side, rows) {
  const all = panel.levels ?? panel.events;
  if (!panel.here) {
    const row = all.findIndex((entries) => entries.count);
    return row < 0 ? null : { row, index: Math.min(all[row].count - 1, all[row].firstAt(view.from)) };
  }
  const { row, index } = panel.here;
  if (side) return { row, index: Math.min(all[row].count - 1, Math.max(0, index + side)) };
  let other = row + rows;
  while (all[other] && !all[other].count) other += rows;
  if (!all[other]) return panel.here;
  return { row: other, index: Math.max(0, all[other].after(all[row].start[index]) - 1) };
}
