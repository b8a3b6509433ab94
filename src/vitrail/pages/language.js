// The language of a page that needs no other script: the report of a run, those of `vitrail compare`.
"use strict";
const root = document.documentElement;
function speak(language) {
  root.lang = language;
  history.replaceState(null, "", `#${language}`);
}
document.getElementById("language").onclick = () => speak(root.lang === "ko" ? "en" : "ko");
if (location.hash === "#ko" || (location.hash !== "#en" && navigator.language.startsWith("ko"))) speak("ko");
