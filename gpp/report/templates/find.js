// A search in the names of all operators: the stages that have them are marked in every drawing of the plan.

const FOUND_NAMES = 4; // that are listed

async function startFinding() {
  for (const box of document.querySelectorAll("[data-find]")) {
    const data = JSON.parse(box.parentElement.querySelector("[data-operators]").textContent);
    const stages = new TextDecoder().decode(await inflate(data.packed)).split("\n\n").map((own) => own.split("\n"));
    const input = box.querySelector("input"), output = box.querySelector("output");
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      const found = stages.map((own) => (wanted ? own.filter((name) => name.toLowerCase().includes(wanted)) : []));
      const having = found.map((own, stage) => (own.length ? stage : -1)).filter((stage) => stage >= 0);
      const names = found.flat(), listed = names.slice(0, FOUND_NAMES).join(", ");
      const more = names.length > FOUND_NAMES ? ` and ${names.length - FOUND_NAMES} more` : "";
      output.textContent = !wanted ? "" : names.length ? `${having.map((stage) => `s${stage}`).join(", ")}: ${listed}${more}` : "none";
      linksOf(box).choose(having.length ? having : null);
    });
  }
}
