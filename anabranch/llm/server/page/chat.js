// The conversation: its turns, and the form that asks.

import { Answer } from "./answer.js";
import { exportConversation, keepConversation } from "./conversations.js";
import { showHistory } from "./history.js";
import { messagesOf } from "./messages.js";
import { streamChat } from "./stream.js";
import { forgetToken } from "./tokens.js";
import { button, Turn } from "./turn.js";

const find = (id) => document.getElementById(id);
const log = find("log"), prompt = find("prompt"), key = find("key");
let turns = []; // those that the model is sent
let failed = null; // shown, but not sent
let running = null;
let editing = null; // the turn whose question is asked anew
let id = null; // of the conversation, once it is kept
let follows = true; // the log stays at its end, unless the reader scrolls up
let scrolledTo = 0; // where the log was scrolled to

function showEnd() {
  log.scrollTop = log.scrollHeight;
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
  const schema = parsed("schema"), tools = parsed("tools");
  if (schema) {
    given.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (tools) given.tools = tools;
  return given;
}

function parsed(name) {
  const text = find(name).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`What stands under Options as ${name} is no JSON: ${error.message}.`);
  }
}

function recordOf(turn) {
  return { asked: turn.asked, ...turn.answer.record };
}

function conversation() {
  const made = turns.map(recordOf);
  const title = turns[0]?.asked.slice(0, 60) ?? "Empty";
  id ??= `${Date.now()}`;
  return { id, title, system: find("system").value.trim(), turns: made };
}

function messagesFor(turn, continues) {
  const before = turns.filter((each) => each !== turn).map(recordOf);
  const last = continues ? recordOf(turn) : { asked: turn.asked };
  return messagesOf(find("system").value.trim(), [...before, last]);
}

function setRunning(controller) {
  running = controller;
  find("send").hidden = Boolean(running);
  find("stop").hidden = !running;
  if (running) log.setAttribute("aria-busy", "true");
  else log.removeAttribute("aria-busy");
}

async function receive(turn, continues = false) {
  const { answer } = turn;
  let error = null;
  try {
    const body = { messages: messagesFor(turn, continues), ...options() };
    if (continues) body.continue_final_message = true;
    for await (const chunk of streamChat(body, { key: key.value, signal: running.signal })) {
      if (chunk.choices[0]) answer.add(chunk.choices[0]);
      if (follows) showEnd();
    }
  } catch (thrown) {
    error = thrown;
  }
  await answer.finish();
  if (follows) showEnd();
  return error;
}

// `former` is the turn that this one takes the place of, if it gets an answer.
async function ask(asked, former = null) {
  if (running) return;
  failed?.remove();
  failed = null;
  if (former) turns = turns.filter((turn) => turn !== former);
  former?.show(false);
  const turn = new Turn(asked, new Answer(key.value));
  log.append(...turn.elements);
  showEnd();
  const controller = new AbortController();
  setRunning(controller);
  const error = await receive(turn);
  if (running !== controller) return; // a new chat was begun
  setRunning(null);
  const stopped = error?.name === "AbortError";
  if (turn.answer.hasContent && (!error || stopped)) keep(turn, former, stopped);
  else giveUp(turn, former, error);
}

function keep(turn, former, stopped) {
  former?.remove();
  turns = [...turns, turn];
  if (stopped) turn.note("Stopped. The conversation goes on from here.");
  else if (turn.answer.calls.length) turn.note("Your next message is sent as the tool's answer.");
  finish(turn);
  keepConversation(conversation());
  showHistory(open);
  if (follows) showEnd();
  if (document.activeElement === document.body) focusPrompt();
}

function finish(turn) {
  turn.finish({
    retry: () => ask(turn.asked, turn),
    proceed: () => proceed(turn),
    edit: () => edit(turn),
  });
}

// Go on with the last answer, from where it ends.
async function proceed(turn) {
  if (running || turns.at(-1) !== turn) return;
  const controller = new AbortController();
  setRunning(controller);
  const error = await receive(turn, true);
  if (running !== controller) return;
  setRunning(null);
  if (error && error.name !== "AbortError") turn.note(error.message, { alert: true });
  finish(turn);
  keepConversation(conversation());
  showHistory(open);
}

function edit(turn) {
  if (running) return;
  editing = turn;
  prompt.value = turn.asked;
  prompt.focus();
}

// A question that is asked anew takes the place of its turn and of those after it.
function dropEdited() {
  if (!editing) return;
  const place = turns.indexOf(editing);
  for (const turn of place < 0 ? [] : turns.slice(place)) turn.remove();
  if (place >= 0) turns = turns.slice(0, place);
  editing = null;
}

async function open(conversation) {
  startOver();
  id = conversation.id;
  find("system").value = conversation.system ?? "";
  for (const { asked, ...record } of conversation.turns) {
    const turn = new Turn(asked, new Answer(key.value));
    turns = [...turns, turn];
    log.append(...turn.elements);
    await turn.answer.restore(record);
    finish(turn);
  }
  showEnd();
}

function giveUp(turn, former, error) {
  failed = turn;
  if (former) {
    former.show(true);
    turns = [...turns, former];
    turn.question.remove();
  } else if (!prompt.value.trim()) {
    prompt.value = turn.asked;
  }
  turn.reply.classList.add("failed");
  const stopped = error?.name === "AbortError";
  const text = stopped ? "Stopped before the answer began."
    : error?.message ?? "The model ended its answer at once, without a word.";
  const retry = button("Retry", () => {
    if (prompt.value === turn.asked) prompt.value = "";
    ask(turn.asked, former);
  });
  if (error?.needsKey) find("options").open = true;
  turn.note(text, { alert: Boolean(error) && !stopped, buttons: [retry] });
  showEnd();
  if (error?.needsKey) key.focus();
  else focusPrompt();
}

// On a touch screen the focus would open the keyboard, over the answer.
function focusPrompt() {
  if (matchMedia("(pointer: fine)").matches) prompt.focus();
}

function submit() {
  const asked = prompt.value.trim();
  if (!asked || running) return;
  prompt.value = "";
  dropEdited();
  ask(asked);
}

function startOver() {
  running?.abort();
  setRunning(null);
  turns = [];
  failed = editing = id = null;
  log.replaceChildren();
  forgetToken();
  focusPrompt();
}

export function startChat() {
  key.value = sessionStorage.getItem("key") ?? "";
  key.addEventListener("change", () => sessionStorage.setItem("key", key.value));
  log.addEventListener("scroll", () => {
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 60) follows = true;
    else if (log.scrollTop < scrolledTo) follows = false;
    scrolledTo = log.scrollTop;
  });
  // the log shrinks when a panel or the keyboard of a phone opens
  new ResizeObserver(() => follows && showEnd()).observe(log);
  find("form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  find("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  find("clear").addEventListener("click", startOver);
  find("export").addEventListener("click", () => exportConversation(conversation()));
  showHistory(open);
}
