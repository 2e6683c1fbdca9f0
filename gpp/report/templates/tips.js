// Numbers on hovering and by keyboard: one box near what it is about, and a live region that says it to screen readers.
//
// Drawings are written with SVG's <title>, which is all that a reader without scripts needs. Here each title becomes the
// box's text, and each drawing one stop of the Tab key, inside which the arrow keys walk from shape to shape.

let tipBox = null, spoken = null;
let tipAnchor = null; // () => box of what the tip is about, in the window

function showTip(words, anchor, aloud = false) {
  tipBox.textContent = words;
  tipBox.hidden = false;
  tipAnchor = anchor;
  placeTip();
  if (aloud) spoken.textContent = words;
}

function placeTip() {
  if (tipBox.hidden) return;
  const box = tipAnchor(), width = tipBox.offsetWidth, height = tipBox.offsetHeight;
  const room = { width: document.documentElement.clientWidth, height: window.innerHeight };
  const left = Math.min(Math.max(4, box.left + box.width / 2 - width / 2), room.width - width - 4);
  const below = box.bottom + 8;
  const top = below + height < room.height ? below : Math.max(4, box.top - height - 8);
  tipBox.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

function hideTip() {
  tipBox.hidden = true;
}

function startTips() {
  tipBox = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
  tipBox.setAttribute("role", "tooltip");
  spoken = document.body.appendChild(Object.assign(document.createElement("div"), { className: "aloud" }));
  spoken.setAttribute("aria-live", "polite");
  document.querySelectorAll("svg").forEach(adoptTitles);
  const at = (event) => event.target.closest?.("[data-tip]");
  for (const on of ["pointerover", "focusin"]) {
    document.addEventListener(on, (event) => {
      const element = at(event);
      if (element) showTip(element.dataset.tip, () => element.getBoundingClientRect());
    });
  }
  for (const off of ["pointerout", "focusout"]) {
    document.addEventListener(off, (event) => { if (at(event)) hideTip(); });
  }
  document.addEventListener("scroll", placeTip, { passive: true, capture: true });
}

// Titles of a drawing's shapes as tips; the first shape can be reached with Tab, the others from it with arrows.
function adoptTitles(svg) {
  const marks = [];
  for (const title of svg.querySelectorAll("title")) {
    const shape = title.parentElement;
    shape.dataset.tip = title.textContent;
    shape.setAttribute("aria-label", title.textContent);
    if (!shape.hasAttribute("role")) shape.setAttribute("role", "img");
    title.remove();
    marks.push(shape);
  }
  if (!marks.length) return;
  svg.setAttribute("role", "group");
  marks.forEach((shape, n) => shape.setAttribute("tabindex", n ? "-1" : "0"));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const here = marks.indexOf(event.target);
    if (!step || here < 0) return;
    event.preventDefault();
    const next = marks[Math.min(marks.length - 1, Math.max(0, here + step))];
    marks.forEach((shape) => shape.setAttribute("tabindex", shape === next ? "0" : "-1"));
    next.focus();
  });
}
