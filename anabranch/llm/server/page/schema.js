// JSON schemas in words: the type of a field and the range of its values.

export function nameOf(reference) {
  return reference.split("/").at(-1);
}

// All that a value may be, null apart: every optional field may be null.
export function choices(schema) {
  return (schema.anyOf ?? [schema]).filter((choice) => choice.type !== "null");
}

export function typeWords(schema) {
  const kinds = choices(schema).map((choice) => {
    if (choice.$ref) return nameOf(choice.$ref);
    if (choice.const !== undefined || choice.enum) return "one of a few values";
    if (choice.type === "array") return `list of ${choice.items ? typeWords(choice.items) : "anything"}`;
    if (choice.type === "object") {
      const held = choice.additionalProperties;
      return held?.type ? `map to ${typeWords(held)}` : "object";
    }
    return { string: "text", boolean: "true or false" }[choice.type] ?? choice.type ?? "anything";
  });
  return [...new Set(kinds)].join(" or ");
}

// Of the first choice that has one; the items of lists and maps count.
export function rangeWords(schema) {
  for (const choice of choices(schema)) {
    const words = boundWords(choice);
    if (words) return words;
    const held = choice.items ?? choice.additionalProperties;
    const within = typeof held === "object" ? rangeWords(held) : "";
    if (within) return `each ${within}`;
  }
  return "";
}

function boundWords(schema) {
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.minItems !== undefined || schema.maxItems !== undefined) {
    return schema.maxItems === 0 ? "empty" : `at least ${schema.minItems} item`;
  }
  if (schema.maxLength !== undefined) return `at most ${schema.maxLength} characters`;
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low === undefined && high === undefined) return "";
  if (schema.minimum !== undefined && schema.maximum !== undefined) {
    return `${number(low)} to ${number(high)}`;
  }
  const lowest = schema.minimum !== undefined ? `at least ${number(low)}` : `above ${number(low)}`;
  const highest = schema.maximum !== undefined ? `at most ${number(high)}` : `below ${number(high)}`;
  return [low !== undefined && lowest, high !== undefined && highest].filter(Boolean).join(", ");
}

function number(value) {
  const power = Math.log2(Math.abs(value));
  const large = power >= 20 && Number.isInteger(power);
  const words = large ? `${value < 0 ? "-" : ""}2^${power}` : String(value);
  return words.replace(/^-/, "\u2212");
}
