// Wheel, drag and pinch on a canvas, as changes of a viewport.
//
// A wheel alone scrolls the page until the drawing has the focus; with Ctrl (which a pinch on a touchpad sends) it always
// zooms. One finger drags sideways and leaves scrolling to the page, two fingers pinch.

const STILL = 4; // pixels that a press may move and still be a click

// `secondsAt(x)`: the instant at a pixel of the canvas; `perPixel()`: seconds of one; `clicked(event)`: a press without a drag.
function addGestures(canvas, view, { secondsAt, perPixel, clicked }) {
  const down = new Map(); // pointers that are pressed: id -> last x
  let moved = 0, apart = 0;
  const xOf = (event) => event.clientX - canvas.getBoundingClientRect().left;

  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (sideways && view.scale > 1) {
      event.preventDefault();
      view.pan((event.deltaX || event.deltaY) * perPixel());
    } else if (!sideways && (event.ctrlKey || event.metaKey || document.activeElement === canvas)) {
      event.preventDefault();
      const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 24 : 1;
      view.zoom(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), secondsAt(xOf(event)));
    }
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    down.set(event.pointerId, xOf(event));
    moved = 0;
    apart = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!down.has(event.pointerId)) return;
    const x = xOf(event), before = down.get(event.pointerId);
    down.set(event.pointerId, x);
    if (down.size === 1) {
      moved += Math.abs(x - before);
      if (moved > STILL) view.pan((before - x) * perPixel());
    } else if (down.size === 2) {
      moved = STILL + 1;
      const [a, b] = [...down.values()], now = Math.max(8, Math.abs(a - b));
      if (apart) view.zoom(now / apart, secondsAt((a + b) / 2));
      apart = now;
    }
  });
  const up = (event) => {
    if (!down.delete(event.pointerId)) return;
    apart = 0;
    if (event.type === "pointerup" && moved <= STILL && !down.size) clicked(event);
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
}
