// Small charts, drawn as SVG.

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 360, HEIGHT = 96, BOTTOM = 16, TOP = 8;

function element(name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// One picture in a figure, with what it shows in words beside its title.
function draw(id, height, words, children) {
  const figure = document.getElementById(id);
  let output = figure.querySelector("output");
  if (!output) {
    output = document.createElement("output");
    output.setAttribute("aria-live", "off");
    figure.querySelector("figcaption").append(output);
  }
  output.textContent = words;
  const title = figure.querySelector("figcaption").firstChild.textContent;
  const picture = element("svg", {
    viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}: ${words}`,
  });
  picture.append(...children);
  figure.querySelector("svg")?.remove();
  figure.append(picture);
}

export function drawLine(id, values, { length, words, unit }) {
  const top = niceTop(Math.max(...values, 0));
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const x = (place) => WIDTH - ((values.length - 1 - place) * (WIDTH - 40)) / (length - 1);
  const points = values.map((value, place) => `${x(place).toFixed(1)},${y(value).toFixed(1)}`);
  const children = [
    element("line", { class: "axis", x1: 40, x2: WIDTH, y1: y(0), y2: y(0) }),
    element("line", { class: "axis", x1: 40, x2: WIDTH, y1: y(top), y2: y(top) }),
    element("text", { x: 34, y: y(top) + 8, "text-anchor": "end" }, unit(top)),
    element("text", { x: 34, y: y(0), "text-anchor": "end" }, unit(0)),
    element("text", { x: 40, y: HEIGHT - 4 }, `${length - 1} s ago`),
    element("text", { x: WIDTH, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
  ];
  if (values.length > 1) {
    const corners = `${x(0)},${y(0)} ${points.join(" ")} ${WIDTH},${y(0)}`;
    children.push(element("polygon", { class: "area", points: corners }));
    children.push(element("polyline", { class: "line", points: points.join(" ") }));
  }
  draw(id, HEIGHT, words, children);
}

// Upright bars from 0 to 1, one for each place of a guess.
export function drawShares(id, shares, words) {
  const wide = (WIDTH - 8) / Math.max(shares.length, 1), room = HEIGHT - TOP - BOTTOM - 14;
  const children = shares.flatMap((share, place) => {
    const x = 4 + place * wide, width = Math.min(wide - 6, 48), tall = share * room;
    const middle = x + width / 2, y = TOP + 14 + room;
    return [
      element("rect", { class: "rest", x, width, y: y - room, height: room, rx: 3 }),
      element("rect", { class: "bar", x, width, y: y - tall, height: tall, rx: 3 }),
      element("text", { class: "value", x: middle, y: y - room - 4, "text-anchor": "middle" },
        `${Math.round(100 * share)} %`),
      element("text", { x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, place + 1),
    ];
  });
  if (!shares.length) {
    children.push(element("text", { x: 4, y: HEIGHT / 2 }, "no guesses yet"));
  }
  draw(id, HEIGHT, words, children);
}

// Lying bars, each named and with its value.
export function drawBars(id, entries, words) {
  const row = 22, longest = Math.max(...entries.map((entry) => entry.value), 1e-9);
  const children = entries.flatMap(({ name, value, label }, place) => {
    const y = place * row;
    return [
      element("text", { x: 0, y: y + 15 }, name),
      element("rect", {
        class: `s${(place % 5) + 1}`, x: 100, y: y + 5, height: 12, rx: 3,
        width: Math.max(1, (value / longest) * (WIDTH - 100 - 66)),
      }),
      element("text", { class: "value", x: WIDTH, y: y + 15, "text-anchor": "end" }, label),
    ];
  });
  draw(id, Math.max(entries.length * row, row), words, children);
}

function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}
