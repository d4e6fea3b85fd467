// Answers that are no prose: JSON, calls of tools, and reasoning, which is folded.

import { codeBlock } from "./code.js";
import { tokenSpan } from "./tokens.js";
import { made } from "./turn.js";

const MARKS = new Set(["<think>", "</think>"]);

export function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

export function jsonNodes(tokens) {
  const block = made("pre", "json");
  const code = made("code");
  code.append(...tokens.map((token) => tokenSpan(token)));
  block.append(code);
  return [codeBlock(block)];
}

// What is said before calls, whose tokens are not known apart from theirs.
export function textNodes(said) {
  return said.trim() ? [made("p", "said", said.trim())] : [];
}

export function callNodes(calls) {
  return calls.map(({ name, said }) => {
    const call = made("div", "call");
    const block = made("pre", "json");
    block.append(made("code", "", readable(said)));
    call.append(made("h4", "", `Calls ${name}`), codeBlock(block));
    return call;
  });
}

function readable(said) {
  try {
    return JSON.stringify(JSON.parse(said), null, 2);
  } catch {
    return said;
  }
}

export function thoughtNode(tokens, open) {
  const thought = made("details", "thought");
  thought.open = open;
  const text = made("div");
  text.append(...tokens.filter((token) => !MARKS.has(token.text.trim()))
    .map((token) => tokenSpan(token)));
  thought.append(made("summary", "", "Reasoning"), text);
  return thought;
}
