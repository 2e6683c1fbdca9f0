// What a canvas shows: rows of events, rows of bytes, and the axis of time. All of it is drawn from the visible window alone.

const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Roboto, sans-serif";
const AXIS = 24, FOOT = 3, COPY = 3;
const CROWD = 4; // slices of one pixel that are drawn; the others would only cover them

// Pixels of a panel: `left` and `right` margins, `row` height and `pitch`, and the seconds <-> pixels of a viewport.
function geometry(canvas, panel, view) {
  const width = canvas.clientWidth, narrow = width < 600, rows = panel.rows.length;
  const row = panel.levels ? 34 : rows <= 16 ? 22 : rows <= 40 ? 16 : 11;
  // Margins are those of all panels together, so that an instant stands above itself.
  const left = Math.min(Math.max(48, 7.1 * panel.longest + 20), width * 0.3);
  const right = panel.withMemory ? (narrow ? 74 : 124) : narrow ? 8 : 56;
  const pitch = row + (panel.levels ? 8 : 4) + (panel.copies ? 2 * COPY + 2 : 0);
  const inner = Math.max(40, width - left - right);
  const scale = inner / (view.to - view.from);
  return {
    width, narrow, left, right, row, pitch, inner, scale, height: rows * pitch + AXIS,
    x: (seconds) => left + (seconds - view.from) * scale,
    seconds: (x) => view.from + (x - left) / scale,
    rowAt: (y) => Math.floor(y / pitch),
  };
}

function writer(context, labels) {
  return (words, x, y, { size = 11, fill = "ink", align = "left" } = {}) => {
    context.font = `${size}px ${FONT}`;
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillStyle = token(fill);
    context.fillText(words, x, y);
    const width = context.measureText(words).width;
    labels.push({ words, x: x - { left: 0, center: width / 2, right: width }[align], y: y - size / 2, width, height: size });
  };
}

// Words and what stands behind them, in so many pixels; the end of the words gives way.
function fitted(context, words, room, behind = "") {
  if (context.measureText(words + behind).width <= room) return words + behind;
  let end = words.length - 1;
  while (end > 1 && context.measureText(`${words.slice(0, end)}…${behind}`).width > room) end--;
  return `${words.slice(0, end)}…${behind}`;
}

// Names of the rows and what is at their right ends.
function paintFrame(context, panel, place, write) {
  panel.rows.forEach((row, n) => {
    const y = n * place.pitch, middle = y + place.row / 2, size = Math.min(11, place.row - 1);
    context.fillStyle = token("idle");
    context.fillRect(place.left, y, place.inner, place.row);
    context.font = `${size}px ${FONT}`;
    write(fitted(context, `s${row.stages.join("+")}`, place.left - 18, ` d${row.device}`), place.left - 14, middle, { size, align: "right" });
    context.fillStyle = token(`${panel.toneOf(row.stages[0]).tone}-strong`);
    context.fillRect(place.left - 9, y, 5, place.row);
    const words = place.narrow ? (row.short ?? "") : row.words;
    if (words) write(fitted(context, words, place.right - 10), place.left + place.inner + 8, middle, { size });
  });
}

function paintAxis(context, view, place, write) {
  const y = place.height - AXIS + 2;
  const unit = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([factor]) => view.to - view.from >= factor) ?? [1e-9, "ns"];
  const { marks, step } = ticks(view.from / unit[0], view.to / unit[0], Math.max(2, place.inner / 90));
  context.fillStyle = token("rule");
  context.fillRect(place.left, y, place.inner, 1);
  let free = -Infinity;
  marks.forEach((mark, n) => {
    const x = place.x(mark * unit[0]);
    const words = tickLabel(mark, step) + (n === marks.length - 1 ? ` ${unit[1]}` : "");
    const half = context.measureText(words).width / 2;
    context.fillStyle = token("muted");
    context.fillRect(x, y, 1, 4);
    const at = Math.min(x, place.width - half - 2);
    if (at - half < free) return;
    write(words, at, y + 12, { size: 10.5, fill: "muted", align: "center" });
    free = at + half + 6;
  });
}

// Where a shade stands in its row: forwards leave the top free, gradients of weights the foot. Shape says what colour says.
function insets(fill, height) {
  const step = Math.round(height * 0.2);
  return { soft: [step, 0], mid: [0, step] }[fill] ?? [0, 0];
}

function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 7;
  const pen = tile.getContext("2d");
  pen.strokeStyle = token("hatch");
  pen.globalAlpha = 0.45;
  pen.lineWidth = 1.6;
  pen.stroke(new Path2D("M0 7L7 0M-1 1L1 -1M6 8L8 6"));
  return context.createPattern(tile, "repeat");
}

