// Light and dark: the reader's system decides until the button does; the choice is kept in this browser alone.

const themeWatchers = [];
const tokenCache = new Map();

// The colour of a token now, as the style sheet has it: drawings on a canvas have the colours of their legends.
function token(name) {
  if (!tokenCache.has(name)) tokenCache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return tokenCache.get(name);
}

function startTheme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.querySelector("[data-theme-button]");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const show = () => {
    tokenCache.clear();
    if (button) {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Show this page on a ${isDark() ? "light" : "dark"} ground`);
    }
    themeWatchers.forEach((changed) => changed());
  };
  try {
    const kept = localStorage.getItem("gpp-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* a browser that keeps nothing for files */ }
  button?.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("gpp-theme", root.dataset.theme); } catch { /* as above */ }
    show();
  });
  dark.addEventListener("change", show);
  show();
}
