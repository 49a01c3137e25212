// The server's endpoints: the served model, and a chat completion as a stream of chunks.

const LONGEST_TASK = 30; // milliseconds of reading after which the page is painted and keys are heard

/** What went wrong, in words for a person. `status` is 0 where no answer came. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The entries of `/v1/models`. */
export async function listModels(key) {
  const response = await call("v1/models", { headers: headers(key) });
  const { data } = await response.json();
  if (!Array.isArray(data) || data.length === 0) throw new ApiError("The server has no model.");
  return data;
}

/** The chunks of a chat completion, until `[DONE]`. Aborting `signal` makes it throw an `AbortError`. */
export async function* streamChat(request, key, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = parsed(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? "The server reports an error.");
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer was complete.");
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The server sent something that cannot be read.");
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw lost(error);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

function lost(error) {
  if (error.name === "AbortError") return error;
  return new ApiError("The server cannot be reached. Is it still running?");
}

async function refusal(response) {
  const told = await response
    .json()
    .then((body) => body.error?.message)
    .catch(() => undefined);
  const wait = response.headers.get("Retry-After");
  const message = told ?? `The server answered with status ${response.status}.`;
  return new ApiError(wait ? `${message} Try again in ${wait} s.` : message, response.status);
}

/** The `data` of server-sent events, wherever the network cuts them. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let paused = performance.now();
  try {
    for (;;) {
      if (performance.now() - paused > LONGEST_TASK) {
        await new Promise((resolve) => setTimeout(resolve));
        paused = performance.now();
      }
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trim()).join("\n");
      }
    }
  } catch (error) {
    throw lost(error);
  } finally {
    reader.cancel().catch(() => {}); // closes the connection where the reader stops early
  }
}
