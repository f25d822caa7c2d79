// The client against a server that fails in the ways that gateways do, and against a real one where ETUDE_URL names it.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";

import { FeedbackClient } from "../dist/client.js";

/** A gateway that answers its first requests with `failures` (a status, or "hang up"), then accepts each id once. */
async function gateway(failures) {
  const seen = new Set();
  const server = createServer(async (request, response) => {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const failure = failures.shift();
    if (failure === "hang up") return request.socket.destroy();
    if (failure === "answer lost") {
      for (const { event_id } of JSON.parse(Buffer.concat(chunks))) seen.add(event_id);
      return request.socket.destroy();
    }
    if (failure !== undefined) return response.writeHead(failure, { "Retry-After": "0" }).end("no");
    const results = JSON.parse(Buffer.concat(chunks)).map(({ event_id, kind }) => {
      const result = kind === "nonsense" ? "refused" : seen.has(event_id) ? "duplicate" : "accepted";
      seen.add(event_id);
      return { event_id, result, ...(result === "refused" ? { why: "no kind" } : {}) };
    });
    response.writeHead(202, { "Content-Type": "application/json" }).end(JSON.stringify({ results }));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, seen, stop: () => server.close() };
}

const client = (url, more = {}) => new FeedbackClient({ url, apiKey: "key", intervalMs: 5, ...more });

test("events are sent again with the same ids until they are answered, and count once", async () => {
  const { url, seen, stop } = await gateway(["hang up", 503, "answer lost", 429]);
  const feedback = client(url);
  const ids = Array.from({ length: 300 }, (_, turn) => feedback.report({ kind: "thumbs", value: 1, session: "s", turn }));
  assert.ok(await feedback.close(30_000));
  assert.deepEqual([...seen].sort(), [...ids].sort());
  assert.equal((feedback.counts.get("accepted") ?? 0) + (feedback.counts.get("duplicate") ?? 0), 300);
  assert.equal(feedback.counts.get("duplicate"), 200);
  stop();
});

test("what is refused for good is not sent again, and says why", async () => {
  const { url, stop } = await gateway([401]);
  const feedback = client(url);
  const first = feedback.report({ kind: "kept", session: "s" });
  assert.ok(await feedback.flush());
  const second = feedback.report({ kind: "nonsense", session: "s" });
  assert.ok(await feedback.close());
  assert.deepEqual(feedback.refused, [
    { event_id: first, reason: "HTTP 401: no" }, { event_id: second, reason: "no kind" },
  ]);
  assert.throws(() => feedback.report({ kind: "kept", session: "s" }), /closed/);
  stop();
});

test("the buffer is bounded while the gateway is away, and the newest events stay", async () => {
  const feedback = client("http://127.0.0.1:9", { maxBuffered: 10 });
  for (let index = 0; index < 50; index++) feedback.report({ kind: "kept", session: "s", event_id: `${index}` });
  assert.equal(await feedback.close(200), false);
  assert.equal(feedback.pending, 10);
  assert.equal(feedback.counts.get("dropped"), 40);
});

test("a URL that is none is refused", () => {
  assert.throws(() => client("gateway.example"), /expected http/);
});

test("a real gateway takes events", { skip: process.env.ETUDE_URL ? false : "ETUDE_URL names no gateway" }, async () => {
  const url = process.env.ETUDE_URL;
  const feedback = new FeedbackClient({ url, apiKey: process.env.ETUDE_FEEDBACK_KEY, intervalMs: 5 });
  feedback.report({ kind: "edited", value: 0.25, session: "typescript", turn: 0, span: [0, 2], user: "ada" });
  feedback.report({ kind: "thumbs", value: -1, completion: process.env.ETUDE_COMPLETION, event_id: "mine" });
  feedback.report({ kind: "thumbs", value: -1, completion: process.env.ETUDE_COMPLETION, event_id: "mine" });
  feedback.report({ kind: "thumbs", value: 3, session: "typescript" });
  assert.ok(await feedback.close());
  assert.deepEqual(Object.fromEntries(feedback.counts), { accepted: 2, duplicate: 1, refused: 1 });
  assert.match(feedback.refused[0].reason, /value=3 of thumbs: expected 1 or -1/);
});
