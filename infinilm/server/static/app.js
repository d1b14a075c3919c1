/** Puts the page together. */

import { hasKey, keepKey } from "./api.js";
import { Chat } from "./chat.js";
import { EngineMonitor } from "./engine.js";
import { byId } from "./page.js";
import { TokenPopover } from "./popover.js";
import { Settings } from "./settings.js";

const TINT_STORE = "infinilm.tint";

const settings = new Settings();
const chat = new Chat(settings, { onLocked: askForKey, onWork: () => monitor.look() });
const monitor = new EngineMonitor(askForKey);
const popover = new TokenPopover(byId("popover"), byId("log"), (element) => chat.viewOf(element));

function askForKey() {
  byId("key-error").textContent = hasKey() ? "This key does not open the server." : "";
  byId("key-form").hidden = false;
  byId("key").select();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("input").focus();
  monitor.look();
});

// --- the composer

const input = byId("input");
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.send();
});
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  chat.send();
});
byId("stop").addEventListener("click", () => chat.stop());
byId("new-chat").addEventListener("click", () => chat.clear());
byId("welcome").addEventListener("click", (event) => {
  if (!event.target.matches(".idea")) return;
  input.value = event.target.textContent;
  input.focus();
});

/** Esc closes what is open, or stops the answer. */
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  popover.hide();
  if (document.body.classList.contains("has-sheet")) showSettings(false);
  else chat.stop();
});

// --- colours

const tint = byId("tint");
tint.checked = localStorage.getItem(TINT_STORE) === "yes";
tint.addEventListener("change", () => {
  localStorage.setItem(TINT_STORE, tint.checked ? "yes" : "no");
  showTint();
});

function showTint() {
  byId("log").classList.toggle("tinted", tint.checked);
  byId("legend").hidden = !tint.checked;
}

// --- the settings, which are a sheet of their own on a phone

function showSettings(isShown) {
  document.body.classList.toggle("has-sheet", isShown);
  byId("open-settings").setAttribute("aria-expanded", String(isShown));
  byId("chat").inert = isShown;
  byId(isShown ? "close-settings" : "open-settings").focus();
}

byId("open-settings").addEventListener("click", () => showSettings(true));
byId("close-settings").addEventListener("click", () => showSettings(false));
window.matchMedia("(min-width: 821px)").addEventListener("change", (event) => {
  if (event.matches && byId("chat").inert) showSettings(false);
});

showTint();
monitor.look();
