// One stage in several drawings: pointing at it in one, or choosing it, marks it in all others of the same plan.
//
// Elements name their stages in `data-stage` ("3", or "0 2" for an arrow or a device); a plan is an element with
// `data-plan`. `linksOf(element)` has the links of the plan that the element belongs to:
//   point(stages)   marks while the pointer or the focus is there; null ends it
//   choose(stages)  marks until something else is chosen; null ends it
//   toggle(stages)  the same, but ends it where they are chosen already
//   lit             the marked stages (an array), or null
//   watch(changed)  calls changed() after every change; canvases draw again then

const plansWithLinks = new WeakMap();

function linksOf(element) {
  const scope = element.closest("[data-plan]") ?? document.body;
  if (!plansWithLinks.has(scope)) plansWithLinks.set(scope, makeLinks(scope));
  return plansWithLinks.get(scope);
}

function stagesOf(element) {
  return element.dataset.stage.split(" ").filter(Boolean).map(Number);
}

function makeLinks(scope) {
  let pointed = null, chosen = null;
  const watchers = [];
  const same = (a, b) => a === b || (a && b && a.length === b.length && a.every((stage, n) => stage === b[n]));
  const links = {
    get lit() { return pointed ?? chosen; },
    get chosen() { return chosen; },
    watch: (changed) => watchers.push(changed),
    point(stages) {
      if (same(stages, pointed)) return;
      pointed = stages;
      show();
    },
    choose(stages) {
      chosen = stages;
      show();
    },
    toggle: (stages) => links.choose(same(stages, chosen) ? null : stages),
  };
  function show() {
    const lit = links.lit;
    scope.classList.toggle("linking", lit !== null);
    for (const element of scope.querySelectorAll("[data-stage]")) {
      element.classList.toggle("lit", lit !== null && stagesOf(element).some((stage) => lit.includes(stage)));
      if (element.hasAttribute("aria-pressed")) element.setAttribute("aria-pressed", String(same(stagesOf(element), chosen)));
    }
    watchers.forEach((changed) => changed());
  }
  return links;
}

function startLinks() {
  const stageAt = (event) => event.target.closest?.("[data-stage]");
  for (const [on, off] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
    document.addEventListener(on, (event) => {
      const element = stageAt(event);
      if (element) linksOf(element).point(stagesOf(element));
    });
    document.addEventListener(off, (event) => {
      const element = stageAt(event);
      if (element) linksOf(element).point(null);
    });
  }
  document.addEventListener("click", (event) => {
    const element = stageAt(event);
    if (element && !event.target.closest("a, summary")) linksOf(element).toggle(stagesOf(element));
  });
  document.addEventListener("keydown", (event) => {
    const element = stageAt(event);
    if (element?.hasAttribute("aria-pressed") && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      linksOf(element).toggle(stagesOf(element));
    }
    if (event.key === "Escape") {
      hideTip();
      for (const scope of document.querySelectorAll("[data-plan]")) linksOf(scope).choose(null);
    }
  });
}