function paintEvents(context, panel, view, place, lit, write) {
  const pattern = hatch(context);
  const tracks = { out: place.row + 2, in: place.row + 2 + COPY };
  panel.events.forEach((row, n) => {
    const top = n * place.pitch, several = panel.rows[n].stages.length > 1;
    const crowd = { pixel: -1, count: 0 };
    for (let i = row.firstAt(view.from); i < row.count && row.start[i] <= view.to; i++) {
      if (row.start[i] + row.length[i] < view.from) continue;
      const [stage, kind, size] = panel.table[row.code[i]], { track, fill, text } = panel.kinds[kind];
      const x = Math.max(place.left, place.x(row.start[i]));
      const end = Math.min(place.left + place.inner, place.x(row.start[i] + row.length[i]));
      const whole = end - x, wide = Math.max(0.5, whole > 4 ? whole - 0.7 : whole);
      context.globalAlpha = lit && !lit.includes(stage) ? 0.22 : 1;
      if (track !== "pass") {
        context.fillStyle = token(fill);
        context.fillRect(x, top + (tracks[track] ?? place.row), Math.max(0.6, whole), track === "message" ? FOOT - 1 : COPY);
        continue;
      }
      if (whole < 0.7) {
        crowd.count = Math.floor(x) === crowd.pixel ? crowd.count + 1 : 0;
        crowd.pixel = Math.floor(x);
        if (crowd.count >= CROWD) continue;
      }
      const { tone, hatched } = panel.toneOf(stage);
      const shade = ["soft", "mid", "strong"].includes(fill);
      const [above, below] = insets(fill, place.row);
      const box = [x, top + above, wide, place.row - above - below];
      context.fillStyle = token(shade ? `${tone}-${fill}` : fill);
      context.fillRect(...box);
      if (hatched && shade) {
        context.fillStyle = pattern;
        context.fillRect(...box);
      }
      if (wide > 9) {
        const size = Math.min(10.5, place.row - 4);
        context.font = `${size}px ${FONT}`;
        const batch = `${text}${row.microbatch[i]}`;
        const names = shade ? [...(several ? [`s${stage} ${batch}`] : []), batch, String(row.microbatch[i])] : [text];
        const words = names.find((each) => context.measureText(each).width <= wide - 4);
        const on = shade ? `on-${fill}` : fill === "reduce" ? "on-soft" : "on-mid";
        if (words) write(words, x + wide / 2, box[1] + box[3] / 2 + 0.5, { size, fill: on, align: "center" });
      }
    }
  });
  context.globalAlpha = 1;
}

// Three areas upon each other: what is held always, for micro-batches in flight, and while a pass runs.
function paintLevels(context, panel, view, place, lit) {
  const names = Object.keys(panel.fills);
  panel.levels.forEach((row, n) => {
    const { limit, most, stages } = panel.rows[n];
    const high = Math.max(most, panel.limitsInSight ? limit ?? 0 : panel.highest) || 1;
    const base = n * place.pitch + place.row;
    const columns = Math.ceil(place.inner);
    const peaks = names.map(() => new Float64Array(columns));
    for (let i = row.firstAt(view.from); i < row.count && row.start[i] <= view.to; i++) {
      const end = i + 1 < row.count ? row.start[i + 1] : view.span;
      const a = Math.max(0, Math.floor(place.x(row.start[i]) - place.left));
      const b = Math.min(columns - 1, Math.floor(place.x(end) - place.left));
      let sum = 0;
      panel.table[row.code[i]].forEach((amount, level) => {
        sum += amount;
        for (let x = a; x <= b; x++) peaks[level][x] = Math.max(peaks[level][x], sum);
      });
    }
    context.globalAlpha = lit && !stages.some((stage) => lit.includes(stage)) ? 0.22 : 1;
    for (let level = names.length - 1; level >= 0; level--) {
      context.fillStyle = token(panel.fills[names[level]]);
      for (let x = 0; x < columns; x++) {
        const tall = (peaks[level][x] / high) * place.row;
        if (tall > 0) context.fillRect(place.left + x, base - tall, 1, tall);
      }
    }
    if (limit && panel.limitsInSight) {
      context.strokeStyle = token("limit");
      context.lineWidth = 1.4;
      context.setLineDash([5, 3]);
      context.stroke(new Path2D(`M${place.left} ${base - (limit / high) * place.row}h${place.inner}`));
      context.setLineDash([]);
    }
  });
  context.globalAlpha = 1;
}
