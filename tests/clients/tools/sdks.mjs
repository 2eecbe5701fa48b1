// Anthropic's and Ollama's clients for Node: tools whole and streamed, thoughts, objects.
import assert from "node:assert";
import { createRequire } from "node:module";

const require = createRequire(`${process.argv[3]}/`);
const { Anthropic } = require("@anthropic-ai/sdk");
const { betaZodTool } = require("@anthropic-ai/sdk/helpers/beta/zod");
const { zodOutputFormat } = require("@anthropic-ai/sdk/helpers/zod");
const { Ollama } = require("ollama");
const { z } = require("zod");

const base = process.argv[2].replace(/\/v1$/, "");
const messages = [{ role: "user", content: "Paris?" }];
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

const anthropic = new Anthropic({ baseURL: base, apiKey: "none", maxRetries: 0 });
const asked = { model: "tiny-text", max_tokens: 2000, messages };
const message = await anthropic.messages
  .stream({
    ...asked,
    tools: [{ name: "weather", description: "of a city", input_schema: city }],
    thinking: { type: "enabled", budget_tokens: 1024 },
  })
  .finalMessage();
assert.deepEqual(message.content.map((block) => block.type), ["thinking", "tool_use"]);
assert.deepEqual(message.content[1].input, { city: "Paris" });
const weather = betaZodTool({
  name: "weather",
  description: "of a city",
  inputSchema: z.object({ city: z.string() }),
  run: ({ city }) => `sunny in ${city}`,
});
const last = await anthropic.beta.messages.toolRunner({ ...asked, tools: [weather] });
assert.equal(last.content[0].text, "It is sunny.");
const person = z.object({ name: z.string(), age: z.number() });
const format = zodOutputFormat(person);
const parsed = await anthropic.messages.parse({ ...asked, output_config: { format } });
assert.deepEqual(parsed.parsed_output, { name: "Bob", age: 3 });

const ollama = new Ollama({ host: base });
const tools = [
  { type: "function", function: { name: "weather", description: "of a city", parameters: city } },
];
const chunks = [];
for await (const chunk of await ollama.chat({
  model: "tiny-text",
  messages,
  tools,
  stream: true,
  think: true,
}))
  chunks.push(chunk.message);
assert.equal(chunks.map((chunk) => chunk.thinking ?? "").join(""), "Hm.");
const calls = chunks.flatMap((chunk) => chunk.tool_calls ?? []);
assert.deepEqual(calls.map((call) => call.function.arguments), [{ city: "Paris" }]);
const history = [
  ...messages,
  { role: "assistant", content: "", tool_calls: calls },
  { role: "tool", tool_name: "weather", content: "sunny" },
];
const answer = await ollama.chat({ model: "tiny-text", messages: history, tools });
assert.equal(answer.message.content, "It is sunny.");
