// One answer of the model: its tokens as they come, then as Markdown, and its figures.

import { markdownOf } from "./markdown.js";
import { makeInspectable, tokenSpan } from "./tokens.js";

const PAUSE_MS = 250; // between two renderings of an unfinished answer

export class Answer {
  constructor(key) {
    this.element = document.createElement("div");
    this.element.className = "text";
    makeInspectable(this.element);
    this.said = "";
    this.reason = null;
    this.tokens = [];
    this.asked = performance.now();
    this.first = this.last = null; // when tokens came, and how many with the first
    this.key = key;
    this.rendered = 0;
    this.rendering = null;
    this.renderedAt = 0;
  }

  add(choice) {
    this.said += choice.delta.content ?? "";
    this.reason = choice.finish_reason ?? this.reason;
    const tokens = choice.token_origins ?? [];
    if (!tokens.length) return;
    this.last = { time: performance.now(), count: this.tokens.push(...tokens) };
    this.first ??= this.last;
    this.element.append(...tokens.map((token) => tokenSpan(token)));
    const ready = !this.rendering && this.last.time - this.renderedAt > PAUSE_MS;
    if (ready && tokens.some((token) => token.text.includes("\n"))) this.render();
  }

  async finish() {
    await this.rendering;
    if (this.rendered < this.tokens.length) await this.render();
  }

  async render() {
    const tokens = [...this.tokens];
    this.rendering = markdownOf(tokens, this.key).then((nodes) => {
      const rest = this.tokens.slice(tokens.length).map((token) => tokenSpan(token));
      const box = document.createElement("div");
      box.className = "markdown";
      box.append(...nodes);
      this.element.replaceChildren(box, ...rest);
      this.rendered = tokens.length;
    }).catch(() => {}); // the text stays as it is: the answer matters more than its looks
    await this.rendering;
    this.renderedAt = performance.now();
    this.rendering = null;
  }

  // The rate leaves out the wait for the first chunk and the tokens in it.
  get figures() {
    if (!this.first) return "";
    const count = this.last.count, seconds = (this.last.time - this.first.time) / 1000;
    const words = [`${count} ${count === 1 ? "token" : "tokens"}`];
    if (seconds > 0) words.push(`${((count - this.first.count) / seconds).toFixed(1)} tokens/s`);
    words.push(`first token after ${((this.first.time - this.asked) / 1000).toFixed(2)} s`);
    if (this.reason === "length") words.push("cut off at Max tokens");
    return words.join(" · ");
  }
}
