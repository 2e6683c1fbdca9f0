// What is wrong with the layout of the page: a list of sentences.
(() => {
  const wrong = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) wrong.push(`the page is ${document.documentElement.scrollWidth} px wide, the window ${width}`);
  const visible = (element) => element.checkVisibility?.() ?? true;
  const boxes = []; // of words, with the element that scrolls them
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.textContent.trim() || !visible(parent) || parent.closest("script, style, noscript, .tip, .aloud")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const { x, y, width: w, height } of range.getClientRects()) {
      const scroller = parent.closest(".scroll"), svg = parent.closest("svg");
      const size = parseFloat(getComputedStyle(parent).fontSize) * (svg ? svg.getBoundingClientRect().width / (svg.viewBox.baseVal?.width || 1) : 1);
      if (size < 7.7) wrong.push(`"${node.textContent.trim()}" is written in ${size.toFixed(1)} px`);
      if (!scroller && x + w > width + 0.5) wrong.push(`"${node.textContent.trim()}" ends at ${x + w} px of ${width}`);
      // An em box is taller than its letters: a quarter of it is free.
      boxes.push({ words: node.textContent.trim(), x, y: y + height * 0.2, width: w, height: height * 0.6 });
    }
  }
  for (const view of window.gpp?.timelines ?? []) for (const panel of view.panels) {
    const at = panel.canvas.getBoundingClientRect();
    for (const { words, x, y, width: w, height } of panel.labels) {
      if (x < -0.5 || x + w > at.width + 1 || y < -1 || y + height > at.height + 1) wrong.push(`"${words}" of ${panel.name} leaves its drawing`);
      boxes.push({ words, x: at.x + x, y: at.y + y + 1, width: w, height: height - 2 });
    }
  }
  boxes.sort((a, b) => a.y - b.y);
  for (let i = 0; i < boxes.length; i++) {
    for (let j = i + 1; j < boxes.length && boxes[j].y < boxes[i].y + boxes[i].height; j++) {
      const a = boxes[i], b = boxes[j];
      if (Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > 1.5 && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 1) {
        wrong.push(`"${a.words}" and "${b.words}" overlap near ${Math.round(a.x)}, ${Math.round(a.y)}`);
      }
    }
  }
  return wrong;
})()
