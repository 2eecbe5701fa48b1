// OpenAI's Node client: its helper that runs tools, and reasoning in a stream.
import assert from "node:assert";
import { createRequire } from "node:module";

const OpenAI = createRequire(`${process.argv[3]}/`)("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const runner = client.chat.completions.runTools({
  model: "tiny-text",
  messages: [{ role: "user", content: "Paris?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        description: "the weather",
        parameters,
        parse: JSON.parse,
        function: async ({ city }) => `sunny in ${city}`,
      },
    },
  ],
});
assert.equal(await runner.finalContent(), "It is sunny.");
const stream = await client.chat.completions.create({
  model: "tiny-text",
  messages: [{ role: "user", content: "Paris?" }],
  stream: true,
});
let [thought, text] = ["", ""];
for await (const chunk of stream) {
  thought += chunk.choices[0]?.delta?.reasoning_content ?? "";
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.deepEqual([thought, text], ["Hm.", "Yes."]);
