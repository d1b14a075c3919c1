/** Puts the page together. */

import { hasKey, keepKey, readSamplingDefaults } from "./api.js";
import { Chat } from "./chat.js";
import { EngineMonitor } from "./engine.js";
import { History } from "./history.js";
import { byId } from "./page.js";
import { TokenPopover } from "./popover.js";
import { Settings } from "./settings.js";

const TINT_STORE = "infinilm.tint";

const settings = new Settings();
const chat = new Chat(settings, {
  onLocked: askForKey,
  onWork: () => monitor.lookSoon(),
  onChange: () => history.show(),
});
const history = new History(chat, () => showSheet(null));
const monitor = new EngineMonitor({
  onLocked: askForKey,
  onReady: async () => settings.showModelDefaults(await readSamplingDefaults()),
});
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
byId("new-chat").addEventListener("click", () => {
  showSheet(null);
  chat.clear();
});
byId("welcome").addEventListener("click", (event) => {
  if (event.target.matches(".idea")) chat.sendText(event.target.textContent);
});

/** Esc closes the popover and the open sheet; if no sheet is open, it stops the answer. */
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  popover.hide();
  if (sheet) showSheet(null);
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

// --- the settings and the list of chats, which are sheets over the chat in narrow windows

let sheet = null; // "settings", "chats" or null

function showSheet(name) {
  if (name === sheet) return;
  const opener = byId(`open-${sheet ?? name}`);
  sheet = name;
  for (const each of ["settings", "chats"]) {
    document.body.classList.toggle(`shows-${each}`, each === sheet);
    byId(`open-${each}`).setAttribute("aria-expanded", String(each === sheet));
  }
  byId("chat").inert = sheet !== null;
  (sheet ? byId(`close-${sheet}`) : opener).focus();
}

for (const name of ["settings", "chats"]) {
  byId(`open-${name}`).addEventListener("click", () => showSheet(sheet === name ? null : name));
  byId(`close-${name}`).addEventListener("click", () => showSheet(null));
}
for (const width of [821, 1101]) {
  window.matchMedia(`(min-width: ${width}px)`).addEventListener("change", () => showSheet(null));
}

showTint();
chat.restore();
monitor.look();
