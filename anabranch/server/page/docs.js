// The OpenAPI document, written out: every path with the fields of its body.

const main = document.getElementById("paths");

function made(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  if (schema.type === "object" && schema.additionalProperties?.type) {
    return `map to ${schema.additionalProperties.type}`;
  }
  return schema.type ?? "anything";
}

function fieldTable(schema) {
  const table = made("table");
  const head = made("tr");
  head.append(...["Field", "Type", "Meaning"].map((title) => {
    const cell = made("th", title);
    cell.scope = "col";
    return cell;
  }));
  table.append(head);
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = made("tr");
    const named = made("th");
    named.scope = "row";
    named.append(made("code", name));
    if (schema.required?.includes(name)) named.append(" (required)");
    const initial = field.default !== undefined && field.default !== null
      ? ` Default: ${JSON.stringify(field.default)}.` : "";
    row.append(named, made("td", typeOf(field)), made("td", (field.description ?? "") + initial));
    table.append(row);
  }
  const scroll = made("div", undefined, "scroll");
  scroll.append(table);
  return scroll;
}

function describe(document_, path, method, operation) {
  const article = made("article");
  const title = made("h2");
  title.append(made("span", method.toUpperCase(), "method"), made("code", path));
  article.append(title, made("p", operation.description ?? operation.summary));
  const body = operation.requestBody?.content["application/json"]?.schema;
  if (body?.$ref) {
    const schema = document_.components.schemas[body.$ref.split("/").at(-1)];
    article.append(fieldTable(schema));
  }
  return article;
}

const document_ = await (await fetch("/openapi.json")).json();
main.replaceChildren(...Object.entries(document_.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, operation]) =>
    describe(document_, path, method, operation))));
