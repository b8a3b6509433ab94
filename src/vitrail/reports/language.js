// Language button and axis choice of pages without other scripts, for instance the run report. Both choices survive a
// reload of the page.
"use strict";
const root = document.documentElement;
const memory = (() => {
  try { return window.sessionStorage; } catch { return {}; }
})();
function setLanguage(language) {
  root.lang = memory.language = language;
  history.replaceState(null, "", `#${language}`);
}
document.getElementById("language").onclick = () => setLanguage(root.lang === "ko" ? "en" : "ko");
const [languageOfLink, passedOn] = location.hash.slice(1).split("&corrections=");
const initial = ["en", "ko"].includes(languageOfLink) ? languageOfLink : memory.language || navigator.language;
if (initial.startsWith("ko")) setLanguage("ko");
for (const input of document.querySelectorAll("input[name=axis]")) {
  input.checked = input.value === (memory.axis || "steps");
  input.onchange = () => { memory.axis = input.value; };
}
