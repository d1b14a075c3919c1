/** The conversations that this browser stores, the latest first. */

const STORE = "infinilm.chats";
const MAX_CHATS = 100;
const TITLE_LENGTH = 60;

/** All conversations: [{id, title, turns: [{role, content, note}]}]. */
export function loadChats() {
  try {
    const chats = JSON.parse(localStorage.getItem(STORE)) ?? [];
    return chats.filter(({ id, turns }) => typeof id === "string" && turns.every(isTurn));
  } catch {
    return []; // not written by this page
  }
}

function isTurn({ role, content }) {
  return (role === "user" || role === "assistant") && typeof content === "string";
}

/** Save a conversation as the latest one. Without turns it is deleted. Reads the list again: other tabs change it. */
export function saveChat(id, turns) {
  const others = loadChats().filter((chat) => chat.id !== id);
  if (!turns.length) {
    write(others);
    return;
  }
  const kept = turns.map(({ role, content, note }) => ({ role, content, note }));
  const title = turns[0].content.trim().split("\n")[0].slice(0, TITLE_LENGTH);
  write([{ id, title, turns: kept }, ...others].slice(0, MAX_CHATS));
}

export function deleteAllChats() {
  localStorage.removeItem(STORE);
}

/** Write the conversations. If there is no space for all, the oldest are dropped. */
function write(chats) {
  for (let left = chats; ; left = left.slice(0, -1)) {
    try {
      localStorage.setItem(STORE, JSON.stringify(left));
      return;
    } catch (error) {
      if (!left.length) throw error;
    }
  }
}
