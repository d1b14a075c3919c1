/** Talks to the server: sends the key, turns errors into words, and reads answers as they arrive. */

const KEY_NAME = "infinilm.key";
const DONE = "[DONE]";

/** Why the server refused a request, or could not be reached. */
export class ServerError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }

  get needsKey() {
    return this.status === 401;
  }
}

/** Keep the key until the tab is closed. */
export function keepKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY_NAME) !== null;
}

/** The body of `/health`, which it has with both statuses: 200 and 503. */
export async function readHealth() {
  const response = await request("health");
  if (response.ok || response.status === 503) return response.json();
  throw await readError(response);
}

/** The model's own sampling values, by name. They apply unless a request sets others. */
export async function readSamplingDefaults() {
  const response = await request("v1/models");
  if (!response.ok) throw await readError(response);
  return (await response.json()).data[0].default_sampling_params ?? {};
}

/** The events of a chat completion. Ends with an error if the server reports one, or if the end is missing. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await readError(response);
  for await (const data of readData(response.body)) {
    if (data === DONE) return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message, { param: event.error.param });
    yield event;
  }
  throw new ServerError("the connection was cut before the answer was complete");
}

async function request(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY_NAME);
  const all = key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
  try {
    return await fetch(path, { ...options, headers: all, cache: "no-store" });
  } catch (error) {
    throw asReachError(error);
  }
}

/** The data of server-sent events. One event may arrive in several chunks. */
async function* readData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ")) yield line.slice(6);
      }
    }
  } catch (error) {
    throw asReachError(error);
  }
}

function asReachError(error) {
  return error.name === "AbortError" ? error : new ServerError("the server can't be reached; is it running?");
}

async function readError(response) {
  const { status } = response;
  try {
    const { error } = await response.json();
    return new ServerError(error.message, { status, param: error.param });
  } catch {
    return new ServerError(`the server answered with the status ${status}`, { status });
  }
}
