// Tokens of answers: a span for each, and what is known of the one that is pointed at.

const SAY = {
  sampled: "sampled by the model",
  accepted: "drafted and accepted",
  corrected: "corrected: the draft here was refused",
};
const shown = document.getElementById("token");
let chosen = null;

export function tokenSpan(token) {
  const span = document.createElement("span");
  span.className = `token ${token.origin}`;
  span.textContent = token.text;
  span.known = token;
  return span;
}

function choose(span) {
  chosen?.classList.remove("chosen");
  chosen = span;
  if (!span) return;
  span.classList.add("chosen");
  span.scrollIntoView({ block: "nearest" });
  shown.textContent = describe(span.known);
}

function describe({ text, origin, step, logprob }) {
  const probability = logprob === null ? "" : `, logprob ${logprob.toFixed(3)} (${percent(logprob)})`;
  return `${JSON.stringify(text)}: ${SAY[origin]}, in step ${step}${probability}`;
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share.toPrecision(share >= 99.95 ? 4 : 3)} %`;
}

// The answer is one stop of the Tab key; the arrows go from token to token within it.
export function makeInspectable(text) {
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".token");
    if (span) choose(span);
  });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    const spans = [...text.querySelectorAll(".token")].filter((span) => span.textContent);
    if (move === undefined || !spans.length) return;
    event.preventDefault();
    const place = spans.indexOf(chosen);
    const next = place < 0 ? (move > 0 ? 0 : spans.length - 1) : place + move;
    choose(spans[Math.max(0, Math.min(spans.length - 1, next))]);
  });
}
