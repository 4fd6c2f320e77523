// Calls each route that OpenAI's client has and pagewire serves; prints one JSON object of what came.
// Usage: node openai.mjs BASE_URL API_KEY
import { createRequire } from "node:module";

const { default: OpenAI } = createRequire(import.meta.url)("openai");
const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const question = "What is the capital of France?";
const messages = [{ role: "user", content: question }];
const common = { model, temperature: 0 };
const told = { model: (await client.models.retrieve(model)).id };

const chat = await client.chat.completions.create({ ...common, messages, max_tokens: 32 });
told.chat = chat.choices[0].message.content;

told.chatStream = "";
for await (const chunk of await client.chat.completions.create({
  ...common,
  messages,
  max_tokens: 32,
  stream: true,
})) {
  told.chatStream += chunk.choices[0]?.delta?.content ?? "";
}

const tool = {
  type: "function",
  function: {
    name: "find_capital",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { enum: ["Oslo", "Paris"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const runner = client.chat.completions.stream({
  ...common,
  messages,
  max_tokens: 96,
  tools: [tool],
  tool_choice: "required",
});
const called = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
const readCall = (call) => ({ name: call.name, arguments: JSON.parse(call.arguments) });
told.call = readCall(called);
const calling = { ...common, messages, max_tokens: 96, tools: [tool], tool_choice: "required" };
const whole = await client.chat.completions.create(calling);
told.callWhole = readCall(whole.choices[0].message.tool_calls[0].function);

const schema = { name: "city", strict: true, schema: tool.function.parameters };
const parsed = await client.chat.completions.parse({
  ...common,
  messages,
  max_tokens: 96,
  response_format: { type: "json_schema", json_schema: schema },
});
told.parsed = JSON.parse(parsed.choices[0].message.content);

const prompt = "The capital of France is";
const completion = await client.completions.create({ ...common, prompt, max_tokens: 8, logprobs: 1 });
told.completion = completion.choices[0].text;
told.logprobs = completion.choices[0].logprobs.tokens.length;

told.completionStream = "";
for await (const chunk of await client.completions.create({
  ...common,
  prompt,
  max_tokens: 8,
  stream: true,
})) {
  told.completionStream += chunk.choices[0]?.text ?? "";
}

const response = await client.responses.create({ ...common, input: question, max_output_tokens: 32 });
told.response = response.output_text;

const events = client.responses.stream({ ...common, input: question, max_output_tokens: 32 });
told.eventTypes = [];
for await (const event of events) told.eventTypes.push(event.type);
told.responseStream = (await events.finalResponse()).output_text;

const responseCall = await client.responses.create({
  ...common,
  input: question,
  max_output_tokens: 96,
  tools: [{ type: "function", ...tool.function }],
  tool_choice: "required",
});
told.responseCall = readCall(responseCall.output.find((item) => item.type === "function_call"));

try {
  await client.chat.completions.create({ ...common, messages, temperature: -1 });
} catch (error) {
  told.error = { name: error.constructor.name, status: error.status, param: error.param };
}
console.log(JSON.stringify(told));
