// The page: conversations, each with an answer of its own under way; parameters; the key; the views.

import { Api, ApiError, lasting } from "./api.js";
import { EngineView } from "./engine.js";
import { copyButton, element, render } from "./markdown.js";

const STORED = "quire.conversations";
const MOST_CONVERSATIONS = 50;
const MOST_STORED = 2_000_000; // characters in localStorage
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "tools", "more"];
const $ = (id) => document.getElementById(id);

const api = new Api();
let conversations = load();
let current = conversations[0] ?? add();
const answering = new Map(); // by conversation id: the AbortController of its answer

// ---- conversations

function load() {
  try {
    const found = JSON.parse(lasting.getItem(STORED) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => one && Array.isArray(one.messages)) : [];
  } catch {
    return [];
  }
}

function save() {
  const kept = conversations.filter((one) => one.messages.length).slice(0, MOST_CONVERSATIONS);
  let text = JSON.stringify(kept);
  while (text.length > MOST_STORED && kept.length > 1) {
    kept.pop();
    text = JSON.stringify(kept);
  }
  try {
    lasting.setItem(STORED, text.length > MOST_STORED ? "[]" : text);
  } catch {
    // full or forbidden: they live as long as the page
  }
}

function add() {
  const made = { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, messages: [], parameters: {} };
  conversations.unshift(made);
  return made;
}

function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return first ? first.content.trim().slice(0, 60) || "(empty)" : "New chat";
}

function open(conversation) {
  current = conversation;
  for (const name of FIELDS) $("composer").elements[name].value = conversation.parameters[name] ?? "";
  document.body.classList.remove("menu-open");
  $("menu").setAttribute("aria-expanded", "false");
  showAll();
}

function startNew() {
  const empty = conversations.find((one) => !one.messages.length);
  open(empty ?? add());
  $("message").focus();
}

function remove(conversation) {
  answering.get(conversation.id)?.abort();
  conversations = conversations.filter((one) => one !== conversation);
  save();
  open(current === conversation ? conversations[0] ?? add() : current);
}

function clearAll() {
  if (!confirm("Remove all conversations from this browser?")) return;
  for (const controller of answering.values()) controller.abort();
  conversations = [];
  lasting.removeItem(STORED);
  open(add());
}

// ---- what is shown

function showAll() {
  showList();
  $("messages").replaceChildren(...(current.messages.length ? current.messages.map(messageNode) : [welcome()]));
  $("messages").scrollTop = $("messages").scrollHeight;
  showBusy();
}

function welcome() {
  const text = "Ask something below. Several conversations can run at once: they share the engine's batch.";
  return element("p", { className: "welcome dim" }, text);
}

function showList() {
  $("conversations").replaceChildren(
    ...conversations.map((one) => {
      const name = element("button", { className: "name", type: "button" }, titleOf(one));
      if (one === current) name.setAttribute("aria-current", "true");
      if (answering.has(one.id)) name.prepend(element("i", { className: "busy", role: "img", ariaLabel: "answering" }));
      name.addEventListener("click", () => open(one));
      const away = element("button", { className: "away quiet", type: "button", ariaLabel: `Remove ${titleOf(one)}` }, "×");
      away.addEventListener("click", () => remove(one));
      return element("li", {}, name, away);
    }),
  );
}

function showBusy() {
  const isBusy = answering.has(current.id);
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("messages").setAttribute("aria-busy", String(isBusy));
}

function messageNode(message, index) {
  const node = element("article", { className: `message ${message.role}` });
  node.dataset.state = message.state ?? "done";
  node.dataset.role = message.role;
  node.setAttribute("aria-label", { user: "You", assistant: "Model", tool: "Tool result" }[message.role]);
  fill(node, message, index);
  return node;
}

