/** The list of conversations: opens them, deletes them, begins new ones. */

import { byId, make, makeButton } from "./page.js";
import { deleteAllChats, loadChats, saveChat } from "./store.js";

const SURE_MS = 4000;

export class History {
  #chat;

  /** `chat` is what conversations are opened in; `onOpen` is called when one is opened. */
  constructor(chat, onOpen) {
    this.#chat = chat;
    byId("chat-list").addEventListener("click", (event) => {
      const { id } = event.target.closest("li")?.dataset ?? {};
      if (event.target.matches(".delete")) sure(event.target, () => this.#delete(id));
      else if (event.target.matches(".open-chat")) {
        this.#chat.open(id, loadChats().find((each) => each.id === id)?.turns ?? []);
        onOpen();
      }
    });
    byId("delete-all").addEventListener("click", (event) => sure(event.target, () => this.#deleteAll()));
    window.addEventListener("storage", () => this.show()); // another tab has changed the list
    this.show();
  }

  /** Show the list as it is now. */
  show() {
    const chats = loadChats();
    byId("chat-list").replaceChildren(...chats.map((chat) => makeItem(chat, chat.id === this.#chat.id)));
    byId("no-chats").hidden = chats.length > 0;
    byId("delete-all").hidden = chats.length < 2;
  }

  #delete(id) {
    if (id === this.#chat.id) this.#chat.discard();
    saveChat(id, []);
    this.show();
  }

  #deleteAll() {
    this.#chat.discard();
    deleteAllChats();
    this.show();
  }
}

function makeItem({ id, title }, isOpen) {
  const item = make("li", isOpen ? "is-open" : "", "");
  item.dataset.id = id;
  const open = makeButton("open-chat", title);
  open.title = title;
  if (isOpen) open.setAttribute("aria-current", "true");
  const remove = makeButton("delete", "Delete");
  remove.setAttribute("aria-label", `Delete the chat: ${title}`);
  item.append(open, remove);
  return item;
}

/** Act on a button's second click. The first click asks for confirmation. */
function sure(button, act) {
  if (button.classList.contains("asks")) {
    act();
    return;
  }
  const label = button.textContent;
  button.classList.add("asks");
  button.textContent = "Sure?";
  setTimeout(() => {
    button.classList.remove("asks");
    button.textContent = label;
  }, SURE_MS);
}
