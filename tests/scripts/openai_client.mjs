// OpenAI's JavaScript package against a running tinyloop: what users' programs do.
//
//     node openai_client.mjs http://127.0.0.1:8080
//
// Exits 0 when every check holds; the first that does not is named.
import assert from "node:assert/strict";
import OpenAI from "openai";

const base = process.argv[2].replace(/\/$/, "");
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "unused", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Tell me a long story about a ship." }];

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
    assert.equal(answer.choices[0].finish_reason, "length");
    assert.ok(answer.choices[0].message.content);
    assert.equal(answer.usage.completion_tokens, 8);
  },
  async "a stream says what the whole answer says"() {
    const asked = { model, messages, max_tokens: 24, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    const stream = await client.chat.completions.create({
      ...asked, stream: true, stream_options: { include_usage: true },
    });
    let text = "", usage = null, finish = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      finish = chunk.choices[0]?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(finish, "length");
    assert.equal(usage.completion_tokens, 24);
  },
  async "the stream helper"() {
    const runner = client.chat.completions.stream({ model, messages, max_tokens: 8, temperature: 0 });
    let deltas = "";
    runner.on("content", (delta) => { deltas += delta; });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, deltas);
  },
  async "an aborted stream frees its place"() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 400, stream: true });
    for await (const _chunk of stream) break; // leaving the loop aborts the request
    for (let tries = 0; tries < 200; tries++) {
      const live = await (await fetch(`${base}/v1/requests`)).json();
      if (live.data.length === 0) return;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    assert.fail("the request still runs");
  },
  async "a schema holds"() {
    const schema = {
      type: "object", additionalProperties: false, required: ["city", "people"],
      properties: { city: { type: "string", maxLength: 20 }, people: { type: "integer", minimum: 0, maximum: 99 } },
    };
    const answer = await client.chat.completions.create({
      model, messages, max_tokens: 80, temperature: 0,
      response_format: { type: "json_schema", json_schema: { name: "town", strict: true, schema } },
    });
    const town = JSON.parse(answer.choices[0].message.content);
    assert.equal(typeof town.city, "string");
    assert.ok(Number.isInteger(town.people));
  },
  async "a required tool is called, whole and streamed"() {
    const tools = [{
      type: "function",
      function: {
        name: "weather", description: "The weather of a city",
        parameters: {
          type: "object", additionalProperties: false, required: ["city"],
          properties: { city: { type: "string", maxLength: 20 } },
        },
      },
    }];
    const asked = {
      model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 100, temperature: 0,
    };
    const whole = await client.chat.completions.create(asked);
    const [call] = whole.choices[0].message.tool_calls;
    assert.equal(call.function.name, "weather");
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
    assert.equal(whole.choices[0].finish_reason, "tool_calls");
    const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
    assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: ["The sea", "The sky"], max_tokens: 4, temperature: 0 });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  },
  async embeddings() {
    // The package asks for base64 by itself and decodes it.
    const answer = await client.embeddings.create({ model, input: ["a ship", "a boat"] });
    assert.equal(answer.data.length, 2);
    const norm = Math.hypot(...answer.data[0].embedding);
    assert.ok(Math.abs(norm - 1) < 1e-3, `norm ${norm}`);
  },
  async responses() {
    const stream = client.responses.stream({ model, input: "Tell me a story.", max_output_tokens: 16, temperature: 0 });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    const final = await stream.finalResponse();
    assert.equal(final.status, "incomplete");
    assert.equal(final.output_text, text);
  },
  async "errors are typed"() {
    await assert.rejects(client.chat.completions.create({ model: "no/such", messages }), (error) =>
      error instanceof OpenAI.NotFoundError && error.code === "model_not_found" && Boolean(error.requestID));
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), (error) =>
      error instanceof OpenAI.BadRequestError && error.param === "temperature");
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok   ${name}`);
  } catch (error) {
    console.error(`FAIL ${name}: ${error.stack ?? error}`);
    process.exit(1);
  }
}