function fill(node, message, index) {
  const parts = [];
  if (message.reasoning) parts.push(reasoningNode(node, message));
  if (message.role === "tool") parts.push(element("div", { className: "dim small" }, `result of ${message.name ?? "a tool"}`));
  if (message.role === "assistant") {
    parts.push(element("div", { className: "text" }, render(message.content)));
    if (message.state === "streaming" && !message.content && !message.reasoning && !message.calls?.length) {
      parts.push(element("span", { className: "cursor", role: "img", ariaLabel: "waiting for the first token" }));
    }
  } else {
    parts.push(element("div", { className: "text plain" }, message.content));
  }
  for (const call of message.calls ?? []) parts.push(callNode(call));
  if (message.error) parts.push(element("p", { className: "error", role: "alert" }, message.error));
  if (message.state !== "streaming") parts.push(actions(message, index));
  node.replaceChildren(...parts);
}

function reasoningNode(node, message) {
  const wasOpen = node.querySelector("details.reasoning")?.open ?? false;
  const words = message.state === "streaming" && !message.content ? "Thinking …" : "Reasoning";
  return element(
    "details",
    { className: "reasoning", open: wasOpen },
    element("summary", {}, words),
    element("div", { className: "text" }, render(message.reasoning)),
  );
}

function callNode(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // it still comes
  }
  return element(
    "div",
    { className: "call" },
    element("div", { className: "call-name" }, element("span", { className: "dim" }, "calls "), element("code", {}, call.name)),
    element("pre", { tabIndex: 0 }, shown),
  );
}

function actions(message, index) {
  const row = element("div", { className: "actions" });
  const button = (text, act) => {
    const made = element("button", { type: "button", className: "quiet small" }, text);
    made.addEventListener("click", act);
    row.append(made);
  };
  if (message.role === "user") button("Edit", () => edit(message, index));
  if (message.role === "assistant") {
    button("Retry", () => retry(index));
    row.append(copyButton(() => message.content, "Copy"));
    if (message.calls?.length && index === current.messages.length - 1) button("Give results", () => giveResults(index));
  }
  if (message.note) row.append(element("span", { className: "dim small note" }, message.note));
  return row;
}

function edit(message, index) {
  if (answering.has(current.id)) return;
  const node = $("messages").children[index];
  const box = element("textarea", { className: "edit", value: message.content, rows: 3, ariaLabel: "Edit your message" });
  const again = element("button", { type: "button", className: "primary" }, "Send again");
  const cancel = element("button", { type: "button" }, "Cancel");
  const finish = () => {
    current.messages.length = index;
    send(box.value);
  };
  again.addEventListener("click", finish);
  cancel.addEventListener("click", showAll);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      finish();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      showAll();
    }
  });
  node.replaceChildren(box, element("div", { className: "actions" }, again, cancel));
  box.focus();
}

function retry(index) {
  if (answering.has(current.id)) return;
  current.messages.length = index;
  answer(current);
}

// A box for the result of each call of the last message; then the answer goes on.
function giveResults(index) {
  const calls = current.messages[index].calls;
  const boxes = calls.map((call) => element("textarea", { rows: 2, ariaLabel: `Result of ${call.name}`, placeholder: `result of ${call.name}` }));
  const go = element("button", { type: "button", className: "primary" }, "Send results");
  go.addEventListener("click", () => {
    calls.forEach((call, n) => {
      current.messages.push({ role: "tool", name: call.name, callId: call.id, content: boxes[n].value });
    });
    answer(current);
  });
  $("messages").children[index].append(element("div", { className: "results" }, ...boxes, go));
  boxes[0].focus();
}

// ---- answers

function bodyOf(conversation) {
  const given = conversation.parameters;
  const body = { messages: [] };
  if (!$("models").hidden) body.model = $("models").value;
  if (given.system?.trim()) body.messages.push({ role: "system", content: given.system });
  for (const message of conversation.messages) {
    if (message.role === "assistant" && !message.content && !message.calls?.length) continue;
    body.messages.push(sent(message));
  }
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (given[name] !== undefined && given[name] !== "") body[name] = Number(given[name]);
  }
  if (given.tools?.trim()) body.tools = parsed(given.tools, "Tools", Array.isArray, "a list");
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const more = given.more?.trim() ? parsed(given.more, "More fields", isObject, "an object") : {};
  return { ...body, ...more };
}

