// Corrections of labels: a control below each image, and a button that saves all choices as corrections.csv.
const bar = document.getElementById("corrections");
const [buttonTemplate, choiceTemplate] = ["mark", "choice"].map((id) => document.getElementById(id).content);
const tiles = [...document.querySelectorAll("[data-file]")];
const storageKey = `vitrail corrections ${bar.dataset.key}`;

// By file: the right label ("" leaves the image out, null is no correction) and the time of the choice. The latest
// choice counts. Browsers may refuse storage to a page on disk, or give each page its own, so links pass choices on.
const corrections = new Map();

function merge(text) {
  try {
    for (const [file, [label, time]] of JSON.parse(text) ?? []) {
      const isValid = (label === null || typeof label === "string") && Number.isFinite(time);
      if (isValid && time > (corrections.get(file)?.[1] ?? 0)) corrections.set(file, [label, time]);
    }
  } catch { /* not the text of these pages */ }
}

function readStorage() {
  try { merge(localStorage.getItem(storageKey)); } catch { /* storage is not available */ }
}

function choose(file, label) {
  corrections.set(file, [label, Date.now()]);
  writeStorage();
}

function writeStorage() {
  try { localStorage.setItem(storageKey, JSON.stringify([...corrections])); } catch { /* not available, or full */ }
}

const correctionOf = (tile) => corrections.get(tile.dataset.file)?.[0] ?? null;

function setOptionTexts() {
  for (const option of document.querySelectorAll("option[data-choice]")) option.textContent = option.dataset[root.lang];
}

function makeSelect(tile) {
  const label = choiceTemplate.cloneNode(true).firstChild;
  const select = label.querySelector("select");
  const options = [...select.options];
  options.find((option) => !option.dataset.choice && option.value === tile.dataset.label)?.remove();
  const guess = options.find((option) => !option.dataset.choice && option.value === tile.dataset.guess);
  if (guess) select.options[1].before(guess.cloneNode(true));
  return label;
}

function showControl(tile, isOpen = false) {
  const correction = correctionOf(tile);
  const showsSelect = isOpen || correction !== null;
  tile.classList.toggle("corrected", correction !== null);
  let control = tile.querySelector(".control");
  if (!control) {
    control = document.createElement("div");
    control.className = "control";
    tile.append(control);
  }
  if (Boolean(control.querySelector("select")) !== showsSelect || !control.firstChild) {
    control.replaceChildren(showsSelect ? makeSelect(tile) : buttonTemplate.cloneNode(true));
    control.querySelector("button, select").setAttribute("aria-describedby", tile.querySelector(".name").id);
    setOptionTexts();
  }
  if (!showsSelect) return;
  const options = [...control.querySelector("select").options];
  const matches = (option) => {
    if (correction === null) return option.dataset.choice === "none";
    return correction ? !option.dataset.choice && option.value === correction : option.dataset.choice === "out";
  };
  (options.find(matches) ?? options[0]).selected = true;
}

function showCorrections() {
  const count = [...corrections.values()].filter(([label]) => label !== null).length;
  bar.querySelector("b").textContent = count;
  bar.hidden = !count;
  for (const tile of tiles) showControl(tile, tile.contains(document.activeElement) && document.activeElement.matches("select"));
}

// A spreadsheet runs text that begins with one of these characters as a formula.
const guard = (text) => (/^'*[=+\-@\t\r]/.test(text) ? `'${text}` : text);
const cell = (text) => (/[",\r\n]|^\s|\s$/.test(guard(text)) ? `"${guard(text).replaceAll('"', '""')}"` : guard(text));

function formatCsv() {
  const rows = new Map(Object.entries(JSON.parse(bar.dataset.previous)));
  for (const [file, [label]] of corrections) if (label !== null) rows.set(file, label);
  const lines = [...rows].sort(([a], [b]) => (a < b ? -1 : 1)).map((row) => row.map(cell).join(","));
  return `\uFEFF${["file,label", ...lines].join("\r\n")}\r\n`;
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([formatCsv()], { type: "text/csv" }));
  link.download = "corrections.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function passOn(event) {
  const link = event.target.closest("nav a, h2 a");
  const text = encodeURIComponent(JSON.stringify([...corrections]));
  if (link && corrections.size && text.length < 1e6) link.hash = `${root.lang}&corrections=${text}`;
}

tiles.forEach((tile, index) => { tile.querySelector(".name").id = `name-${index}`; });
for (const about of document.querySelectorAll(".about-corrections")) about.hidden = !tiles.length;
document.addEventListener("click", (event) => {
  const tile = event.target.closest(".control button")?.closest("[data-file]");
  if (!tile) return;
  showControl(tile, true);
  const select = tile.querySelector("select");
  select.focus();
  try { select.showPicker(); } catch { /* an older browser opens the list at the next key or click */ }
});
document.addEventListener("change", (event) => {
  const tile = event.target.closest("[data-file]");
  if (!tile) return;
  const { choice } = event.target.selectedOptions[0].dataset;
  choose(tile.dataset.file, choice === "none" ? null : choice === "out" ? "" : event.target.value);
  showCorrections();
});
document.addEventListener("focusout", (event) => {
  const tile = event.target.closest("[data-file]");
  if (tile && event.target.matches("select")) showControl(tile);
});
for (const name of ["click", "auxclick"]) document.addEventListener(name, passOn);
document.getElementById("language").addEventListener("click", setOptionTexts);
document.getElementById("save").onclick = save;
document.getElementById("clear").onclick = ({ currentTarget }) => {
  if (!confirm(currentTarget.dataset[root.lang])) return;
  for (const [file, [label]] of corrections) if (label !== null) choose(file, null);
  showCorrections();
};
// Another page of the folder may have been open in the meantime, in this tab or in another one.
for (const name of ["pageshow", "storage"]) addEventListener(name, () => { readStorage(); showCorrections(); });
if (passedOn) {
  try { merge(decodeURIComponent(passedOn)); } catch { /* not the text of these pages */ }
  writeStorage();
  history.replaceState(null, "", `#${root.lang}`);
}
showCorrections();
