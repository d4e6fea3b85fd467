// The conversation: what was said, and what is being said.

import { streamChat } from "./stream.js";
import { makeInspectable, tokenSpan } from "./tokens.js";

const find = (id) => document.getElementById(id);
const log = find("log"), form = find("form"), prompt = find("prompt");
const send = find("send"), stop = find("stop"), key = find("key");
let messages = [];
let running = null;

function addTurn(who, said) {
  const turn = document.createElement("article");
  turn.className = "turn";
  const name = document.createElement("h3");
  name.textContent = who;
  const text = document.createElement("div");
  text.className = "text";
  text.textContent = said;
  turn.append(name, text);
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return text;
}

function options() {
  const given = {
    temperature: Number(find("temperature").value || 0),
    max_tokens: Number(find("max-tokens").value || 256),
    logprobs: true,
    return_token_origins: true,
  };
  if (find("seed").value !== "") given.seed = Number(find("seed").value);
  if (!find("speculate").checked) given.speculate = false;
  return given;
}

async function answer() {
  const text = addTurn("Model", "");
  text.setAttribute("aria-label", "Answer, by token");
  makeInspectable(text);
  let said = "";
  try {
    const body = { messages, ...options() };
    for await (const chunk of streamChat(body, key.value, running.signal)) {
      const choice = chunk.choices[0];
      said += choice?.delta.content ?? "";
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      text.append(...(choice?.token_origins ?? []).map(tokenSpan));
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    const note = document.createElement("p");
    note.className = "error";
    note.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    text.parentElement.append(note);
  }
  return said;
}

async function submit() {
  const said = prompt.value.trim();
  if (!said || running) return;
  prompt.value = "";
  running = new AbortController();
  send.disabled = true;
  stop.disabled = false;
  log.setAttribute("aria-busy", "true");
  const conversation = messages = [...messages, { role: "user", content: said }];
  addTurn("You", said);
  const reply = await answer();
  if (messages === conversation) messages = [...messages, { role: "assistant", content: reply }];
  log.removeAttribute("aria-busy");
  send.disabled = false;
  stop.disabled = true;
  running = null;
  prompt.focus();
}

export function startChat() {
  key.value = sessionStorage.getItem("key") ?? "";
  key.addEventListener("change", () => sessionStorage.setItem("key", key.value));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  stop.addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  find("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren();
    prompt.focus();
  });
}
