// Amounts as short text, as gpp/report/draw/text.py writes them: three significant digits and a unit.

function significant(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(digits)))));
  const decimals = Math.min(9, Math.max(0, digits - 1 - power));
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function inUnits(value, units, least) {
  const found = units.find(([factor]) => Math.abs(value) >= factor);
  return found ? `${significant(value / found[0])} ${found[1]}` : least(value);
}

function seconds(value) {
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
  return inUnits(value, units, (rest) => (rest === 0 ? "0 ms" : `${significant(rest / 1e-9)} ns`));
}

function bytes(value) {
  const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  return inUnits(value, units, (rest) => `${Math.round(rest)} B`);
}

// Round numbers (1, 2 or 5 times a power of ten apart) from low to high, about `count` of them, and their distance.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return { marks: [low], step: 1 };
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= raw * 0.999);
  const marks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) marks.push(i * step + 0); // + 0: no -0
  return { marks, step };
}

function tickLabel(value, step) {
  const decimals = Math.min(9, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}
