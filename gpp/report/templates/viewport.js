// The stretch of time that drawings show: seconds from..to of a whole of `span` seconds. Several drawings may share one.

const DEEPEST = 1e5; // times that the whole can be enlarged

function makeViewport(span) {
  let from = 0, to = span;
  const watchers = [];
  const view = {
    span,
    get from() { return from; },
    get to() { return to; },
    get scale() { return span / (to - from); },
    watch: (changed) => watchers.push(changed),
    show(a, b) {
      const length = Math.min(span, Math.max(span / DEEPEST, b - a));
      const start = Math.min(Math.max(0, (a + b - length) / 2), span - length);
      if (start === from && start + length === to) return;
      from = start;
      to = start + length;
      watchers.forEach((changed) => changed());
    },
    // Enlarges `factor` times, with the instant `at` where it is.
    zoom(factor, at = (from + to) / 2) {
      view.show(at - (at - from) / factor, at + (to - at) / factor);
    },
    pan: (by) => view.show(from + by, to + by),
    reset: () => view.show(0, span),
    // Moves as little as needed for a..b to be seen.
    reveal(a, b) {
      if (a >= from && b <= to) return;
      const length = Math.max(to - from, Math.min(span, 1.2 * (b - a)));
      const start = a < from || b - a > length ? a - 0.1 * length : b - 0.9 * length;
      view.show(start, start + length);
    },
  };
  return view;
}
