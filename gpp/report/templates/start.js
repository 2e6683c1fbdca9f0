// Brings a page to life.

startTheme();
startTips();
startLinks();
startTables();
startFinding();

const gpp = (window.gpp = { timeline, viewport: makeViewport, linksOf, timelines: [] });
const together = new Map(); // timelines of one page on one scale zoom together
for (const element of document.querySelectorAll("[data-timeline]")) {
  const data = JSON.parse(element.querySelector("script").textContent);
  if (!together.has(data.span_s)) together.set(data.span_s, makeViewport(data.span_s));
  gpp.timelines.push(timeline(element, data, { viewport: together.get(data.span_s) }));
}
gpp.ready = Promise.all(gpp.timelines.map(({ ready }) => ready));
