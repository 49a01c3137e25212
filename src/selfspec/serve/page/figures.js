// What is counted while an answer comes in, and how it is told in numbers.

import { FULL_MODEL, chooser } from "./drafters.js";

/** Tokens by who chose them, and when they came. Times are `performance.now()` in milliseconds. */
export class Tally {
  tokens = 0;
  byChooser = new Map([[FULL_MODEL, 0]]);
  report = {}; // the server's figures, the latest of each
  #firstAt = null;
  #firstTokens = 0;
  #lastAt = null;

  take(tokens, method, now) {
    if (tokens.length === 0) return;
    if (this.#firstAt === null) {
      this.#firstAt = now;
      this.#firstTokens = tokens.length;
    }
    this.#lastAt = now;
    this.tokens += tokens.length;
    for (const token of tokens) {
      const name = chooser(token, method);
      this.byChooser.set(name, (this.byChooser.get(name) ?? 0) + 1);
    }
  }

  /** From the first token to the last, in seconds: without reading the prompt and waiting in a queue. */
  get seconds() {
    return this.#firstAt === null ? 0 : (this.#lastAt - this.#firstAt) / 1000;
  }

  /** The server's figure, or before it comes the one seen here; null where there is none yet. */
  get tokensPerSecond() {
    const seen = this.seconds > 0 ? (this.tokens - this.#firstTokens) / this.seconds : null;
    return this.report.tokens_per_second ?? seen;
  }
}

/** The figures of an answer as pairs of a label and a value; a dash stands for what is not known yet. */
export function figures(tally, drafts) {
  const { speedup_estimate: speedup, acceptance_rate: accepted } = tally.report;
  const rows = [
    ["tokens", String(tally.tokens)],
    ["tokens/s", known(tally.tokensPerSecond, (value) => value.toFixed(value < 10 ? 1 : 0))],
  ];
  if (!drafts) return rows;
  return [
    ...rows,
    ["est. speedup", known(speedup, (value) => `${value.toFixed(2)}×`)],
    ["accepted", known(accepted, percent)],
  ];
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function known(value, format) {
  return Number.isFinite(value) ? format(value) : "–";
}
