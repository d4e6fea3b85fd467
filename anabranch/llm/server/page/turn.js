// One question and its answer, as they stand in the conversation.

export function made(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function button(text, act) {
  const element = made("button", "small", text);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

function article(kind, who, content) {
  const element = made("article", `turn ${kind}`);
  element.append(made("h3", "", who), content);
  return element;
}

export class Turn {
  constructor(asked, answer) {
    this.asked = asked;
    this.answer = answer;
    this.question = article("question", "You", made("div", "text", asked));
    this.reply = article("reply", "Model", answer.element);
  }

  get elements() {
    return [this.question, this.reply];
  }

  show(shown) {
    for (const element of this.elements) element.hidden = !shown;
  }

  remove() {
    for (const element of this.elements) element.remove();
  }

  note(text, { alert = false, buttons = [] } = {}) {
    const note = made("div", alert ? "note error" : "note");
    if (alert) note.setAttribute("role", "alert");
    note.append(made("p", "", text), ...buttons);
    this.reply.append(note);
  }

  // Acts on a finished answer: retry, go on with it, edit the question.
  finish({ retry, proceed, edit }) {
    this.reply.querySelector(".bar")?.remove();
    const bar = made("div", "bar");
    const copy = button("Copy", async () => {
      copy.textContent = await copied(this.answer.said) ? "Copied" : "Cannot copy here";
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
    const again = button("Retry", retry);
    again.classList.add("retry");
    const onward = button("Continue", proceed);
    onward.classList.add("onward");
    bar.append(made("span", "figures", this.answer.figures), copy, onward, again);
    this.reply.append(bar);
    if (!this.question.querySelector("button")) this.question.append(button("Edit", edit));
  }
}

// Browsers offer the clipboard only to pages from this machine or over HTTPS.
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = made("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
