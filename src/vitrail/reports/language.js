// The language of a page that needs no other script: the report of a run, those of `vitrail compare`. A page that loads
// itself again keeps what its reader chose.
"use strict";
const root = document.documentElement;
const memory = (() => {
  try { return window.sessionStorage; } catch { return {}; }
})();
function speak(language) {
  root.lang = memory.language = language;
  history.replaceState(null, "", `#${language}`);
}
document.getElementById("language").onclick = () => speak(root.lang === "ko" ? "en" : "ko");
const asked = ["#en", "#ko"].includes(location.hash) ? location.hash.slice(1) : memory.language || navigator.language;
if (asked.startsWith("ko")) speak("ko");
for (const input of document.querySelectorAll("input[name=axis]")) {
  input.checked = input.value === (memory.axis || "steps");
  input.onchange = () => { memory.axis = input.value; };
}
