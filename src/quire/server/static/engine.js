// The engine's live view: what /v1/stats says, drawn. Time runs from left to right; a lane is a place in
// the batch, and what is drawn in it the rows of the sequence that has that place.

import { element } from "./markdown.js";

const WINDOW_S = 10; // of time that is drawn
const LAG_S = 0.45; // behind the server, so that what is drawn has come
const POLL_MS = 250;
const FRAME_MS = 40; // between two drawings, at least
const MOST_STEPS = 128; // a poll
const GUTTER = 104; // pixels left of the lanes
const SHOWN_S = 0.6; // for which a lane keeps its label after its sequence's last row
// By the model's state.
const notes = {
  unloaded: "is not loaded: a message to it loads it.",
  loading: "is being loaded.",
  recovering: "starts anew after a crash.",
};
const MERGE_S = 0.06; // decodes of one sequence that are nearer than this are one bar
const COLOURS = ["ink", "dim", "line", "panel", "chunk", "decode", "kv", "kv-cached", "floor", "accent"];
const REASONS = {
  queued: "behind others",
  batching_delay: "for more to batch",
  batch_full: "for a place in the batch",
  no_blocks: "for KV blocks",
  pacing: "to keep the others' pace",
  preempted: "to be resumed",
  unread: "for their reader",
  degraded: "until batches run again",
};
const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export class EngineView {
  #api;
  #steps = []; // {id, start, end, hasChunks, floor}
  #bars = []; // {lane, kind, start, end, tokens}
  #lanes = []; // by place: {sequence, last, label, done}
  #names = new Map(); // by sequence: what the server says of it
  #rates = []; // {at, value}
  #last = null; // the last reply
  #newest = null; // id of the newest step
  #numSteps = 0; // that came
  #offset = null; // from performance.now() to the server's uptime, in seconds
  #isOn = false;
  #colours = {};
  #model = null;
  #observer;

  constructor(root, api) {
    this.#api = api;
    this.#observer = new ResizeObserver(() => this.resize());
    this.#observer.observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    this.recolour();
  }

  start() {
    if (this.#isOn) return;
    this.#isOn = true;
    this.#poll();
    this.#frame();
  }

  // The engine of this model; null: of the only one.
  watch(model) {
    if (model === this.#model) return;
    this.#model = model;
    this.#reset();
    this.#last = null;
  }

  recolour() {
    const style = getComputedStyle(document.documentElement);
    for (const name of COLOURS) this.#colours[name] = style.getPropertyValue(`--${name}`).trim();
    this.#drawStill();
  }

  resize() {
    this.#draw();
    this.#drawStill();
  }

  get #isSeen() {
    return !document.hidden && $("engine").offsetParent !== null;
  }

  // ---- what the server says

  async #poll() {
    if (this.#isSeen) {
      try {
        const after = this.#newest === null ? "" : `&after=${this.#newest}`;
        const model = this.#model;
        const named = model === null ? "" : `&model=${encodeURIComponent(model)}`;
        const reply = await this.#api.get(`v1/stats?steps=${MOST_STEPS}${after}${named}`);
        if (model === this.#model) this.#take(reply);
        this.#say(notes[reply.status] ? `${reply.model} ${notes[reply.status]}` : "");
      } catch (error) {
        this.#say(error.status === 401 ? "" : `No figures: ${error.message}`);
        if (error.status === 401) {
          this.#isOn = false; // start() goes on, with another key
          return;
        }
      }
    }
    setTimeout(() => this.#poll(), POLL_MS);
  }

  #say(text) {
    $("engine-note").textContent = text;
    $("engine-note").hidden = !text;
  }

  #take(reply) {
    const before = this.#last;
    const hasEngine = (of) => of.num_steps !== undefined; // not while the model is unloaded
    const isRestarted =
      before && (reply.uptime_s < before.uptime_s || reply.num_steps < before.num_steps || hasEngine(reply) !== hasEngine(before));
    if (isRestarted) this.#reset();
    const offset = reply.uptime_s - performance.now() / 1000;
    this.#offset = this.#offset === null ? offset : Math.max(this.#offset + (offset - this.#offset) * 0.05, offset);
    this.#last = reply;
    for (const [id, lane] of Object.entries(reply.latest?.lanes ?? {})) this.#names.set(Number(id), lane);
    for (const step of reply.latest?.steps ?? []) this.#takeStep(step);
    this.#takeRate(isRestarted ? null : before, reply);
    this.#prune(reply.uptime_s - WINDOW_S - LAG_S - 1);
    this.#showFigures(reply, before);
    this.#drawStill();
  }

  #reset() {
    this.#steps = [];
    this.#bars = [];
    this.#lanes = [];
    this.#rates = [];
    this.#names.clear();
    this.#newest = this.#offset = null;
  }

  #takeStep(step) {
    this.#newest = step.id;
    const start = step.at - step.elapsed_s;
    const hasChunks = step.chunks.length > 0;
    this.#numSteps += 1;
    this.#steps.push({ id: step.id, start, end: step.at, hasChunks, floor: step.floor_s, rows: step.chunks.length + step.decodes.length });
    for (const [sequence, position, tokens] of step.chunks) this.#takeRow(sequence, "chunk", start, step.at, position, tokens);
    for (const [sequence, position] of step.decodes) this.#takeRow(sequence, "decode", start, step.at, position, 1);
  }

  #takeRow(sequence, kind, start, end, position, tokens) {
    const lane = this.#laneOf(sequence);
    const place = this.#lanes[lane];
    place.done = position + tokens;
    place.kind = kind;
    place.last = end;
    place.step = this.#numSteps;
    const bar = place.bar;
    if (kind === "decode" && bar?.kind === "decode" && start - bar.end < MERGE_S) {
      bar.end = end;
      return;
    }
    place.bar = { lane, kind, start, end, tokens };
    this.#bars.push(place.bar);
  }

  // A lane is free when its sequence was in neither of the last two steps.
  #laneOf(sequence) {
    let free = null;
    for (let n = 0; n < this.#lanes.length; n += 1) {
      if (this.#lanes[n].sequence === sequence) return n;
      if (free === null && this.#numSteps - this.#lanes[n].step > 2) free = n;
    }
    free ??= this.#lanes.length;
    this.#lanes[free] = { sequence, last: 0, step: 0, done: 0, kind: "chunk", bar: null };
    return free;
  }

  #takeRate(before, reply) {
    if (before === null) return;
    const seconds = reply.uptime_s - before.uptime_s;
    if (seconds <= 0) return;
    const tokens =
      reply.completion_tokens === undefined
        ? (reply.latest?.steps ?? []).reduce((sum, step) => sum + step.decodes.length, 0)
        : reply.completion_tokens - before.completion_tokens;
    this.#rates.push({ at: reply.uptime_s, value: tokens / seconds });
  }

  #prune(oldest) {
    this.#steps = this.#steps.filter((step) => step.end > oldest);
    this.#bars = this.#bars.filter((bar) => bar.end > oldest);
    this.#rates = this.#rates.filter((rate) => rate.at > oldest - WINDOW_S * 2);
    while (this.#lanes.length && this.#lanes.at(-1).last < oldest) this.#lanes.pop();
    const shown = new Set(this.#lanes.map((lane) => lane.sequence));
    for (const id of this.#names.keys()) if (!shown.has(id)) this.#names.delete(id);
  }

  // ---- figures

  #showFigures(reply, before) {
    const recent = this.#rates.filter((rate) => rate.at > reply.uptime_s - 2);
    const mean = recent.length ? recent.reduce((sum, rate) => sum + rate.value, 0) / recent.length : 0;
    $("rate").textContent = number.format(mean >= 100 ? Math.round(mean) : mean);
    const all = reply.num_running !== undefined;
    const figures = all ? reply : reply.own;
    $("running").textContent = String(figures.num_running);
    $("running-note").textContent = all ? `of ${reply.health.batch_limit}, ${figures.num_waiting} waiting` : `your own; ${figures.num_waiting} waiting`;
    this.#showStep(reply);
    for (const id of ["kv-section", "waiting-section"]) $(id).hidden = !all;
    if (all) this.#showTotals(reply, before);
    this.#showTable(reply.uptime_s);
  }

  #showStep(reply) {
    const recent = this.#steps.filter((step) => step.end > reply.uptime_s - 2);
    if (!recent.length) {
      $("step").textContent = "–";
      $("step-note").textContent = (reply.num_running ?? reply.own.num_running) ? "one runs" : "idle";
      return;
    }
    const mean = recent.reduce((sum, step) => sum + step.end - step.start, 0) / recent.length;
    $("step").textContent = milliseconds(mean);
    const floors = recent.filter((step) => step.floor !== null && !step.hasChunks);
    $("floor-legend").hidden = !this.#steps.some((step) => step.floor !== null);
    if (!floors.length) {
      $("step-note").textContent = `${number.format(recent.length / 2)} a second`;
      return;
    }
    const floor = floors.reduce((sum, step) => sum + step.floor, 0);
    const spent = floors.reduce((sum, step) => sum + step.end - step.start, 0);
    $("step-note").textContent = `decodes at ${Math.round((100 * floor) / spent)}% of the floor's speed`;
  }

  #showTotals(reply, before) {
    const queries = reply.prefix_cache_queries;
    const share = queries ? reply.prefix_cache_hits / queries : 0;
    $("hits").textContent = queries ? `${Math.round(share * 100)}%` : "–";
    $("hits-bar").style.width = `${share * 100}%`;
    const waiting = Object.entries(reply.waiting_by_reason).sort((a, b) => b[1] - a[1]);
    const key = JSON.stringify(waiting);
    if (before && this.shownWaiting === key) return;
    this.shownWaiting = key;
    $("waiting-bar").hidden = !waiting.length;
    $("waiting-bar").replaceChildren(
      ...waiting.map(([reason, count], n) => {
        const part = element("i", { title: `${count} ${REASONS[reason] ?? reason}` });
        part.style.flexGrow = count;
        part.dataset.tone = n % 4;
        return part;
      }),
    );
    const lines = waiting.map(([reason, count], n) => {
      const dot = element("i", { className: "dot" });
      dot.dataset.tone = n % 4;
      return element("li", {}, dot, `${count} ${REASONS[reason] ?? reason}`);
    });
    $("waiting").replaceChildren(...(lines.length ? lines : [element("li", { className: "dim" }, "nothing waits")]));
  }

  #showTable(now) {
    const running = this.#lanes.filter((lane) => now - lane.last < SHOWN_S);
    const words = running.map((lane) => `sequence ${lane.sequence}, ${lane.kind}, ${lane.done} tokens`);
    $("lanes").setAttribute("aria-label", words.length ? `${words.length} sequences run: ${words.slice(0, 8).join("; ")}` : "No sequence runs");
    if (!$("lanes-text").open) return;
    $("lane-rows").replaceChildren(
      ...running.map((lane) => {
        const name = this.#names.get(lane.sequence);
        const cells = [lane.sequence, name?.key || "–", name?.prompt_tokens ?? "", lane.done, lane.kind === "chunk" ? "prompt chunk" : "decode"];
        return element("tr", {}, ...cells.map((cell) => element("td", {}, String(cell))));
      }),
    );
  }

  // ---- drawing

  #frame() {
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (this.#isSeen) this.#draw();
    if (!this.#isOn) return;
    setTimeout(() => requestAnimationFrame(() => this.#frame()), isCalm ? 1000 : FRAME_MS);
  }

  #draw() {
    if (this.#offset === null) return;
    const now = performance.now() / 1000 + this.#offset - LAG_S;
    this.#drawLanes(now);
    this.#drawSteps(now);
  }

  #drawStill() {
    if (this.#last === null || !this.#isSeen) return;
    this.#drawRate();
    if (this.#last.kv_blocks) this.#drawBlocks(this.#last.kv_blocks);
  }

  #drawLanes(now) {
    const count = Math.max(6, this.#lanes.length);
    const pitch = Math.max(7, Math.min(24, Math.floor(336 / count)));
    const { pen, width, height } = canvas("lanes", count * pitch + 18);
    const scale = (width - GUTTER) / WINDOW_S;
    const x = (time) => Math.max(GUTTER, width - (now - time) * scale);
    const c = this.#colours;
    for (let n = 0; n < count; n += 1) {
      pen.fillStyle = c.line;
      pen.fillRect(GUTTER, n * pitch + pitch / 2, width - GUTTER, 1);
    }
    for (const bar of this.#bars) {
      const left = x(bar.start);
      const right = Math.min(width, x(bar.end));
      if (bar.end < now - WINDOW_S || left >= width) continue;
      const tall = bar.kind === "chunk" ? pitch - 3 : Math.max(3, Math.round(pitch * 0.42));
      const top = bar.lane * pitch + Math.round((pitch - tall) / 2);
      pen.fillStyle = bar.kind === "chunk" ? c.chunk : c.decode;
      round(pen, left, top, Math.max(1.5, right - left), tall, Math.min(3, tall / 2));
      if (bar.kind === "chunk" && pitch >= 13) {
        pen.fillStyle = c.panel;
        pen.font = "600 10px system-ui, sans-serif";
        const fits = pen.measureText(bar.tokens).width + 10 <= right - left;
        if (fits) pen.fillText(bar.tokens, left + 5, top + tall / 2 + 3.5);
      }
    }
    this.#drawStepLines(pen, now, x, scale, count * pitch);
    this.#drawLabels(pen, now, pitch);
    axis(pen, c.dim, width, height, scale);
  }

  // Where steps are long enough to be told apart, a line between them.
  #drawStepLines(pen, now, x, scale, height) {
    pen.fillStyle = this.#colours.panel;
    for (const step of this.#steps) {
      const isLong = (step.end - step.start) * scale >= 4;
      if (isLong && step.end >= now - WINDOW_S && step.end <= now) pen.fillRect(x(step.end) - 0.5, 0, 1, height);
    }
  }

  #drawLabels(pen, now, pitch) {
    pen.font = `${Math.min(11, pitch)}px system-ui, sans-serif`;
    if (pitch < 10) return;
    this.#lanes.forEach((lane, n) => {
      if (now - lane.last > SHOWN_S) return;
      const name = this.#names.get(lane.sequence);
      const prompt = name?.prompt_tokens ?? 0;
      const text = lane.done > prompt ? `${prompt}+${lane.done - prompt}` : `${lane.done}/${prompt}`;
      const room = GUTTER - 14 - pen.measureText(text).width;
      pen.fillStyle = this.#colours.ink;
      pen.fillText(fitting(pen, name?.key || `#${lane.sequence}`, room), 0, n * pitch + pitch / 2 + 4);
      pen.fillStyle = this.#colours.dim;
      pen.textAlign = "right";
      pen.fillText(text, GUTTER - 8, n * pitch + pitch / 2 + 4);
      pen.textAlign = "left";
    });
  }

  // On a logarithmic scale: a step with a prompt chunk may take a hundred times as long as a decode.
  #drawSteps(now) {
    const { pen, width, height } = canvas("steps", 120);
    const seen = this.#steps.filter((step) => step.end > now - WINDOW_S && step.start < now);
    const times = seen.flatMap((step) => [step.end - step.start, step.floor ?? step.end - step.start]).filter((time) => time > 0);
    const least = Math.floor(Math.log10(Math.min(0.001, ...times) * 0.8));
    const most = Math.max(least + 2, Math.ceil(Math.log10(Math.max(0.01, ...times))));
    const bottom = height - 4;
    const scale = (width - GUTTER) / WINDOW_S;
    const tall = (seconds) => Math.max(1.5, ((Math.log10(Math.max(seconds, 1e-9)) - least) / (most - least)) * (bottom - 10));
    const c = this.#colours;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    for (let power = least; power <= most; power += 1) {
      const y = power === least ? bottom : bottom - tall(10 ** power);
      pen.fillStyle = c.line;
      pen.fillRect(GUTTER, Math.round(y), width - GUTTER, 1);
      pen.fillStyle = c.dim;
      if (power > least) pen.fillText(unit(10 ** power), GUTTER - 8, y + 4);
    }
    pen.textAlign = "left";
    for (const step of seen) {
      const left = Math.max(GUTTER, width - (now - step.start) * scale);
      const wide = Math.max(1, Math.min(width, width - (now - step.end) * scale) - left - 0.5);
      const high = tall(step.end - step.start);
      pen.fillStyle = step.hasChunks ? c.chunk : c.decode;
      pen.globalAlpha = 0.22;
      pen.fillRect(left, bottom - high, wide + 0.5, high);
      pen.globalAlpha = 1;
      pen.fillRect(left, bottom - high, wide + 0.5, 2.5);
      if (step.floor === null) continue;
      pen.fillStyle = c.floor;
      pen.fillRect(left - 0.5, bottom - tall(step.floor) - 1, wide + 1, 2);
    }
  }

  #drawRate() {
    const { pen, width, height } = canvas("rate-chart", 34);
    const now = this.#last.uptime_s;
    const span = WINDOW_S * 3;
    const seen = this.#rates.filter((rate) => rate.at > now - span);
    if (seen.length < 2) return;
    const most = Math.max(1, ...seen.map((rate) => rate.value));
    pen.beginPath();
    pen.moveTo(width - (now - seen[0].at) * (width / span), height);
    for (const rate of seen) pen.lineTo(width - (now - rate.at) * (width / span), height - 2 - (rate.value / most) * (height - 4));
    pen.lineTo(width, height);
    pen.closePath();
    pen.fillStyle = this.#colours.decode;
    pen.globalAlpha = 0.35;
    pen.fill();
    pen.globalAlpha = 1;
    $("rate-chart").setAttribute("aria-label", `Tokens a second over ${span} seconds, at most ${number.format(most)}`);
  }

  #drawBlocks(blocks) {
    const wide = $("kv").clientWidth || 300;
    const cells = Math.min(blocks.total, Math.floor(wide / 9) * 10);
    const across = Math.ceil(cells / Math.max(1, Math.min(10, Math.ceil(cells / Math.floor(wide / 9)))));
    const size = wide / across;
    const { pen } = canvas("kv", Math.ceil(Math.ceil(cells / across) * Math.min(size, 14)) + 2);
    const high = Math.min(size, 14);
    const c = this.#colours;
    const share = (count) => (count * cells) / blocks.total;
    const used = blocks.used ? Math.max(1, Math.round(share(blocks.used))) : 0;
    const cached = used + (blocks.cached ? Math.max(1, Math.round(share(blocks.cached))) : 0);
    for (let n = 0; n < cells; n += 1) {
      pen.fillStyle = n < used ? c.kv : n < cached ? c["kv-cached"] : c.line;
      round(pen, (n % across) * size + 1, Math.floor(n / across) * high + 1, size - 2, high - 2, 2);
    }
    const text = `${blocks.used} of ${blocks.total} blocks in use, ${blocks.cached} cached`;
    $("kv").setAttribute("aria-label", text);
    $("kv").title = text;
  }
}

