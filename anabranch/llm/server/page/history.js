// The list of kept conversations.

import { dropConversation, kept } from "./conversations.js";
import { button, made } from "./turn.js";

const list = document.getElementById("kept");

export function showHistory(open) {
  const items = kept().map((conversation) => {
    const item = made("li");
    const drop = button("Delete", () => {
      dropConversation(conversation.id);
      showHistory(open);
    });
    drop.setAttribute("aria-label", `Delete ${conversation.title}`);
    item.append(button(conversation.title, () => open(conversation)), drop);
    return item;
  });
  list.replaceChildren(...items);
}
