// Markdown of an answer as elements whose text is still made of coloured tokens.

import { codeBlock } from "./code.js";
import { post } from "./stream.js";
import { tokenSpan } from "./tokens.js";

const ALLOWED = new Set(("a blockquote br code em h1 h2 h3 h4 h5 h6 hr li ol p pre s strong " +
  "table tbody td th thead tr ul").split(" "));
const HOLDS_BLOCKS = new Set("BODY BLOCKQUOTE LI OL TABLE TBODY THEAD TR UL".split(" "));
const LONGEST_MARK = 40; // letters that an entity, an escape or an indentation may skip

// The server renders, nothing of its HTML is inserted: elements are made anew from a short list.
export async function markdownOf(tokens, key) {
  const source = tokens.map((token) => token.text).join("");
  const answer = await post("/markdown", { text: source }, { key });
  const { body } = new DOMParser().parseFromString(await answer.text(), "text/html");
  return new Painter(tokens, source).children(body);
}

class Painter {
  constructor(tokens, source) {
    this.tokens = tokens;
    this.source = source;
    this.cursor = 0; // in the source, up to which text was found
    this.place = 0; // of the token that holds the cursor
    this.start = 0; // of that token in the source
  }

  children(parent) {
    return [...parent.childNodes].flatMap((node) => {
      if (node.nodeType !== Node.TEXT_NODE) return [this.element(node)];
      if (HOLDS_BLOCKS.has(parent.nodeName) && !node.data.trim()) return [];
      const broken = node.previousSibling?.nodeName === "BR";
      return this.text(broken ? node.data.replace(/^\n/, "") : node.data);
    });
  }

  element(node) {
    const name = node.localName;
    const made = document.createElement(ALLOWED.has(name) ? name : "span");
    if (name === "a" && /^(https?|mailto):/.test(node.href)) {
      Object.assign(made, { href: node.href, target: "_blank", rel: "noopener noreferrer" });
    }
    if (name === "ol" && node.start !== 1) made.start = node.start;
    made.append(...this.children(node));
    if (name === "pre") return codeBlock(made);
    if (name !== "table") return made;
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.append(made);
    return scroll;
  }

  // Rendered text occurs in the source in the same order, without the marks. What does not occur
  // as a whole is looked for by line (indented code), then by letter (entities, escapes).
  text(rendered) {
    const at = this.source.indexOf(rendered, this.cursor);
    if (at >= 0) return this.spans(at, at + rendered.length);
    const lines = rendered.split(/(?<=\n)/);
    if (lines.length > 1) return lines.flatMap((line) => this.text(line));
    return [...rendered].flatMap((letter) => {
      const found = this.source.indexOf(letter, this.cursor);
      const near = found >= 0 && found - this.cursor < LONGEST_MARK;
      if (near) return this.spans(found, found + letter.length);
      return [tokenSpan(this.tokens[this.place], letter)];
    });
  }

  spans(from, to) {
    const spans = [];
    this.cursor = to;
    for (;;) {
      const token = this.tokens[this.place], end = this.start + token.text.length;
      if (end > from) {
        const text = this.source.slice(Math.max(from, this.start), Math.min(to, end));
        if (text) spans.push(tokenSpan(token, text));
      }
      if (end >= to) return spans;
      this.start = end;
      this.place += 1;
    }
  }
}