// ---- canvases

// A canvas of this height in CSS pixels, cleared, and its pen in those units.
function canvas(id, height) {
  const found = $(id);
  const ratio = devicePixelRatio || 1;
  if (found.style.height !== `${height}px`) found.style.height = `${height}px`;
  const width = found.clientWidth;
  if (found.width !== Math.round(width * ratio) || found.height !== Math.round(height * ratio)) {
    found.width = Math.round(width * ratio);
    found.height = Math.round(height * ratio);
  }
  const pen = found.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function fitting(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let kept = text.slice(0, 24);
  while (kept && pen.measureText(`${kept}…`).width > width) kept = kept.slice(0, -1);
  return `${kept}…`;
}

function round(pen, x, y, width, height, radius) {
  pen.beginPath();
  pen.roundRect(x, y, width, height, Math.max(0, Math.min(radius, width / 2)));
  pen.fill();
}

function axis(pen, colour, width, height, scale) {
  pen.fillStyle = colour;
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "center";
  const each = 2 * scale < pen.measureText("8 s ago").width + 8 ? 4 : 2; // seconds from label to label
  for (let ago = each; ago < WINDOW_S; ago += each) pen.fillText(`${ago} s ago`, width - ago * scale, height - 4);
  pen.textAlign = "right";
  pen.fillText("now", width, height - 4);
  pen.textAlign = "left";
}

function milliseconds(seconds) {
  const value = seconds * 1000;
  return `${value >= 100 ? Math.round(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

function unit(seconds) {
  return seconds >= 1 ? `${seconds} s` : `${number.format(seconds * 1000)} ms`;
}
