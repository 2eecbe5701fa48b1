// A small Markdown: from text to DOM nodes. Text of a model becomes text nodes and nothing else, links
// go to http and https alone, and images are shown as links: nothing is loaded.

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE =
  /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^\s*](?:[\s\S]*?[^\s*])?)\*\*|__([^\s_](?:[\s\S]*?[^\s_])?)__|\*([^\s*](?:[^*]*[^\s*])?)\*|(?<![\w_])_([^\s_](?:[^_]*[^\s_])?)_(?![\w_])|~~([^~]+)~~|!?\[([^\]]*)\]\(([^)\s]+)[^)]*\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/;
const DEEPEST = 6; // of lists and quotes; deeper ones stay text
const LONGEST_LINE = 4000; // characters; marks in longer lines stay text: matching takes the square of it

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === undefined || value === null) continue;
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function copyButton(text, name) {
  const made = element("button", { type: "button", className: "copy quiet small", ariaLabel: name }, "Copy");
  made.addEventListener("click", async () => {
    await copy(text());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  return made;
}

// The clipboard's own interface is there on https and on this machine alone.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = element("textarea", { value: text, className: "hidden" });
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

export function render(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const [node, next] = block(lines, at, depth);
    found.push(node);
    at = next;
  }
  return found;
}

function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (depth < DEEPEST && /^\s{0,3}>/.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && TABLE_LINE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return table(lines, at);
  return paragraph(lines, at, depth);
}

function fenced(lines, at, fence) {
  const body = [];
  let next = at + 1;
  while (next < lines.length && !lines[next].trim().startsWith(fence[1])) body.push(lines[next++]);
  const code = element("code", {}, body.join("\n"));
  const copy = copyButton(() => body.join("\n"), "Copy this code");
  const head = element("div", { className: "code-head dim small" }, fence[2] || "code", copy);
  return [element("div", { className: "code-block" }, head, element("pre", { tabIndex: 0 }, code)), next + 1];
}

function quote(lines, at, depth) {
  const body = [];
  while (at < lines.length && /^\s{0,3}>/.test(lines[at])) body.push(lines[at++].replace(/^\s{0,3}> ?/, ""));
  return [element("blockquote", {}, ...blocks(body, depth + 1)), at];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first[2]);
  const made = element(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(first[2], 10) } : {});
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > first[1].length + 1 || /\d/.test(item[2]) !== isOrdered) break;
    const body = [item[3]];
    const inset = item[1].length;
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const isBlank = !line.trim();
      const depthOf = line.length - line.trimStart().length;
      if (isBlank && !(lines[at + 1]?.trim() && lines[at + 1].length - lines[at + 1].trimStart().length > inset)) break;
      if (!isBlank && depthOf <= inset && (ITEM.test(line) || FENCE.test(line) || HEADING.test(line))) break;
      if (!isBlank && depthOf <= inset && !body[body.length - 1].trim()) break;
      body.push(line.slice(Math.min(depthOf, inset + 2)));
      at += 1;
    }
    const inner = blocks(body, depth + 1);
    const isTight = inner.length > 0 && inner[0].tagName === "P";
    made.append(element("li", {}, ...(isTight ? [...inner[0].childNodes, ...inner.slice(1)] : inner)));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  return [made, at];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table(lines, at) {
  const head = element("tr", {}, ...cells(lines[at]).map((cell) => element("th", {}, ...inline(cell))));
  const body = element("tbody");
  at += 2;
  while (at < lines.length && lines[at].includes("|")) {
    body.append(element("tr", {}, ...cells(lines[at]).map((cell) => element("td", {}, ...inline(cell)))));
    at += 1;
  }
  return [element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), body)), at];
}

function paragraph(lines, at, depth) {
  const body = [lines[at++].trim()];
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) break;
    if (depth < DEEPEST && (ITEM.test(line) || /^\s{0,3}>/.test(line))) break;
    body.push(line.trim());
    at += 1;
  }
  const nodes = body.flatMap((line, index) => (index ? [element("br"), ...inline(line)] : inline(line)));
  return [element("p", {}, ...nodes), at];
}

function inline(text, depth = 0) {
  const found = [];
  let rest = text;
  while (rest) {
    const match = depth < DEEPEST && rest.length <= LONGEST_LINE ? INLINE.exec(rest) : null;
    if (!match) {
      found.push(unescaped(rest));
      break;
    }
    if (match.index) found.push(unescaped(rest.slice(0, match.index)));
    found.push(span(match, depth));
    rest = rest.slice(match.index + match[0].length);
  }
  return found;
}

function span(match, depth) {
  const [whole, , code, bold, otherBold, italic, otherItalic, struck, label, target, url] = match;
  if (code !== undefined) return element("code", {}, code.trim());
  if (bold ?? otherBold) return element("strong", {}, ...inline(bold ?? otherBold, depth + 1));
  if (italic ?? otherItalic) return element("em", {}, ...inline(italic ?? otherItalic, depth + 1));
  if (struck) return element("del", {}, ...inline(struck, depth + 1));
  const address = target ?? url;
  if (!/^https?:\/\//i.test(address)) return document.createTextNode(whole);
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, label || address);
}

function unescaped(text) {
  return document.createTextNode(text.replace(/\\([\\`*_{}[\]()#+.!|~>-])/g, "$1"));
}
