// The AI SDK: an object by a schema, and tools, whole and streamed.
import assert from "node:assert";
import { createRequire } from "node:module";

const require = createRequire(`${process.argv[3]}/`);
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateObject, generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");
const provider = createOpenAICompatible({
  name: "quire",
  baseURL: process.argv[2],
  supportsStructuredOutputs: true,
});
const model = provider("tiny-text");
const schema = z.object({ name: z.string(), age: z.number().int() });
const { object } = await generateObject({ model, schema, prompt: "Who?" });
assert.deepEqual(object, { name: "Bob", age: 3 });
const weather = tool({
  description: "the weather",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const asked = { model, tools: { weather }, stopWhen: stepCountIs(3), prompt: "Paris?" };
assert.equal((await generateText(asked)).text, "It is sunny.");
let text = "";
for await (const piece of streamText(asked).textStream) text += piece;
assert.equal(text, "Sunny.");