function sent(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  const made = { role: message.role, content: message.content };
  if (message.calls?.length) {
    made.content = message.content || null;
    made.tool_calls = message.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return made;
}

function parsed(text, where, isRight, kind) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new ApiError(400, `${where}: no JSON: ${error.message}`);
  }
  if (!isRight(value)) throw new ApiError(400, `${where} must be ${kind} in JSON`);
  return value;
}

function send(text) {
  if (!text.trim() || answering.has(current.id)) return;
  current.messages.push({ role: "user", content: text });
  conversations = [current, ...conversations.filter((one) => one !== current)];
  answer(current);
}

async function answer(conversation) {
  const message = { role: "assistant", content: "", state: "streaming" };
  const controller = new AbortController();
  answering.set(conversation.id, controller);
  conversation.messages.push(message);
  if (conversation === current) showAll();
  else showList();
  const times = { started: performance.now(), first: null };
  try {
    for await (const chunk of api.chat(bodyOf(conversation), controller.signal)) {
      take(chunk, message, times);
      refresh();
    }
    message.state = "done";
  } catch (error) {
    failed(error, message);
  }
  message.note ??= message.state === "stopped" ? "stopped" : undefined;
  answering.delete(conversation.id);
  save();
  showList();
  if (conversation === current) {
    refresh.now(conversation, message);
    showBusy();
  }
  $("announce").textContent = { done: "Answer complete", stopped: "Stopped", error: "The answer failed" }[message.state];
}

function failed(error, message) {
  if (error.name === "AbortError") {
    message.state = "stopped";
    return;
  }
  message.state = message.content || message.calls?.length ? "stopped" : "error";
  message.error = error instanceof ApiError ? error.message : `this page failed: ${error.message}`;
  if (error.status === 401) keyRefused(error.message);
}

function take(chunk, message, times) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  if (delta.content) message.content += delta.content;
  for (const part of delta.tool_calls ?? []) takeCall(part, message);
  if (times.first === null && (delta.content || thought || delta.tool_calls)) times.first = performance.now();
  if (choice?.finish_reason === "length") message.cut = true;
  if (chunk.usage) message.note = noteOf(chunk.usage, message, times);
}

