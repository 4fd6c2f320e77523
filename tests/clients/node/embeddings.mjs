// Embeds texts, packed (as the client asks by itself) and as numbers; prints one JSON object.
// Usage: node embeddings.mjs BASE_URL API_KEY TEXTS_AS_JSON
import { createRequire } from "node:module";

const { default: OpenAI } = createRequire(import.meta.url)("openai");
const [baseURL, apiKey, texts] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const input = JSON.parse(texts);
const packed = await client.embeddings.create({ model, input });
const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
const told = {
  packed: packed.data.map((item) => Array.from(item.embedding)),
  plain: plain.data.map((item) => item.embedding),
  usage: { prompt_tokens: packed.usage.prompt_tokens, total_tokens: packed.usage.total_tokens },
};
try {
  await client.embeddings.create({ model, input, dimensions: 64 });
} catch (error) {
  told.error = { name: error.constructor.name, status: error.status, param: error.param };
}
console.log(JSON.stringify(told));
