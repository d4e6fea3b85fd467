// Turns as messages of the API. What is asked after a call of a tool is the tool's answer.

function asked(turn, former) {
  const calls = former?.calls ?? [];
  if (!calls.length) return [{ role: "user", content: turn.asked }];
  return calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: turn.asked }));
}

function answered({ said, calls }) {
  if (!calls?.length) return { role: "assistant", content: said };
  const made = calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.said },
  }));
  return { role: "assistant", content: said || null, tool_calls: made };
}

// `turns` are records: a question, and what is kept of its answer, which the last may lack.
export function messagesOf(system, turns) {
  const found = system ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, place) => {
    found.push(...asked(turn, turns[place - 1]));
    if (turn.said || turn.calls?.length) found.push(answered(turn));
  });
  return found;
}