function takeCall(part, message) {
  message.calls ??= [];
  const call = (message.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
  if (part.id) call.id = part.id;
  if (part.function?.name) call.name += part.function.name;
  if (part.function?.arguments) call.arguments += part.function.arguments;
}

function noteOf(usage, message, times) {
  const seconds = (performance.now() - (times.first ?? times.started)) / 1000;
  const count = usage.completion_tokens;
  const words = [`${count} tokens`];
  if (count > 1 && seconds > 0) words.push(`${((count - 1) / seconds).toFixed(1)}/s`);
  if (times.first !== null) words.push(`first after ${((times.first - times.started) / 1000).toFixed(2)} s`);
  if (message.cut) words.push("cut at the limit");
  return words.join(" · ");
}

// Show what came for the conversation that is open, once a frame.
function refresh() {
  refresh.pending ??= requestAnimationFrame(() => {
    refresh.pending = null;
    const message = current.messages.findLast((one) => one.state === "streaming");
    if (message) refresh.now(current, message);
  });
}
refresh.pending = null;
refresh.now = (conversation, message) => {
  if (conversation !== current) return;
  const box = $("messages");
  const index = conversation.messages.indexOf(message);
  const node = box.children[index];
  if (!node) return;
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  node.dataset.state = message.state;
  fill(node, message, index);
  if (isAtEnd) box.scrollTop = box.scrollHeight;
};

// ---- the key

function keyRefused(reason) {
  const wrong = `The server did not accept this key: ${reason}.`;
  askForKey(api.hasKey ? wrong : "This server answers to those who have a key.");
}

function askForKey(text) {
  $("docs").hidden = true; // a link carries no key
  $("key-button").hidden = false;
  $("key-text").textContent = text;
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").value = "";
  $("key").focus();
}

async function tryKey(event) {
  event.preventDefault();
  api.useKey($("key").value.trim(), $("keep-key").checked);
  if (await connect()) $("key-dialog").close();
}

// Whether the server lets us in; says which model it has.
async function connect() {
  try {
    showModels((await api.get("v1/models")).data.map((card) => card.id));
    $("state").textContent = "";
    engine.start();
    return true;
  } catch (error) {
    if (error.status === 401 || error.code === "too_many_failed_keys") keyRefused(error.message);
    else if (error.status === 503 || error.status === 0) {
      $("state").textContent = error.message;
      setTimeout(connect, 2000);
    } else $("state").textContent = error.message;
    return false;
  }
}

// One model's name, or several to choose from: for the next answers and the engine's view.
function showModels(names) {
  const isOne = names.length < 2;
  $("model").hidden = !isOne;
  $("models").hidden = isOne;
  $("model").textContent = names[0] ?? "";
  const kept = lasting.getItem("quire.model");
  $("models").replaceChildren(...names.map((name) => new Option(name, name, false, name === kept)));
  useModel();
}

function useModel() {
  const chosen = $("models").hidden ? null : $("models").value;
  if (chosen !== null) lasting.setItem("quire.model", chosen);
  document.title = `quire · ${chosen ?? $("model").textContent}`;
  engine.watch(chosen);
}

// ---- views, theme, keyboard

function show(view) {
  document.body.dataset.view = view;
  $("tab-chat").setAttribute("aria-pressed", String(view === "chat"));
  $("tab-engine").setAttribute("aria-pressed", String(view === "engine"));
  engine.resize();
}

const THEMES = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = THEMES[theme][0];
  $("theme").setAttribute("aria-label", `Theme: ${THEMES[theme][1]}`);
  $("theme").title = `Theme: ${THEMES[theme][1]}`;
  lasting.setItem("quire.theme", theme);
  engine.recolour();
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
}

function onKey(event) {
  if (event.key === "Escape" && answering.has(current.id) && !$("key-dialog").open) {
    answering.get(current.id).abort();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    startNew();
  } else if (event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
    event.preventDefault();
    const at = conversations.indexOf(current) + (event.key === "ArrowUp" ? -1 : 1);
    if (conversations[at]) open(conversations[at]);
  } else if (event.altKey && event.code === "KeyE") {
    event.preventDefault();
    show(document.body.dataset.view === "chat" ? "engine" : "chat");
  }
}

function onMessageKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
}

function submit(event) {
  event?.preventDefault();
  const text = $("message").value;
  if (!text.trim() || answering.has(current.id)) return;
  $("message").value = "";
  grow();
  send(text);
}

function grow() {
  const box = $("message");
  box.rows = Math.min(8, Math.max(1, box.value.split("\n").length));
}

const engine = new EngineView($("engine"), api);
$("composer").addEventListener("submit", submit);
$("message").addEventListener("keydown", onMessageKey);
$("message").addEventListener("input", grow);
$("stop").addEventListener("click", () => answering.get(current.id)?.abort());
$("new").addEventListener("click", startNew);
$("clear").addEventListener("click", clearAll);
$("theme").addEventListener("click", nextTheme);
$("models").addEventListener("change", useModel);
$("tab-chat").addEventListener("click", () => show("chat"));
$("tab-engine").addEventListener("click", () => show("engine"));
$("menu").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("menu-open");
  $("menu").setAttribute("aria-expanded", String(isOpen));
});
$("key-button").addEventListener("click", () => askForKey("Use another key, or the same and keep it."));
$("key-form").addEventListener("submit", tryKey);
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
document.addEventListener("keydown", onKey);
for (const name of FIELDS) {
  $("composer").elements[name].addEventListener("input", (event) => {
    current.parameters[name] = event.target.value;
    save();
  });
}
for (const conversation of conversations) {
  for (const message of conversation.messages) if (message.state === "streaming") message.state = "stopped";
}
const stored = lasting.getItem("quire.theme");
setTheme(stored in THEMES ? stored : "auto");
open(current);
connect();
