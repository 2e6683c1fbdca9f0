"use strict";
(() => {
  const data = JSON.parse(document.getElementById("explored").textContent);
  const controls = data.controls;
  const form = document.getElementById("controls");
  const at = (id) => document.getElementById(id);
  let now = null;
  let before = null;

  // The number of an entry: controls count as digits, the last one fastest.
  const entryAt = (state) => data.entries[data.points[state.reduce((sum, digit, i) => sum * controls[i].values.length + digit, 0)]];

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

  const SVG = "http://www.w3.org/2000/svg";
  const shape = (tag, attributes, words) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (words !== undefined) made.textContent = words;
    return made;
  };

  // Timelines under each other on one scale, a row a device.
  const draw = (place, named) => {
    const [left, pitch, width] = [64, 24, Math.max(320, place.clientWidth)];
    const scale = (width - left - 8) / Math.max(...named.map(([, entry]) => data.timelines[entry.timeline].length_s));
    for (const [heading, entry] of named) {
      const [line, plan] = [data.timelines[entry.timeline], data.plans[entry.plan]];
      const unit = (line.length_s * scale) / data.ticks;
      const svg = shape("svg", { width, height: 24 + pitch * plan.devices.length, role: "img", "aria-label": `${heading}: a step of ${entry.step}` });
      svg.append(shape("text", { x: 0, y: 14, "font-weight": 600, fill: "currentColor" }, `${heading}: ${entry.step}, bubble ${entry.idle}`));
      plan.devices.forEach(([device, stages], row) => {
        const y = 22 + row * pitch;
        svg.append(shape("text", { x: 0, y: y + 15, "font-size": 11, fill: "currentColor" }, `s${stages.join("+")} d${device}`));
        svg.append(shape("rect", { x: left, y, width: line.length_s * scale, height: 20, fill: data.tones.idle }));
        let x = 0;
        const events = line.rows[device] || [];
        for (let i = 0; i < events.length; i += 3) {
          const [kind, stage, ticks] = line.shapes[events[i]];
          x += events[i + 2];
          const look = data.kinds[kind];
          const fill = look.tone === null ? look.fill : plan.tones[stage][look.tone];
          const wide = Math.max(0.4, ticks * unit - 0.5);
          const box = look.beside ? { y: y + 20, height: 2 } : { y, height: 20 };
          const made = shape("rect", { x: left + x * unit, width: wide, fill, ...box });
          made.append(shape("title", {}, `stage ${stage}, device ${device}: ${look.meaning} ${events[i + 1]}`));
          svg.append(made);
          const number = String(events[i + 1]);
          if (!look.beside && wide > 7 * number.length + 2) {
            const ink = look.tone === 2 ? "#ffffff" : "#1f2937";
            svg.append(shape("text", { x: left + x * unit + wide / 2, y: y + 14, "font-size": 10.5, "text-anchor": "middle", fill: ink }, number));
          }
        }
      });
      place.append(svg);
    }
  };

  // What has changed, and what came of it, in sentences.
  const sentences = (state, entry) => {
    const changes = before
      ? controls.flatMap((c, i) => (state[i] === before.state[i] ? [] : [`${c.short[state[i]]} in place of ${c.short[before.state[i]]}`]))
      : [];
    const lead = changes.length ? `With ${changes.join(", ")}` : "With these settings";
    if (entry.status !== "ok") {
      return [`${lead} there is no plan: ${entry.reason}`, fitting(state)].filter(Boolean);
    }
    const old = before && changes.length && before.entry.status === "ok" ? before.entry : null;
    if (!old) {
      const again = changes.length ? "there is a plan again, and " : "";
      return [`${lead} ${again}a step takes ${entry.step}, its devices are idle for ${entry.idle} of it, and the fullest one holds ${entry.peak}.`];
    }
    const ratio = old.step_s / entry.step_s;
    const said = [`${lead}`];
    if (old.step === entry.step) said[0] += ` a step takes as long as before, ${entry.step}.`;
    else if (ratio > 1) said[0] += ` a step takes ${entry.step}, ${factor(ratio)} times as fast as before (${old.step}).`;
    else said[0] += ` a step takes ${entry.step}, ${factor(1 / ratio)} times as long as before (${old.step}).`;
    const idle = old.idle === entry.idle ? "as before" : `${entry.bubble > old.bubble ? "up" : "down"} from ${old.idle}`;
    const peak = old.peak === entry.peak ? "as before" : `${entry.peak_bytes > old.peak_bytes ? "up" : "down"} from ${old.peak}`;
    said.push(`Its devices are idle for ${entry.idle} of it, ${idle}, and the fullest one holds ${entry.peak}, ${peak}.`);
    const [plan, was] = [data.plans[entry.plan], data.plans[old.plan]];
    if (entry.plan === old.plan) said.push("The plan is the same.");
    else if (plan.stages !== was.stages) said.push(`The plan has ${plan.stages} ${plan.stages === 1 ? "stage" : "stages"} in place of ${was.stages}.`);
    else said.push("The plan is another one.");
    return said;
  };

  // The first value of the memory limit with which there is a plan; the limits are ascending.
  const fitting = (state) => {
    const memory = controls.findIndex((control) => control.key === "memory");
    const enough = controls[memory].values.findIndex((_, digit) => entryAt(state.map((own, i) => (i === memory ? digit : own))).status === "ok");
    return enough < 0 ? "None of the memory limits here is enough." : `Of the memory limits here, ${controls[memory].short[enough]} is enough.`;
  };

  const element = (tag, words, name) => {
    const made = document.createElement(tag);
    made.textContent = words;
    if (name) made.className = name;
    return made;
  };

  const figures = (entry) => {
    const old = before && before.entry.status === "ok" ? before.entry : null;
    const plan = data.plans[entry.plan];
    const rows = [
      ["Predicted step", entry.step, old && old.step],
      ["Bubble", entry.idle, old && old.idle],
      ["Peak memory of a device", entry.peak, old && old.peak],
      ["Stages, depth", `${plan.stages}, ${plan.depth}`, old && `${data.plans[old.plan].stages}, ${data.plans[old.plan].depth}`],
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

  const show = () => {
    const { state, entry } = now;
    const ok = entry.status === "ok";
    at("changed").textContent = sentences(state, entry).join(" ");
    at("changed").classList.toggle("none", !ok);
    at("plan").hidden = !ok;
    for (const id of ["figures", "timelines", "drawing", "words"]) at(id).replaceChildren();
    if (!ok) return;
    at("figures").append(...figures(entry));
    const beside = at("beside").checked && before && before.entry.status === "ok" && before.entry !== entry ? [["Before", before.entry]] : [];
    draw(at("timelines"), [["Now", entry], ...beside]);
    at("drawing").innerHTML = data.plans[entry.plan].drawing;
    at("words").append(...data.plans[entry.plan].words.map((words) => element("li", words)));
  };

  const go = (state) => {
    history.replaceState(null, "", address(state));
    if (now && state.every((digit, i) => digit === now.state[i])) return;
    before = now;
    now = { state, entry: entryAt(state) };
    setInputs(state);
    show();
  };

  form.addEventListener("input", (event) => (event.target.id === "beside" ? show() : go(readInputs())));
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", () => go(named(now.state)));
  window.addEventListener("resize", () => now && show());
  at("fastest").addEventListener("click", () => {
    const fixed = ["devices", "memory"];
    let best = null;
    const visit = (state) => {
      const i = state.length;
      if (i === controls.length) {
        const entry = entryAt(state);
        if (entry.status === "ok" && (!best || entry.step_s < best.entry.step_s)) best = { state, entry };
        return;
      }
      const digits = fixed.includes(controls[i].key) ? [now.state[i]] : controls[i].values.keys();
      for (const digit of digits) visit([...state, digit]);
    };
    visit([]);
    if (best) go(best.state);
  });

  go(named(data.start));
})();
