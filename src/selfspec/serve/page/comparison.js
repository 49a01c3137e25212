// "The same without drafts": the request once more without drafts, beside the answer as it came with them.
//
// The two do not run at once, for they would share the processors, and the answer with drafts is not generated anew, for a
// method may have learnt it by now. It is shown again at its own pace, from the moment that the other's first token comes.

import { Answer, replay } from "./answer.js";
import { part, stamp } from "./markup.js";

export class Comparison {
  element = stamp("comparison-template");

  constructor(drafted) {
    this.drafted = drafted;
    this.again = new Answer(drafted.method);
    this.plain = new Answer(null);
    part(this.element, "method").textContent = drafted.method;
    part(this.element, "drafted").append(this.again.element);
    part(this.element, "plain").append(this.plain.element);
  }

  /** Shows both, then the verdict. */
  async receive(chunks, signal) {
    let replayed;
    for await (const chunk of chunks) {
      this.plain.take(chunk);
      if (this.plain.tally.tokens > 0) {
        replayed ??= replay(this.drafted.recording, this.again, performance.now(), signal);
      }
    }
    this.plain.finish();
    await replayed;
    this.again.finish();
    return this.#judge();
  }

  stop(message) {
    this.plain.finish();
    this.again.finish();
    this.#conclude(message, "stopped");
  }

  #judge() {
    const { drafted, plain } = this;
    const times = pace(drafted.tally.seconds, plain.tally.seconds);
    const place = difference(drafted.text, plain.text);
    const message =
      place === -1
        ? `Identical text${times}.`
        : `The texts differ from character ${place + 1} on: near-ties can round differently in this precision.`;
    return this.#conclude(message, place === -1 ? "same" : "different");
  }

  #conclude(message, kind) {
    const verdict = part(this.element, "verdict");
    verdict.textContent = message;
    verdict.dataset.kind = kind;
    return message;
  }
}

/** Index of the first character that is not the same; -1 if there is none. */
export function difference(one, other) {
  if (one === other) return -1;
  let index = 0;
  while (index < one.length && one[index] === other[index]) index += 1;
  return index;
}

function pace(drafted, plain) {
  if (!(drafted > 0 && plain > 0)) return "";
  const ratio = (plain / drafted).toFixed(2);
  const seconds = (value) => `${value.toFixed(2)} s`;
  return `, ${ratio}× as fast with drafts: ${seconds(drafted)} instead of ${seconds(plain)} from first to last token`;
}
