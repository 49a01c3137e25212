// Starts the page: connects the controls with the chat.

import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { Settings, askForKey } from "./dialogs.js";
import { element } from "./markup.js";
import { followEnd } from "./scroll.js";

const control = (name) => document.getElementById(name);
const [message, send, method] = ["message", "send", "method"].map(control);

const settings = new Settings();
const connection = new Connection(askForKey);
const chat = new Chat(control("log"), connection, (running) => {
  send.textContent = running ? "Stop" : "Send";
  document.documentElement.classList.toggle("running", running);
});
const follow = followEnd(control("log"));

async function open() {
  const told = control("connection");
  try {
    await connection.open();
    told.textContent = connection.model;
  } catch (error) {
    told.textContent = error.message;
    return;
  }
  method.replaceChildren(...connection.methods.map((name) => element("option", { value: name }, name)));
  method.value = connection.method;
  control("method-choice").hidden = connection.methods.length === 0;
}

async function ask(text) {
  if (chat.running || !text.trim() || !settings.check()) return;
  if (connection.model === null) await open();
  message.value = "";
  control("welcome").hidden = true;
  follow();
  chat.ask(text, { system: settings.system, sampling: settings.sampling, method: method.value || undefined });
}

control("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running) chat.stop();
  else ask(message.value);
});

message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask(message.value);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
});

control("new-chat").addEventListener("click", () => {
  chat.clear();
  control("welcome").hidden = false;
  message.focus();
});

for (const example of document.querySelectorAll("#welcome button")) {
  example.addEventListener("click", () => {
    ask(example.textContent);
    message.focus();
  });
}

open();
