// What OpenAI's JavaScript package does with our refusals: it must try again exactly where we say so.
//
//     node retries.mjs http://127.0.0.1:8080
//
// The server is that of retries.sh. Each attempt is counted where it leaves the package.
import assert from "node:assert/strict";
import net from "node:net";
import OpenAI from "openai";

const base = process.argv[2].replace(/\/$/, "");
let attempts = [];

function ask(key, { model = "tiny", retries = 2, send = fetch, ...more } = {}) {
  attempts = [];
  const counted = (url, init) => {
    attempts.push(performance.now());
    return send(url, init);
  };
  const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: key, maxRetries: retries, timeout: 60000, fetch: counted });
  const messages = [{ role: "user", content: "hi" }];
  return client.chat.completions.create({ model, messages, max_tokens: 2, ...more });
}

async function expect(status, code, nAttempts, call) {
  const error = await call().then(() => assert.fail(`no ${status}`), (error) => error);
  assert.ok(error instanceof OpenAI.APIError, `${error}`);
  assert.deepEqual([error.status, error.code, attempts.length], [status, code, nAttempts], `${error}`);
  return error.headers;
}

function gaps() {
  return attempts.slice(1).map((after, idx) => after - attempts[idx]);
}

/** A stream on the model with one slot, once it has begun, and how to leave it. */
async function holdTheSlot() {
  const leave = new AbortController();
  const hold = () => fetch(`${base}/v1/completions`, {
    method: "POST", signal: leave.signal, headers: { authorization: "Bearer free" },
    body: JSON.stringify({ model: "slow", prompt: "x", stream: true, max_tokens: 4000 }),
  });
  let answer = await hold();
  // Whoever held it before may just be leaving.
  for (let tries = 0; tries < 100 && answer.status === 503; tries++) {
    await new Promise((resolve) => setTimeout(resolve, 20));
    answer = await hold();
  }
  assert.equal(answer.status, 200);
  await answer.body.getReader().read();
  return () => leave.abort();
}

/** All that the server says to a request that does not arrive. */
function stalled() {
  const { hostname, port } = new URL(base);
  return new Promise((resolve, reject) => {
    const socket = net.connect(Number(port), hostname);
    let text = "";
    socket.on("data", (data) => { text += data; }).on("error", reject).on("end", () => resolve(text));
    socket.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n");
  });
}

const checks = {
  async "faults of the request, and what no retry can mend, are sent once"() {
    await expect(400, "invalid_value", 1, () => ask("free", { temperature: 3 }));
    const long = await expect(400, "context_length_exceeded", 1, () => ask("free", { max_tokens: 10 ** 6 }));
    assert.equal(long.get("x-should-retry"), "false");
    await expect(401, "invalid_api_key", 1, () => ask("nobody"));
    await expect(404, "model_not_found", 1, () => ask("free", { model: "none" }));
    const off = await expect(503, "model_not_loaded", 1, () => ask("free", { model: "off" }));
    assert.equal(off.get("retry-after"), null);
    await expect(429, "rate_limit_exceeded", 1, () => ask("few"));
  },
  async "a full queue is tried again when we say, and then it works"() {
    let leave = await holdTheSlot();
    await expect(503, "queue_full", 3, () => ask("free", { model: "slow" }));
    assert.ok(gaps().every((gap) => gap >= 950), `${gaps()}`);
    leave();
    leave = await holdTheSlot();
    setTimeout(leave, 500);
    const answer = await ask("free", { model: "slow", retries: 5 });
    assert.ok(answer.choices.length === 1 && attempts.length > 1, `${attempts.length} attempts`);
  },
  async "a rate limit says when"() {
    for (let round = 0; round < 20 && attempts.length !== 2; round++) {
      let status = 200;
      for (let sent = 0; sent < 400 && status !== 429; sent++) {
        const answer = await fetch(`${base}/v1/native/tokenize`, {
          method: "POST", headers: { authorization: "Bearer sixty" }, body: JSON.stringify({ model: "tiny", text: "x" }),
        });
        status = answer.status;
        await answer.text();
      }
      assert.equal(status, 429);
      assert.ok((await ask("sixty", { retries: 1 })).choices);
      // One attempt: a second had passed before it, and with it came a request.
    }
    assert.equal(attempts.length, 2);
    assert.ok(gaps()[0] >= 950, `${gaps()}`);
  },
  async "a request that did not arrive in time is tried again"() {
    const [head, body] = (await stalled()).split("\r\n\r\n");
    const [first, ...lines] = head.split("\r\n");
    assert.equal(first.split(" ")[1], "408", first);
    const headers = lines.map((line) => line.split(": ")).filter(([name]) => !/^(connection|content-length)$/i.test(name));
    // The package itself never stalls, so it is handed what the server said.
    const replay = async () => new Response(body, { status: 408, headers });
    await expect(408, "request_timeout", 3, () => ask("free", { send: replay }));
  },
};

for (const [name, check] of Object.entries(checks)) {
  attempts = [];
  try {
    await check();
    console.log(`ok   ${name}`);
  } catch (error) {
    console.error(`FAIL ${name}: ${error.stack ?? error}`);
    process.exit(1);
  }
}
process.exit(0); // streams that were left keep sockets open for a while
