// The conversation: what was said, the one answer that is being generated, and comparisons.

import { Answer } from "./answer.js";
import { Comparison } from "./comparison.js";
import { figures } from "./figures.js";
import { element, part, say, stamp } from "./markup.js";

export class Chat {
  #messages = []; // of finished exchanges
  #running = null; // AbortController of what is being generated

  /** `onRunning` is called with whether something is being generated. */
  constructor(log, connection, onRunning) {
    this.log = log;
    this.connection = connection;
    this.onRunning = onRunning;
  }

  get running() {
    return this.#running !== null;
  }

  stop() {
    this.#running?.abort();
  }

  /** Forgets the conversation. */
  clear() {
    this.stop();
    this.#messages = [];
    this.log.replaceChildren();
  }

  /** Sends a message. `options` are the system messages, the sampling parameters, and the method. */
  async ask(text, options) {
    const request = {
      messages: [...options.system, ...this.#messages, { role: "user", content: text }],
      ...options.sampling,
      speculative: { ...(options.method && { method: options.method }), enabled: true, report: true },
    };
    const answer = new Answer(options.method ?? "drafts");
    const turn = stamp("turn-template");
    part(turn, "question").append(text);
    part(turn, "method").textContent = answer.method;
    part(turn, "answer").replaceWith(answer.element);
    this.log.append(turn);
    const messages = this.#messages;
    const failure = await this.#run((signal) => answer.receive(this.connection.chat(request, signal)), "Generating.");
    answer.finish();
    if (messages !== this.#messages) return; // a new chat has begun
    if (failure === null || (failure.name === "AbortError" && answer.text)) {
      messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    }
    this.#close(turn, answer, request, failure, () => this.ask(text, options));
  }

  /** What stands below an answer that has ended: a note or an error, and what can be done with it. */
  #close(turn, answer, request, failure, again) {
    const actions = part(turn, "actions");
    const add = (label, act) => actions.append(button(label, act));
    if (failure && failure.name !== "AbortError") {
      turn.append(element("p", { className: "error", role: "alert" }, failure.message));
      actions.append(button("Try again", () => !this.running && (turn.remove(), again())));
      turn.append(actions);
      return;
    }
    const note = notes(answer, request, failure).join(" ");
    if (note) actions.before(element("p", { className: "note" }, note));
    if (!failure && answer.method !== "autoregressive") {
      add("The same without drafts", () => this.#compare(turn, answer, request));
    }
    if (navigator.clipboard) add("Copy", () => copy(answer.text));
    say(failure ? "Stopped." : `Answer finished. ${spoken(answer)}`);
  }

  async #compare(turn, answer, request) {
    if (this.running) return;
    const comparison = new Comparison(answer);
    turn.querySelector(".comparison")?.remove();
    turn.append(comparison.element);
    comparison.element.scrollIntoView({ block: "nearest" });
    const plain = { ...request, speculative: { enabled: false, report: true } };
    let verdict = "";
    const failure = await this.#run(async (signal) => {
      verdict = await comparison.receive(this.connection.chat(plain, signal), signal);
    }, "Generating the same without drafts.");
    if (failure) comparison.stop(failure.name === "AbortError" ? "Stopped." : failure.message);
    say(failure ? "Stopped." : verdict);
  }

  /** Runs one thing at a time, until it ends or is stopped; gives the error, or null. */
  async #run(job, words) {
    const controller = new AbortController();
    this.#running = controller;
    this.onRunning(true);
    say(words);
    try {
      await job(controller.signal);
      controller.signal.throwIfAborted();
      return null;
    } catch (error) {
      return error;
    } finally {
      if (this.#running === controller) {
        this.#running = null;
        this.onRunning(false);
      }
    }
  }
}

function notes(answer, request, failure) {
  return [
    failure && "Stopped.",
    answer.finishReason === "length" && `The limit of ${request.max_completion_tokens} tokens was reached.`,
    request.seed !== undefined && `Seed ${request.seed}.`,
  ].filter(Boolean);
}

function button(label, act) {
  const made = element("button", { type: "button", className: "quiet" }, label);
  made.addEventListener("click", act);
  return made;
}

async function copy(text) {
  await navigator.clipboard.writeText(text);
  say("Copied.");
}

function spoken(answer) {
  return figures(answer.tally, true)
    .filter(([, value]) => value !== "–")
    .map(([label, value]) => `${value} ${label}`)
    .join(", ");
}
