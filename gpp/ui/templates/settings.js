// The settings of a run's page: the reader's choice in, words and drawings out. It stands behind the scripts of every page, whose
// `timeline`, `inflate` and `adoptTitles` it uses, and behind live.js: `gpp.look(data)` is a function that gives, for a state or a plan
// that was edited, a promise of the entry, or of null where the reader has asked anew meanwhile; `gpp.shown` hears what is shown.
// What is shown is compared with what was shown before it, or with `edited.before`.

async function settings() {
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(new TextDecoder().decode(await inflate(at("page-data").textContent)));
  const controls = data.controls;
  const form = at("controls");
  let now = null;
  let before = null;

  const look = gpp.look(data);

  // The state that the address names; a word that is none of a control's values leaves that control as it is.
  const named = (fallback) => {
    const words = new URLSearchParams(location.hash.slice(1));
    return controls.map((control, i) => {
      const found = control.values.indexOf(words.get(control.key));
      return found < 0 ? fallback[i] : found;
    });
  };

  const address = (state) => "#" + controls.map((c, i) => `${c.key}=${encodeURIComponent(c.values[state[i]])}`).join("&");

  const inputs = (control) => [...form.querySelectorAll(`[name="${control.key}"]`)];

  const setInputs = (state) =>
    controls.forEach((control, i) => {
      for (const input of inputs(control)) {
        if (input.type === "radio") {
          input.checked = Number(input.value) === state[i];
          input.closest("fieldset").querySelector("output").textContent = data.meanings[control.values[state[i]]] || "";
        } else {
          input.value = state[i];
          input.setAttribute("aria-valuetext", control.words[state[i]]);
          input.nextElementSibling.textContent = control.words[state[i]];
        }
      }
    });

  const readInputs = () =>
    controls.map((control) => {
      const all = inputs(control);
      return Number(all[0].type === "radio" ? all.find((input) => input.checked).value : all[0].value);
    });

  const factor = (ratio) => (ratio < 10 ? ratio.toFixed(2) : ratio.toFixed(0));

  // What has changed, and what came of it, in sentences.
  const sentences = (state, entry) => {
    const changes = before
      ? controls.flatMap((c, i) => (state[i] === before.state[i] ? [] : [`${c.new[state[i]]} in place of ${c.old[before.state[i]]}`]))
      : [];
    if (entry.change) changes.push(entry.change);
    const last = changes.pop();
    const lead = last ? `With ${changes.length ? `${changes.join(", ")} and ${last}` : last},` : "With these settings,";
    if (entry.status === "infeasible") return [`${lead} ${entry.reason}`];
    if (entry.status !== "ok") return [`${lead} planning fails: ${entry.reason}`];
    const searching = entry.more ? ["The search goes on for a faster plan."] : [];
    const old = before && last && before.entry.status === "ok" ? before.entry : null;
    if (!old) {
      const again = last ? "there is a plan again, and " : "";
      const step = `${lead} ${again}a ${entry.one} takes ${entry.step}, its devices are idle for ${entry.idle} of it, and the fullest one holds ${entry.peak}.`;
      return [step, ...searching];
    }
    const ratio = old.step_s / entry.step_s;
    const said = [`${lead}`];
    if (old.step === entry.step) said[0] += ` a ${entry.one} takes as long as before, ${entry.step}.`;
    else if (ratio > 1) said[0] += ` a ${entry.one} takes ${entry.step}, ${factor(ratio)} times as fast as before (${old.step}).`;
    else said[0] += ` a ${entry.one} takes ${entry.step}, ${factor(1 / ratio)} times as long as before (${old.step}).`;
    const idle = old.idle === entry.idle ? "as before" : `${entry.bubble > old.bubble ? "up" : "down"} from ${old.idle}`;
    const peak = old.peak === entry.peak ? "as before" : `${entry.peak_bytes > old.peak_bytes ? "up" : "down"} from ${old.peak}`;
    said.push(`Its devices are idle for ${entry.idle} of it, ${idle}, and the fullest one holds ${entry.peak}, ${peak}.`);
    const { plan } = entry, was = old.plan;
    if (plan.drawing === was.drawing) said.push("The plan is the same.");
    else if (plan.stages !== was.stages) said.push(`The plan has ${plan.stages} ${plan.stages === 1 ? "stage" : "stages"} in place of ${was.stages}.`);
    else said.push("The plan is another one.");
    return said.concat(searching);
  };

  const element = (tag, words, name) => {
    const made = document.createElement(tag);
    made.textContent = words;
    if (name) made.className = name;
    return made;
  };

  const figures = (entry) => {
    const old = before && before.entry.status === "ok" ? before.entry : null;
    const { plan } = entry;
    const rows = [
      [`Predicted ${entry.one}`, entry.step, old && old.step],
      ["Bubble", entry.idle, old && old.idle],
      ["Peak memory of a device", entry.peak, old && old.peak],
      ["Stages, depth", `${plan.stages}, ${plan.depth}`, old && `${old.plan.stages}, ${old.plan.depth}`],
    ];
    return rows.map(([name, value, was]) => {
      const card = element("div", "", "card");
      const list = document.createElement("dl");
      list.append(element("dt", "now"), element("dd", value, "big"));
      if (was) list.append(element("dt", "before"), element("dd", was));
      card.append(element("h3", name), list);
      return card;
    });
  };

  // One timeline in an element, or none; all have a scale in common.
  const drawings = {};
  const draw = (id, heading, entry, viewport) => {
    at(id).hidden = !entry;
    at(id).replaceChildren();
    if (!entry) return null;
    const packed = entry.timeline;
    drawings[id] = timeline(at(id), { ...packed, panels: [{ ...packed.panels[0], name: heading }] }, { viewport });
    return drawings[id].ready;
  };

  const show = () => {
    const { state, entry } = now;
    const ok = entry.status === "ok";
    at("changed").textContent = sentences(state, entry).join(" ");
    at("changed").classList.toggle("none", !ok);
    at("found").hidden = !ok;
    for (const id of ["figures", "now", "before", "drawing", "words"]) at(id).replaceChildren();
    if (!ok) return;
    at("figures").append(...figures(entry));
    const old = at("beside").checked && before && before.entry.status === "ok" && before.entry !== entry ? before.entry : null;
    const spans = [entry, old].filter(Boolean).map((each) => each.timeline.span_s);
    const viewport = makeViewport(Math.max(...spans));
    draw("now", "Now", entry, viewport);
    draw("before", "Before", old, viewport);
    at("drawing").innerHTML = entry.plan.drawing;
    at("drawing").querySelectorAll("svg").forEach(adoptTitles);
    at("words").append(...entry.plan.words.map((words) => element("li", words)));
  };

  // Shows the state that was asked for; live.js hears of it, and may put a better entry in place of a quick one.
  const shown = () => {
    const mine = now;
    show();
    gpp.shown(mine, (entry) => {
      if (mine !== now) return;
      now = { ...mine, entry: { ...entry, change: mine.entry.change } };
      shown();
    });
  };

  const go = async (state, edited = null) => {
    history.replaceState(null, "", address(state));
    if (now && !edited && !now.edited && state.every((digit, i) => digit === now.state[i])) return;
    setInputs(state);
    form.setAttribute("aria-busy", "true");
    const entry = await look(state, edited);
    if (!entry) return;
    form.removeAttribute("aria-busy");
    before = edited?.before ?? now;
    now = { state, entry, edited };
    shown();
  };

  form.addEventListener("input", (event) => (event.target.id === "beside" ? show() : go(readInputs())));
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", () => go(named(now.state)));

  await go(named(data.start));
  return { data, go, get now() { return now; } };
}

gpp.planned = settings();
