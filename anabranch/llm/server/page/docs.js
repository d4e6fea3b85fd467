// The OpenAPI document, written out: every path, and each field of its body.

import { choices, nameOf, rangeWords, typeWords } from "./schema.js";

const main = document.getElementById("paths");

function made(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function facts(field, required) {
  const known = { Range: rangeWords(field) };
  if (!required) known.Default = field.default === undefined || field.default === null
    ? "not set" : JSON.stringify(field.default);
  if (field.examples) known.Example = JSON.stringify(field.examples[0]);
  const list = made("dl", undefined, "facts");
  for (const [name, value] of Object.entries(known)) {
    if (!value) continue;
    const pair = made("div"), said = made("dd");
    said.append(made(name === "Range" || value === "not set" ? "span" : "code", value));
    pair.append(made("dt", name), said);
    list.append(pair);
  }
  return list;
}

// Schemas that a field is made of, such as the messages of a conversation.
function partsOf(field) {
  return choices(field).flatMap((choice) =>
    choice.$ref ? [nameOf(choice.$ref)] : choice.items ? partsOf(choice.items) : []);
}

function fieldItem(schemas, name, field, required) {
  const item = made("li", undefined, "field");
  const line = made("p", undefined, "name");
  line.append(made("code", name), made("span", typeWords(field), "type"));
  if (required) line.append(made("span", "required", "required"));
  item.append(line);
  if (field.description) item.append(made("p", field.description));
  item.append(facts(field, required));
  for (const part of partsOf(field)) {
    const details = made("details");
    details.append(made("summary", `Fields of ${part}`), fieldList(schemas, schemas[part]));
    item.append(details);
  }
  return item;
}

function fieldList(schemas, schema) {
  const list = made("ul", undefined, "fields");
  const named = Object.entries(schema.properties ?? {});
  const isRequired = (name) => Boolean(schema.required?.includes(name));
  named.sort(([one], [other]) => isRequired(other) - isRequired(one));
  list.append(...named.map(([name, field]) => fieldItem(schemas, name, field, isRequired(name))));
  return list;
}

function command(path, method, schema) {
  const url = `${location.origin}${path}`;
  if (!schema) return `curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${url}`;
  const named = Object.entries(schema.properties ?? {});
  const needed = named.filter(([name]) => schema.required?.includes(name));
  const body = Object.fromEntries((needed.length ? needed : named.slice(1, 2)).map(
    ([name, field]) => [name, field.examples?.[0]]));
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${url} \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`;
}

function describe(document_, path, method, operation) {
  const article = made("article");
  article.id = `${method}${path}`;
  const title = made("h2");
  title.append(made("span", method.toUpperCase(), "method"), made("code", path));
  const body = operation.requestBody?.content["application/json"]?.schema;
  const schema = body?.$ref && document_.components.schemas[nameOf(body.$ref)];
  article.append(title, made("p", operation.description ?? operation.summary),
    made("h3", "Example"), made("pre", command(path, method, schema)));
  if (schema) article.append(made("h3", "Fields"), fieldList(document_.components.schemas, schema));
  return article;
}

function contents(articles) {
  const list = made("ul", undefined, "contents");
  list.append(...articles.map((article) => {
    const item = made("li"), link = made("a");
    link.href = `#${encodeURIComponent(article.id)}`;
    link.append(made("code", article.querySelector("h2 code").textContent));
    item.append(link);
    return item;
  }));
  return list;
}

async function show() {
  const answer = await fetch("/openapi.json").catch(() => null);
  if (!answer?.ok) {
    main.replaceChildren(made("p", "The OpenAPI document cannot be read. Check that the server is " +
      "running (anabranch serve starts it), then load this page again."));
    return;
  }
  const document_ = await answer.json();
  const articles = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) =>
      describe(document_, path, method, operation)));
  main.replaceChildren(contents(articles), ...articles);
}

show();
