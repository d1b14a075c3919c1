"""Runs clients of OpenAI's API against a server and prints what came of it: `make test-clients`.

The server runs in this environment, the clients in another one (`--python`), because their dependencies conflict with
each other's newest versions, and none of them needs infinilm.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
CLIENTS = {
    "openai": "client_openai.py",
    "litellm": "client_litellm.py",
    "langchain-openai": "client_langchain_openai.py",
    "pydantic-ai-slim": "client_pydantic_ai.py",
    "instructor": "client_instructor.py",
    "llama-index-llms-openai-like": "client_llama_index.py",
    "llm": "client_llm.py",
}
"""Scripts by the package that they need."""
MODEL = "smollm2-135m"
TIME_LIMIT_S = 600.0
"""For the calls of one client."""
Row = tuple[str, str, str, str]
"""Client, version, call, result."""


def run_client(python: str, package: str, url: str, model: str) -> list[Row]:
    """The calls of one client with their results. A client that is not installed is skipped."""
    version = find_version(python, package)
    if version is None:
        return [(package, "", "", f"skipped: not installed for {python}")]
    done = subprocess.run(
        [python, HERE / CLIENTS[package], url, model], capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S
    )
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"call"')]
    rows = [(package, version, each["call"], each["result"]) for each in records]
    if done.returncode:
        rows.append((package, version, "the script", f"ended with {done.returncode}: {done.stderr[-400:]}"))
    if any(row[3] != "ok" for row in rows):
        sys.stderr.write(done.stderr)
    return rows


def find_version(python: str, package: str) -> str | None:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def show(rows: list[Row]) -> None:
    header: Row = ("client", "version", "call", "result")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(3)]
    for row in (header, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "------"), *rows):
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        print("  ".join([*cells, " ".join(row[3].split())[:200]]), flush=True)


def main() -> int:
    import server_driver

    from infinilm.loading.sources import resolve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="The Python that has the clients.")
    parser.add_argument("clients", nargs="*", help=f"Some of {', '.join(CLIENTS)}; default: all.")
    asked = parser.parse_args()
    rows: list[Row] = []
    server_driver.TIME_LIMIT_S = 2 * TIME_LIMIT_S
    for package in asked.clients or CLIENTS:
        with server_driver.serving(resolve(None), "--model-name", MODEL) as server:
            rows += run_client(asked.python, package, server.url, MODEL)
    show(rows)
    num_bad = sum(row[3] != "ok" and not row[3].startswith("skipped") for row in rows)
    print(f"{len(rows)} calls, {num_bad} failed")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
