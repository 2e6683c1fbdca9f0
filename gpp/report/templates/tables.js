// Tables sorted by a column: a click on its heading, or Enter or Space there; once more turns the order round.

const UNITS = { s: 1, ms: 1e-3, "µs": 1e-6, ns: 1e-9, B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };

// A cell as a number with its unit, or as words; `data-sort` says it where the words do not.
function sortValue(cell) {
  const words = (cell.dataset.sort ?? cell.textContent).trim();
  const match = /^[a-z]{0,2}([+−-]?[\d,]+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-zµ]+)?/i.exec(words);
  if (match) return Number(match[1].replaceAll(",", "").replace("−", "-")) * (UNITS[match[2]] ?? 1);
  return words === "–" || words === "" ? null : words;
}

// Numbers first, then words, then what says nothing, whichever way the order is.
function compareValues(a, b, way) {
  const rank = (value) => (value === null ? 2 : typeof value === "string" ? 1 : 0);
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  if (a === null) return 0;
  return way * (typeof a === "string" ? a.localeCompare(b) : a - b);
}

function sortTable(table, column) {
  const heading = table.tHead.rows[0].cells[column];
  const way = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, value: sortValue(row.cells[column]) }));
  rows.sort((a, b) => compareValues(a.value, b.value, way));
  table.tBodies[0].append(...rows.map(({ row }) => row));
}

function startTables() {
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      if (!heading.textContent) return; // boxes to tick
      const button = Object.assign(document.createElement("button"), { type: "button", className: "sort" });
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => sortTable(table, column));
    });
  }
}
