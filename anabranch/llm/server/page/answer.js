// One answer of the model: its tokens as they come, rendered as Markdown, and its figures.

import { highlightCode } from "./code.js";
import { markdownOf } from "./markdown.js";
import { callNodes, isJson, jsonNodes, textNodes, thoughtNode } from "./special_answers.js";
import { makeInspectable, tokenSpan } from "./tokens.js";

const PAUSE_MS = 150; // between two renderings of an unfinished answer
const SHARE = 8; // a pause is at least this many times what the last rendering took

export class Answer {
  constructor(key) {
    this.element = document.createElement("div");
    this.element.className = "text";
    makeInspectable(this.element);
    this.key = key;
    this.said = "";
    this.thought = ""; // reasoning before what is said
    this.calls = []; // of tools
    this.reason = null;
    this.tokens = [];
    this.asked = performance.now();
    this.first = this.last = null; // when tokens came, and how many there were then
    this.markdown = null; // what is shown once a rendering has come
    this.numRendered = 0;
    this.rendering = null;
    this.pause = 0;
  }

  add(choice) {
    this.said += choice.delta.content ?? "";
    this.thought += choice.delta.reasoning_content ?? "";
    for (const call of choice.delta.tool_calls ?? []) {
      this.calls[call.index] ??= { id: call.id, name: call.function.name, said: "" };
      this.calls[call.index].said += call.function.arguments ?? "";
    }
    this.reason = choice.finish_reason ?? this.reason;
    const tokens = choice.token_origins ?? [];
    for (const token of tokens) token.early = !this.said; // part of the reasoning, if there is any
    if (!tokens.length) return;
    this.last = { time: performance.now(), count: this.tokens.push(...tokens) };
    this.first ??= this.last;
    if (!this.markdown) this.element.append(...tokens.map((token) => tokenSpan(token)));
    this.rendering ??= this.renderLater();
  }

  get hasContent() {
    return Boolean(this.said || this.calls.length);
  }

  async finish() {
    this.pause = 0;
    await this.rendering;
    if (this.numRendered < this.tokens.length) await this.render();
  }

  async renderLater() {
    await new Promise((resolve) => setTimeout(resolve, this.pause));
    await this.render();
    this.rendering = null;
  }

  async render() {
    const tokens = [...this.tokens], start = performance.now();
    try {
      this.show(await this.nodesOf(tokens));
      highlightCode(this.element);
      this.numRendered = tokens.length;
    } catch { // the text matters more than its looks
      this.element.replaceChildren(...this.tokens.map((token) => tokenSpan(token)));
      this.markdown = null;
    }
    this.pause = Math.max(PAUSE_MS, SHARE * (performance.now() - start));
  }

  async nodesOf(tokens) {
    const early = this.thought ? tokens.filter((token) => token.early) : [];
    const later = this.thought ? tokens.filter((token) => !token.early) : tokens;
    const thought = early.length ? [thoughtNode(early, !this.said)] : [];
    if (this.calls.length) return [...thought, ...textNodes(this.said), ...callNodes(this.calls)];
    const text = later.map((token) => token.text).join("");
    if (isJson(text)) return [...thought, ...jsonNodes(later)];
    return [...thought, ...(text ? await markdownOf(later, this.key) : [])];
  }

  // What is kept of it, and an answer made from that.
  get record() {
    const { said, thought, calls, reason, tokens } = this;
    return { said, thought, calls, reason, tokens };
  }

  async restore(record) {
    Object.assign(this, record);
    await this.render();
  }

  // Blocks that did not change stay, with what is selected or scrolled in them.
  show(nodes) {
    if (!this.markdown) {
      this.markdown = document.createElement("div");
      this.markdown.className = "markdown";
      this.element.replaceChildren(this.markdown);
    }
    const shown = [...this.markdown.children];
    let same = 0;
    while (same < shown.length && nodes[same]?.isEqualNode(shown[same])) same += 1;
    for (const node of shown.slice(same)) node.remove();
    this.markdown.append(...nodes.slice(same));
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
