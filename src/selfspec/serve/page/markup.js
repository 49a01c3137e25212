// Elements. Text goes in as text: nothing that a model writes is ever read as HTML.

/** A new element with properties and children; strings become text. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** A copy of the element inside of a template of index.html. */
export function stamp(template) {
  return document.getElementById(template).content.firstElementChild.cloneNode(true);
}

/** The element within `root` whose `data-part` is `name`. */
export function part(root, name) {
  return root.querySelector(`[data-part="${name}"]`);
}

/** Tells a screen reader something that can be seen elsewhere. */
export function say(message) {
  document.getElementById("status").textContent = message;
}
