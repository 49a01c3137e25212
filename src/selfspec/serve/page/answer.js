// One answer on the page: its text with marks, who chose its tokens, its figures. It records when what came.

import { FULL_MODEL, chooser, mark } from "./drafters.js";
import { Tally, figures, percent } from "./figures.js";
import { element, part, stamp } from "./markup.js";

export class Answer {
  text = "";
  tally = new Tally();
  finishReason = null;
  recording = []; // [{ at: milliseconds, chunk }]
  #last = FULL_MODEL; // who chose the token before
  #frame = 0;

  /** `method` is the name of who drafts where a token does not say; null for an answer without drafts. */
  constructor(method) {
    this.method = method;
    this.element = stamp("answer-template");
    this.element.setAttribute("aria-busy", "true");
    this.#draw();
  }

  /** Shows chunks as they come. */
  async receive(chunks) {
    for await (const chunk of chunks) this.take(chunk);
  }

  take(chunk) {
    const now = performance.now();
    this.recording.push({ at: now, chunk });
    const choice = chunk.choices?.[0];
    const { tokens = [], ...report } = chunk.selfspec ?? {};
    for (const [name, value] of Object.entries(report)) this.tally.report[name] = value ?? this.tally.report[name];
    if (report.method && this.method) this.method = report.method;
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    this.tally.take(tokens, this.method, now);
    this.#write(choice?.delta?.content ?? "", tokens);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** No more will come. */
  finish() {
    this.element.removeAttribute("aria-busy");
    this.#draw();
  }

  /** The content is the text. Tokens say how to mark it, and only where they are all of it. */
  #write(content, tokens) {
    const target = part(this.element, "text");
    this.text += content;
    if (tokens.map((token) => token.text).join("") !== content) {
      target.append(content);
      return;
    }
    for (const token of tokens) this.#writeToken(target, token.text, chooser(token, this.method));
  }

  /** Marks a token. The space before the first one of a run stays unmarked, so that marks fit the words. */
  #writeToken(target, text, name) {
    const marked = name === this.#last ? text : text.trimStart();
    this.#last = name;
    if (name === FULL_MODEL || marked === "") {
      target.append(text);
      return;
    }
    const className = `token ${mark(name)}`;
    target.append(text.slice(0, text.length - marked.length));
    target.append(element("span", { className, title: `drafted by ${name}` }, marked));
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const rows = figures(this.tally, this.method !== null);
    const tiles = rows.map(([label, value]) => element("div", {}, element("dt", {}, label), element("dd", {}, value)));
    part(this.element, "figures").replaceChildren(...tiles);
    this.#drawChoosers();
  }

  #drawChoosers() {
    const { byChooser, tokens } = this.tally;
    const names = [...byChooser].filter(([, count]) => count > 0);
    const share = (count) => count / Math.max(1, tokens);
    part(this.element, "bar").replaceChildren(
      ...names.map(([name, count]) => {
        const segment = element("i", { className: mark(name) });
        segment.style.flexGrow = String(count);
        return segment;
      }),
    );
    part(this.element, "legend").replaceChildren(
      ...names.map(([name, count]) => {
        const sample = element("span", { className: `token ${mark(name)}` }, name);
        return element("li", {}, sample, ` ${count} (${percent(share(count))})`);
      }),
    );
  }
}

/** Shows a recorded answer again at its own pace, `begin` (a time) being when its first token comes. */
export async function replay(recording, answer, begin, signal) {
  const first = recording.find(({ chunk }) => chunk.selfspec?.tokens?.length)?.at ?? recording[0]?.at;
  for (const { at, chunk } of recording) {
    while (!signal.aborted && performance.now() - begin < at - first) await nextFrame();
    if (signal.aborted) return;
    answer.take(chunk);
  }
}

function nextFrame() {
  return new Promise((resolve) => requestAnimationFrame(resolve));
}
