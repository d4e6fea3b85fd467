// Tokens of answers: their spans, and what is known of the one that is pointed at.

const SAY = {
  sampled: "written by the model",
  accepted: "guessed ahead, the model agreed",
  corrected: "guessed wrong, corrected by the model",
};
const shown = document.getElementById("token");
let chosen = null;

export function tokenSpan(token, text = token.text) {
  const span = document.createElement("span");
  span.className = `token ${token.origin}`;
  span.classList.toggle("chosen", token === chosen);
  span.textContent = text;
  span.known = token;
  return span;
}

export function forgetToken() {
  chosen = null;
  shown.textContent = "";
}

// A token that Markdown cuts into pieces has several spans.
function choose(answer, token) {
  chosen = token;
  shown.textContent = describe(token);
  for (const span of document.querySelectorAll(".token.chosen")) span.classList.remove("chosen");
  const spans = spansOf(answer).filter((span) => span.known === token);
  for (const span of spans) span.classList.add("chosen");
  spans[0]?.scrollIntoView({ block: "nearest" });
}

function spansOf(answer) {
  return [...answer.querySelectorAll(".token")].filter((span) => span.textContent);
}

function describe({ text, origin, step, logprob }) {
  const chance = logprob === null ? "" : `, ${percent(logprob)} likely (logprob ${logprob.toFixed(3)})`;
  return `${JSON.stringify(text)}: ${SAY[origin]}, step ${step}${chance}`;
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share.toPrecision(share >= 99.95 ? 4 : 3)} %`;
}

// The answer is one stop of the Tab key; the arrows go from token to token within it.
export function makeInspectable(answer) {
  answer.tabIndex = 0;
  answer.setAttribute("role", "group");
  answer.setAttribute("aria-label", "Answer, by token");
  for (const kind of ["pointerover", "click"]) {
    answer.addEventListener(kind, (event) => {
      const span = event.target.closest(".token");
      if (span && span.known !== chosen) choose(answer, span.known);
    });
  }
  answer.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    const tokens = [...new Set(spansOf(answer).map((span) => span.known))];
    if (move === undefined || !tokens.length) return;
    event.preventDefault();
    const place = tokens.indexOf(chosen);
    const next = place < 0 ? (move > 0 ? 0 : tokens.length - 1) : place + move;
    choose(answer, tokens[Math.max(0, Math.min(tokens.length - 1, next))]);
  });
}
