// The page of `vitrail inspect`: which image is chosen, and the language. Panels add their own scripts after this one;
// what they must do when an image is chosen or the language changes, they add to these lists.
"use strict";
const pageData = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const whenChosen = [], whenLanguage = [];

function choose(number) {
  for (const part of document.querySelectorAll("[data-image]")) part.hidden = Number(part.dataset.image) !== number;
  for (const thumb of document.querySelectorAll("[data-choose]")) thumb.setAttribute("aria-pressed", String(Number(thumb.dataset.choose) === number));
  for (const listener of whenChosen) listener(number);
}

function speak(language) {
  root.lang = language;
  history.replaceState(null, "", `#${language}`);
  for (const listener of whenLanguage) listener();
}

function start() {
  for (const thumb of document.querySelectorAll("[data-choose]")) thumb.onclick = () => choose(Number(thumb.dataset.choose));
  $("language").onclick = () => speak(root.lang === "ko" ? "en" : "ko");
  choose(0);
  if (location.hash === "#ko" || (location.hash !== "#en" && navigator.language.startsWith("ko"))) speak("ko");
}

