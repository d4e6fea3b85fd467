// The page: the chat, and the engine's counts, which are asked for every second.

import { drawBars, drawLine, drawShares } from "./charts.js";
import { startChat } from "./chat.js";

const SECONDS = 61;
// "scoring" is the model's pass in steps that check guesses, "verification" the choice after it.
const STAGES = {
  model: "Model",
  scoring: "Model",
  sampling: "Choosing tokens",
  verification: "Choosing tokens",
  proposal: "Guessing ahead",
};
const find = (id) => document.getElementById(id);
const rates = [], usages = [];
let before = null, stages = {};

function remember(values, value) {
  values.push(value);
  if (values.length > SECONDS) values.shift();
}

function difference(now) {
  const seconds = (now.time - before.time) / 1000;
  remember(rates, Math.max(0, now.output_tokens - before.output_tokens) / seconds);
  const steps = now.steps - before.steps;
  if (steps > 0) {
    stages = {};
    for (const [stage, sum] of Object.entries(now.stage_ms)) {
      const name = STAGES[stage] ?? stage;
      stages[name] = (stages[name] ?? 0) + (sum - (before.stage_ms[stage] ?? 0)) / steps;
    }
  }
}

function milliseconds(value) {
  return `${value.toFixed(value < 100 ? 2 : 0)} ms`;
}

function drawAll(now) {
  const shares = now.drafted_at.map((drafted, i) => drafted ? now.accepted_at[i] / drafted : 0);
  const accepted = now.draft_tokens ? (100 * now.accepted_tokens) / now.draft_tokens : 0;
  drawShares("acceptance", shares, now.draft_tokens ? `${accepted.toFixed(1)} % of all` : "");
  const rate = rates.at(-1) ?? 0;
  drawLine("rate", rates, { length: SECONDS, words: rate.toFixed(1), unit: String });
  const usage = 100 * now.cache_usage;
  drawLine("cache", usages, {
    length: SECONDS, words: `${usage.toFixed(1)} %`, unit: (value) => `${value} %`,
  });
  const entries = Object.entries(stages).map(
    ([name, value]) => ({ name, value, label: milliseconds(value) }));
  const total = entries.reduce((sum, entry) => sum + entry.value, 0);
  drawBars("stages", entries, entries.length ? milliseconds(total) : "no step yet");
}

function writeCounts(now) {
  const counts = {
    "Running / waiting": `${now.running} / ${now.waiting}`,
    "Steps": now.steps.toLocaleString("en"),
    "Tokens generated": now.output_tokens.toLocaleString("en"),
    "Guessed / accepted": `${now.draft_tokens.toLocaleString("en")} / ${now.accepted_tokens.toLocaleString("en")}`,
    "Preemptions": now.preemptions,
  };
  find("counts").replaceChildren(...Object.entries(counts).flatMap(([name, value]) => {
    const term = document.createElement("dt"), said = document.createElement("dd");
    term.textContent = name;
    said.textContent = value;
    return [term, said];
  }));
}

function sayHealth(trouble) {
  const health = find("health");
  const said = trouble ?? "";
  if (health.textContent !== said) health.textContent = said;
  health.classList.toggle("bad", Boolean(trouble));
}

async function readStats() {
  let answer;
  try {
    answer = await fetch("/stats");
  } catch {
    return sayHealth("The server cannot be reached.");
  }
  if (!answer.ok) return sayHealth(`The server answered with status ${answer.status}.`);
  const now = { ...(await answer.json()), time: performance.now() };
  find("model").textContent = `${now.model} on ${now.device}, context ${now.max_model_len}`;
  if (before) difference(now);
  remember(usages, 100 * now.cache_usage);
  before = now;
  drawAll(now);
  writeCounts(now);
  sayHealth(now.trouble);
}

async function poll() {
  try {
    await readStats();
  } finally {
    setTimeout(poll, 1000);
  }
}

// Both explain or watch; on a phone they would push the message field off the screen.
const roomy = matchMedia("(min-width: 50.01rem)");
const unfold = () => {
  for (const id of ["legend", "engine"]) find(id).open = roomy.matches;
};
roomy.addEventListener("change", unfold);
unfold();
startChat();
poll();
