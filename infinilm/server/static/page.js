/** Finds and makes elements. Text stays text: nothing on this page is parsed as HTML. */

/** The element of index.html with this id. */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element with the id ${id}`);
  return element;
}

/** A new element with a text. */
export function make(tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

/** A new button. */
export function makeButton(className, label) {
  const button = make("button", className, label);
  button.type = "button";
  return button;
}
