// The report of `vitrail compare`: only the language.
"use strict";
const root = document.documentElement;
function speak(language) {
  root.lang = language;
  history.replaceState(null, "", `#${language}`);
}
document.getElementById("language").onclick = () => speak(root.lang === "ko" ? "en" : "ko");
if (location.hash === "#ko" || (location.hash !== "#en" && navigator.language.startsWith("ko"))) speak("ko");
