// SPDX-License-Identifier: Apache-2.0
// The gateway's API, as far as the page needs it. Addresses are relative: the gateway may lie under a prefix.

/** What the gateway refused, or that it could not be reached; `status` is 0 then. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The ids of the models that can answer. */
export async function models(key) {
  const response = await request("v1/models", { headers: headers(key) });
  return (await response.json()).data.map((model) => model.id);
}

/** The events of one chat completion in order, until the end of the stream. Aborting `signal` ends the answer. */
export async function* chat(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json", "X-Tandem-Regenerate": "0" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, response.status);
    yield event;
  }
  throw new ApiError("The connection ended before the answer did.", 0);
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway can't be reached.", 0);
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway answered with status ${response.status}.`;
  }
}

/** The data of server-sent events; comments (heartbeats) are passed over. */
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const events = held.split("\n\n");
      held = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
