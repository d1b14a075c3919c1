"""`infinilm generate`, held against the Python API."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.cli_driver import Cli
from narrow import present

from infinilm import LLM, SamplingParams
from infinilm.cli.display import format_seconds, head, visible
from infinilm.cli.generate import read_prompts
from infinilm.errors import InvalidValueError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_stdout_of_one_prompt_is_its_text(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    expected = llm.generate("hello there", GREEDY, use_tqdm=False)[0].text
    done = cli("generate", "-t", "0", "-m", tiny_dir, "-n", "12", "hello there")
    assert (done.code, done.out) == (0, expected + "\n")
    assert "12 tokens (length) · TTFT " in done.err
    assert " tokens/s" in done.err


def test_several_prompts_are_shown_with_their_times(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    prompts = ["one", "two", "three"]
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    done = cli("generate", "-t", "0", "-m", tiny_dir, "-n", "12", *prompts)
    lines = done.out.splitlines()
    for number, (prompt, output) in enumerate(zip(prompts, expected, strict=True), 1):
        assert any(line.startswith(f"{number}  {prompt} ──") for line in lines)
        assert visible(output.text.strip("\n")) in done.out
    for column in ("tokens in", "tokens out", "TTFT", "ITL", "tokens/s"):
        assert column in done.out
    total = next(line for line in lines if line.startswith("together")).split()
    assert total[1:3] == [str(sum(len(output.prompt_token_ids) for output in expected)), "36"]
    assert max(map(len, lines)) <= 80


def test_json_has_what_the_api_answers(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    done = cli("generate", "-t", "0", "-m", tiny_dir, "-n", "5", "--logprobs", "2", "--json", "a b", "c")
    records = [json.loads(line) for line in done.out.splitlines()]
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    for record, prompt in zip(records, ("a b", "c"), strict=True):
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        assert record["prompt"] == prompt
        assert (record["text"], record["token_ids"]) == (output.text, output.token_ids)
        assert record["finish_reason"] == output.finish_reason
        assert [item["token_id"] for item in record["logprobs"]] == output.token_ids
        assert all(len(item["top"]) == 2 for item in record["logprobs"])
        assert record["metrics"]["ttft"] > 0
        assert record["metrics"]["tokens_per_second"] > 0


def test_ranks_share_the_model(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    expected = llm.generate("hello there", GREEDY, use_tqdm=False)[0].text
    assert cli("generate", "-t", "0", "-m", tiny_dir, "--tp", "2", "-n", "12", "hello there").out == expected + "\n"
    refused = cli("generate", "-m", tiny_dir, "--tensor-parallel-size", "3", "hello there")
    assert refused.code != 0
    assert "use a tensor parallel size of 1, 2, 4" in refused.err
    assert cli("generate", "-t", "0", "-m", tiny_dir, "-p", "2", "-n", "12", "hello there").out == expected + "\n"
    refused = cli("generate", "-m", tiny_dir, "--pipeline-parallel-size", "3", "hello there")
    assert refused.code != 0
    assert "pipeline_parallel_size=3 is more than the model's 2 layers; use 2 or less" in refused.err


def test_sampling_options_reach_the_sampler(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.9,
        max_tokens=16,
        top_p=0.8,
        top_k=40,
        min_p=0.01,
        seed=3,
        n=2,
        repetition_penalty=1.2,
        stop=("q",),
    )
    output = llm.generate("hello", params, use_tqdm=False)[0]
    options = "-t 0.9 -n 16 --top-p 0.8 --top-k 40 --min-p 0.01 --seed 3 --n 2 --repetition-penalty 1.2 --stop q"
    record = json.loads(cli("generate", "-m", tiny_dir, *options.split(), "--json", "hello").out)
    assert [answer["token_ids"] for answer in record["outputs"]] == [o.token_ids for o in output.outputs]
    assert record["outputs"][0] != record["outputs"][1]
    shown = cli("generate", "-m", tiny_dir, *options.split(), "hello").out
    assert "1.1  hello ──" in shown
    assert "1.2  hello ──" in shown


def test_chat_uses_the_template(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    arguments = ("generate", "-t", "0", "-m", tiny_dir, "-n", "12", "--json", "hi")
    record = json.loads(cli(*arguments, "--chat", "--system", "be brief").out)
    assert record["prompt_token_ids"] == expected.prompt_token_ids
    assert record["token_ids"] == expected.token_ids
    raw = json.loads(cli(*arguments).out)
    assert raw["prompt_token_ids"] == present(llm.tokenizer).encode("hi")


def test_prompts_come_from_arguments_files_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n\nthree\n")

    def read(prompts: list[str], files: list[Path], *, lines: bool = False) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin\n"))
        return read_prompts(prompts, files, lines=lines)

    assert read(["a"], []) == ["a"]
    assert read([], []) == ["from\nstdin"]
    assert read([], [], lines=True) == ["from", "stdin"]
    assert read(["a", "-", "b"], []) == ["a", "from\nstdin", "b"]
    assert read(["a"], [file]) == ["a", "one\ntwo\n\nthree"]
    assert read(["a"], [file, Path("-")], lines=True) == ["a", "one", "two", "three", "from", "stdin"]


def test_files_without_a_prompt_are_refused_by_name(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidValueError, match=f"{empty} is empty"):
        read_prompts([], [empty], lines=False)
    with pytest.raises(InvalidValueError, match=f"{binary} is not UTF-8"):
        read_prompts([], [binary], lines=False)


def test_what_is_shown_cannot_control_the_terminal() -> None:
    assert visible("a\x1b[2J\x07b\tc\nd\x9be\r") == "a�[2J�b\tc\nd�e�"
    assert head("  a long\n\x1b prompt ", 10) == "a long �…"
    assert head("short", 10) == "short"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0.00314, "3.1 ms"), (0.182, "182 ms"), (0.9999, "1.00 s"), (12.345, "12.35 s")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_embedded_model_answers(smollm2: Path) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
    command = [sys.executable, "-m", "infinilm", "generate", "--max-tokens", "8", *prompts]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert " Paris" in done.stdout
    assert " 5, 6, 7" in done.stdout
    for figure in ("TTFT", "ITL", "tokens/s"):
        assert figure in done.stdout
