// The server's API as the page uses it: errors with their reasons, streams as chunks.

const KEPT = "quire.key";

// A browser's storage, or one that forgets where the browser forbids it.
function storage(name) {
  try {
    return window[name];
  } catch {
    return { getItem: () => null, setItem: () => {}, removeItem: () => {} };
  }
}

export const lasting = storage("localStorage"); // for what is no secret
const ofTab = storage("sessionStorage");

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  // In memory; in sessionStorage only where the user asked for that.
  #key = ofTab.getItem(KEPT) ?? "";

  get hasKey() {
    return this.#key !== "";
  }

  useKey(key, isKept) {
    this.#key = key;
    if (isKept && key) ofTab.setItem(KEPT, key);
    else ofTab.removeItem(KEPT);
  }

  async #fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "the server does not answer", "unreachable");
    }
    if (!answer.ok) throw await failure(answer);
    return answer;
  }

  async get(path, signal) {
    return (await this.#fetch(path, { signal })).json();
  }

  // The chunks of a chat completion, as objects.
  async *chat(body, signal) {
    const answer = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.status ?? 500, chunk.error.message, chunk.error.code);
      yield chunk;
    }
    throw new ApiError(0, "the connection ended before the answer did", "cut");
  }
}

async function failure(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // no JSON: a proxy's own page
  }
  const after = answer.headers.get("Retry-After");
  const hint = answer.status === 429 && after ? ` (try again in ${after} s)` : "";
  return new ApiError(answer.status, (error.message ?? `HTTP ${answer.status}`) + hint, error.code);
}

// The data of server-sent events; lines end with \n or \r\n, comments are left out.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
