"""What the tests of batch jobs share: rows, and answers without what differs between two runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infinilm.batch.rows import CHAT, COMPLETION, RESPONSES

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "hello"}]
SETTINGS: dict[str, Any] = {"num_kvcache_blocks": 512, "max_num_seqs": 16}

MIXED: list[Any] = [
    {"prompt": "one two", "max_tokens": 9, "temperature": 0},
    {"messages": HELLO, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"custom_id": "drawn", "messages": HELLO, "max_tokens": 8, "temperature": 1.0, "n": 2},
    {"custom_id": "own seed", "url": COMPLETION, "body": {"prompt": "x", "seed": 5, "max_tokens": 6}},
    {"prompt": ["a b", "c d"], "max_tokens": 5, "echo": True, "logprobs": 1, "temperature": 0},
    {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "stop": ["e", "a"]},
    {
        "custom_id": "tools",
        "url": CHAT,
        "body": {"messages": HELLO, "tools": [TOOL], "max_tokens": 7, "temperature": 0},
    },
    {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 20, "temperature": 0},
    {"prompt": "x", "guided_choice": ["yes", "no"]},
    {"custom_id": "responses", "url": RESPONSES, "body": {"input": "hi", "max_output_tokens": 5, "temperature": 0}},
    {"prompt": "x", "temperature": -1},
    {"messages": HELLO, "unknown": 1},
    {"custom_id": "drawn", "prompt": "again"},
    {"custom_id": "other model", "url": COMPLETION, "body": {"model": "gpt-4", "prompt": "x"}},
    "not an object",
]
"""Rows of all kinds. Those from the eleventh on are errors."""
NUM_GOOD = 10


def write_rows(path: Path, num_plain: int) -> Path:
    """A file of the mixed rows and of plain ones."""
    plain = [
        {"prompt": f"row {n} says", "max_tokens": 4 + n % 12, "temperature": n % 2, "custom_id": f"plain-{n}"}
        for n in range(num_plain)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*MIXED, *plain]), encoding="utf-8")
    return path


def comparable(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Answers without ids and times, and without what the prefix cache had by chance; numbers to 4 decimals."""
    answers = [json.loads(line, parse_float=lambda text: round(float(text), 4)) for line in lines]
    for answer in answers:
        if answer["response"] is not None:
            del answer["response"]["request_id"]
            body = answer["response"]["body"]
            for name in ("id", "created", "created_at", "completed_at", "timings"):
                body.pop(name, None)
            for name in ("prompt_tokens_details", "input_tokens_details"):
                body.get("usage", {}).pop(name, None)
            for item in body.get("output", []):
                del item["id"]
            for choice in body.get("choices", []):
                for call in choice.get("message", {}).get("tool_calls", []):
                    del call["id"]
    return answers


def start_batch(*args: str | Path) -> subprocess.Popen[str]:
    """`infinilm batch` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "infinilm", "batch", *map(str, args)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
