// The AI SDK over the Responses API: what an answer said is sent back as references to its items.
import assert from "node:assert";
import { createRequire } from "node:module";

const require = createRequire(`${process.argv[3]}/`);
const { createOpenAI } = require("@ai-sdk/openai");
const { generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");
const model = createOpenAI({ baseURL: process.argv[2], apiKey: "none" })("tiny-text");
const weather = tool({
  description: "the weather",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const asked = { model, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };
const first = await generateText({ ...asked, prompt: "Paris?" });
assert.equal(first.text, "It is sunny.");
assert.ok(first.steps[1].request.body.input.some((item) => item.type === "item_reference"));
const messages = [
  { role: "user", content: "Paris?" },
  ...first.response.messages,
  { role: "user", content: "And now?" },
];
let text = "";
for await (const piece of streamText({ ...asked, messages }).textStream) text += piece;
assert.equal(text, "Sunny.");
