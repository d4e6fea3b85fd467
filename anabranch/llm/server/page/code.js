// Code in answers: highlighted without touching the coloured tokens, and copied by a button.

import { button, copied, made } from "./turn.js";

const WORDS = ("and as async await break case catch class const continue def default del do elif " +
  "else enum except export extends extern false finally fn for from func function if impl import " +
  "in interface is lambda let loop match mod mut new nil None not null of or pass pub public " +
  "private raise return self static struct super switch this throw true True False try type " +
  "typedef union unsafe use var void where while with yield").split(" ");
const PARTS = new RegExp([
  String.raw`(?<comment>#[^\n]*|\/\/[^\n]*|\/\*[\s\S]*?\*\/)`,
  String.raw`(?<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|` + "`(?:\\\\.|[^`\\\\])*`)",
  String.raw`(?<number>\b\d[\w.]*\b)`,
  String.raw`(?<word>\b(?:${WORDS.join("|")})\b)`,
].join("|"), "g");
const LARGEST = 20_000; // letters of a block that is highlighted
const seen = new WeakSet();

// Ranges of text that the style sheet colours; browsers without them show plain code.
function highlightOf(kind) {
  const name = `code-${kind}`;
  if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
  return CSS.highlights.get(name);
}

function forgetGone() {
  for (const kind of ["comment", "string", "number", "word"]) {
    const highlight = highlightOf(kind);
    for (const range of [...highlight]) {
      if (!range.startContainer.isConnected) highlight.delete(range);
    }
  }
}

export function highlightCode(root) {
  if (!globalThis.Highlight || !CSS.highlights) return;
  forgetGone();
  for (const block of root.querySelectorAll("pre")) {
    if (seen.has(block) || block.textContent.length > LARGEST) continue;
    seen.add(block);
    colour(block);
  }
}

function colour(block) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT), nodes = [];
  let size = 0;
  while (walker.nextNode()) {
    nodes.push({ node: walker.currentNode, start: size });
    size += walker.currentNode.length;
  }
  const place = (at) => {
    const found = nodes.findLast(({ start }) => start <= at);
    return [found.node, at - found.start];
  };
  for (const match of block.textContent.matchAll(PARTS)) {
    const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    const range = new Range();
    range.setStart(...place(match.index));
    const [node, offset] = place(match.index + match[0].length - 1);
    range.setEnd(node, offset + 1);
    highlightOf(kind).add(range);
  }
}

// A block with a button that copies it.
export function codeBlock(block) {
  const frame = made("div", "code");
  const copy = button("Copy code", async () => {
    copy.textContent = await copied(block.textContent) ? "Copied" : "Cannot copy here";
    setTimeout(() => { copy.textContent = "Copy code"; }, 2000);
  });
  frame.append(block, copy);
  return frame;
}
