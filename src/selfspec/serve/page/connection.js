// The server as the page sees it: its model, its methods, and the key that it may ask for.

import { listModels, streamChat } from "./api.js";

const STORED = "selfspec.key"; // for this tab only

export class Connection {
  model = null;
  methods = [];
  #key = "";

  /** `askForKey` takes what the server said and gives a key, or null if the person gives none. */
  constructor(askForKey) {
    this.askForKey = askForKey;
    try {
      this.#key = sessionStorage.getItem(STORED) ?? "";
    } catch {
      // storage is switched off: the key is asked for
    }
  }

  /** Learns what is served. */
  async open() {
    const [entry] = await this.#withKey(() => listModels(this.#key));
    this.model = entry.id;
    this.methods = entry.selfspec?.methods ?? [];
    this.method = entry.selfspec?.method ?? this.methods[0];
  }

  /** The chunks of an answer. Opens the connection first where that has failed before. */
  async *chat(request, signal) {
    if (this.model === null) await this.open();
    const chunks = await this.#withKey(async () => {
      const stream = streamChat({ model: this.model, ...request }, this.#key, signal);
      return { stream, first: await stream.next() };
    });
    if (!chunks.first.done) yield chunks.first.value;
    yield* chunks.stream;
  }

  async #withKey(call) {
    for (;;) {
      try {
        return await call();
      } catch (error) {
        const key = error.status === 401 ? await this.askForKey(error.message) : null;
        if (key === null) throw error;
        this.#keep(key);
      }
    }
  }

  #keep(key) {
    this.#key = key;
    try {
      sessionStorage.setItem(STORED, key);
    } catch {
      // storage is switched off: it holds until the page is left
    }
  }
}
