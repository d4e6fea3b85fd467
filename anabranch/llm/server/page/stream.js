// Requests of the page to its server. Errors say what to do about them.

export class RequestError extends Error {
  constructor(message, { needsKey = false } = {}) {
    super(message);
    this.needsKey = needsKey;
  }
}

const UNREACHABLE = `The server at ${location.origin} cannot be reached. ` +
  "Check that it is running (anabranch serve starts it), then try again.";
const CUT_OFF = "The connection to the server was lost before the answer was complete. Try again.";

export async function post(path, body, { key, signal }) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { method: "POST", headers, signal, body: JSON.stringify(body) });
  } catch (error) {
    throw error.name === "AbortError" ? error : new RequestError(UNREACHABLE);
  }
  if (answer.ok) return answer;
  if (answer.status !== 401) throw new RequestError(await reason(answer));
  throw new RequestError(key
    ? "The server refused the API key. Correct it under Options, then try again."
    : "The server needs an API key. Enter it under Options, then try again.",
  { needsKey: true });
}

// Server-sent events of a completion, one parsed chunk at a time.
export async function* streamChat(body, { key, signal }) {
  const answer = await post("/v1/chat/completions", { ...body, stream: true }, { key, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const value = await nextPiece(reader);
    const events = (unread + value).split("\n\n");
    unread = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RequestError(sentence(chunk.error.message));
      yield chunk;
    }
  }
}

async function nextPiece(reader) {
  let piece;
  try {
    piece = await reader.read();
  } catch (error) {
    throw error.name === "AbortError" ? error : new RequestError(CUT_OFF);
  }
  if (piece.done) throw new RequestError(CUT_OFF);
  return piece.value;
}

async function reason(answer) {
  try {
    return sentence((await answer.json()).error.message);
  } catch {
    return `The server answered with status ${answer.status}.`;
  }
}

function sentence(message) {
  return message[0].toUpperCase() + message.slice(1) + (/[.!?]$/.test(message) ? "" : ".");
}
