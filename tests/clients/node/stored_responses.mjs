// Keeps a response, reads it, goes on from it and deletes it; prints one JSON object of what came.
// Usage: node stored_responses.mjs BASE_URL API_KEY
import { createRequire } from "node:module";

const { default: OpenAI } = createRequire(import.meta.url)("openai");
const [baseURL, apiKey] = process.argv.slice(2);
const { models, responses } = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const model = (await models.list()).data[0].id;
const common = { model, temperature: 0, max_output_tokens: 4 };
const seen = (response) => ({ id: response.id, text: response.output_text });

const created = await responses.create({ ...common, input: "Hi!" });
const told = { created: seen(created), retrieved: seen(await responses.retrieve(created.id)) };
told.inputs = [];
for await (const item of responses.inputItems.list(created.id)) told.inputs.push(item.role);
const next = await responses.create({
  ...common,
  input: "And now?",
  previous_response_id: created.id,
});
told.next = { previous: next.previous_response_id };
await responses.delete(created.id);
try {
  await responses.retrieve(created.id);
} catch (error) {
  told.gone = error.status;
}
console.log(JSON.stringify(told));
