// Conversations kept in this browser, and nowhere else.

import { messagesOf } from "./messages.js";

const KEY = "anabranch-conversations";
const MOST = 50;

export function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? [];
  } catch {
    return [];
  }
}

// The newest first. Where the browser's room is used up, the oldest are dropped.
export function keepConversation(conversation) {
  let all = [conversation, ...kept().filter((each) => each.id !== conversation.id)].slice(0, MOST);
  while (all.length) {
    try {
      localStorage.setItem(KEY, JSON.stringify(all));
      return;
    } catch {
      all = all.slice(0, -1);
    }
  }
}

export function dropConversation(id) {
  localStorage.setItem(KEY, JSON.stringify(kept().filter((each) => each.id !== id)));
}

export function exportConversation(conversation) {
  const messages = messagesOf(conversation.system, conversation.turns);
  const text = JSON.stringify({ title: conversation.title, messages }, null, 2);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
