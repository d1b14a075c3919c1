"""What a long prompt of one tenant does to the others of a server: time to first token, and pace of open streams.

    python benchmarks/serve_long_prompt.py [MODEL] [--words 7500] [--no-stream] [--json FILE]

Starts `infinilm serve` with three API keys. The first tenant reads a stream (unless `--no-stream`), the second sends a
prompt of many words, and while that is computed the third says "Hi" again and again. All times are the clients'.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

KEYS = {name: f"bench-key-of-{name}" for name in ("reader", "writer", "guest")}
WORDS = ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they"]
PAUSE_S = 0.5


class Client:
    """A tenant."""

    def __init__(self, url: str, name: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEYS[name]}"}, timeout=600)

    async def times(self, prompt: str, max_tokens: int, stop: asyncio.Event | None = None) -> list[float]:
        """Stream an answer. Returns the time of the request, and the time of each piece."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        found = [time.perf_counter()]
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith('data: {"error"') or response.status_code != 200:
                    raise RuntimeError(line)
                if line.startswith("data: {"):
                    found.append(time.perf_counter())
                if stop is not None and stop.is_set():
                    break
        return found


async def measure(url: str, num_words: int, *, has_stream: bool) -> dict[str, Any]:
    reader, writer, guest = (Client(url, name) for name in KEYS)
    for client in (reader, writer, guest):
        await client.times("Hello there", 8)
    idle = [await guest.times(f"Hi {number}", 4) for number in range(5)]
    alone = await reader.times("Once upon a time", 100)
    rng = random.Random(time.time())
    prompt = " ".join(rng.choice(WORDS) for _ in range(num_words))
    stop = asyncio.Event()
    stream = asyncio.create_task(reader.times("Long ago there was", 8000, stop)) if has_stream else None
    await asyncio.sleep(1)
    start = time.perf_counter()
    writing = asyncio.create_task(writer.times(prompt, 2))
    await asyncio.sleep(1)
    waits: list[float] = []
    while not writing.done():
        asked, first, *_ = await guest.times(f"Hi {len(waits)}", 4)
        waits.append(first - asked)
        await asyncio.sleep(PAUSE_S)
    _, done, *_ = await writing
    stop.set()
    gaps = []
    if stream is not None:
        times = [each for each in (await stream)[1:] if start <= each <= done]
        gaps = [after - before for before, after in itertools.pairwise(times)]
    return {
        "idle_ttft_s": describe([times[1] - times[0] for times in idle]),
        "alone_gap_s": describe([after - before for before, after in itertools.pairwise(alone[1:])]),
        "long_prompt_s": done - start,
        "guest_ttft_s": describe(waits),
        "guest_ttfts_s": [round(wait, 2) for wait in waits],
        "stream_gap_s": describe(gaps) if gaps else None,
    }


def describe(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"count": len(values), "first": values[0], "mean": sum(values) / len(values), "p99": p99, "max": ordered[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*")
    parser.add_argument("--words", type=int, default=7500)
    parser.add_argument("--no-stream", action="store_true", help="Nobody decodes meanwhile.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "infinilm", "serve", *options.model, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "INFINILM_API_KEY": " ".join(KEYS.values())},
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if found := re.search(r"address\s+(http://\S+)", line):
                break
        else:
            raise RuntimeError("the server did not start")
        result = asyncio.run(measure(found.group(1), options.words, has_stream=not options.no_stream))
    finally:
        server.terminate()
        server.wait(60)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
