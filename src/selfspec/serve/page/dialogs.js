// The dialogs: settings, which are kept in this browser, and the key that a server asks for.

const STORED = "selfspec.settings";

/** What the fields of the settings say. */
export class Settings {
  #dialog = document.getElementById("settings");
  #form = document.getElementById("settings-form");

  constructor() {
    this.#restore();
    document.getElementById("open-settings").addEventListener("click", () => this.#dialog.showModal());
    this.#form.addEventListener("input", () => this.#apply());
    document.getElementById("reset-settings").addEventListener("click", () => {
      this.#form.reset();
      this.#apply();
    });
    this.#apply();
  }

  /** Whether every field can be used; if not, the dialog opens and says what is wrong. */
  check() {
    if (this.#form.checkValidity()) return true;
    this.#dialog.showModal();
    return this.#form.reportValidity();
  }

  /** What a request takes of them. With a temperature there is always a seed, so that an answer can be repeated. */
  get sampling() {
    const { temperature, seed, max_tokens } = this.#form.elements;
    const warmth = number(temperature);
    return {
      max_completion_tokens: number(max_tokens),
      temperature: warmth,
      ...(warmth > 0 && { seed: number(seed) ?? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 }),
    };
  }

  /** The system prompt as messages: one, or none. */
  get system() {
    const content = this.#form.elements.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  #apply() {
    document.documentElement.classList.toggle("unmarked", !this.#form.elements.marks.checked);
    try {
      localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(fields(this.#form).map((f) => [f.name, read(f)]))));
    } catch {
      // storage is switched off: they hold for this visit
    }
  }

  #restore() {
    try {
      const stored = JSON.parse(localStorage.getItem(STORED)) ?? {};
      for (const field of fields(this.#form)) {
        if (!(field.name in stored)) continue;
        if (field.type === "checkbox") field.checked = stored[field.name];
        else field.value = stored[field.name];
      }
    } catch {
      // nothing usable is stored: the defaults of the page
    }
  }
}

function fields(form) {
  return [...form.elements].filter((field) => field.name);
}

function read(field) {
  return field.type === "checkbox" ? field.checked : field.value;
}

/** The number in a field; null where it is empty. */
function number(field) {
  return field.value === "" ? null : field.valueAsNumber;
}

/** Asks for a key, and says why. Null if the dialog is closed without one. */
export function askForKey(reason) {
  const dialog = document.getElementById("key");
  const field = document.getElementById("key-field");
  document.getElementById("key-reason").textContent = reason;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "use" && field.value ? field.value : null), {
      once: true,
    });
  });
}
