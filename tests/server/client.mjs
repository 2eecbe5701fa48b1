// The official npm client against a server: node client.mjs FOLDER_OF_THE_PACKAGE BASE_URL MODEL
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, baseURL, model] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello there" }];
const asked = { model, messages, max_tokens: 8, temperature: 0 };
const done = [];

async function check(name, work) {
  await work();
  done.push(name);
}

await check("chat", async () => {
  const answer = await client.chat.completions.create(asked);
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, 8);
});

await check("streaming", async () => {
  const whole = await client.chat.completions.create(asked);
  const options = { stream: true, stream_options: { include_usage: true } };
  let text = "";
  let usage = null;
  for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, 8);
});

await check("completions", async () => {
  const answer = await client.completions.create({ model, prompt: ["a", "b"], n: 2, max_tokens: 3 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
});

await check("embeddings", async () => {
  const answer = await client.embeddings.create({ model, input: ["the sea", "a hill"] });
  const length = Math.hypot(...answer.data[1].embedding);
  assert.ok(Math.abs(length - 1) < 1e-4, `length ${length}`);
});

await check("models", async () => {
  const listed = await client.models.list();
  assert.equal(listed.data[0].id, model);
});

await check("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(
    client.chat.completions.create({ ...asked, model: "another" }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
});

await check("cancellation", async () => {
  const long = { ...asked, max_tokens: 400, stream: true, ignore_eos: true };
  const stream = await client.chat.completions.create(long);
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break; // which aborts the request
  }
});

console.log(JSON.stringify(done));
