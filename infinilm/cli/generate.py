"""`infinilm generate`: answers to prompts from the command line, files or stdin."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinilm.cli.answering import open_engine, stream_answer
from infinilm.cli.display import AnswerWriter, console, format_rate, format_seconds, head, make_table, note, visible
from infinilm.cli.options import takes_config, takes_sampling
from infinilm.config import Config
from infinilm.errors import EngineError, InvalidValueError
from infinilm.outputs import CompletionOutput, RequestOutput
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from infinilm import LLM

STDIN = "-"


Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT", help="Texts to continue, or with --chat to answer; - is stdin.", show_default=False
    ),
]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Read a prompt from a file; - is stdin. Can be given several times.",
        exists=True,
        dir_okay=False,
        allow_dash=True,
    ),
]


@takes_sampling(max_tokens=128)
@takes_config()
def generate(
    *,
    prompts: Prompts = None,
    files: Files = None,
    lines: Annotated[bool, typer.Option("--lines", help="Files and stdin hold one prompt per line.")] = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw", help="Answer prompts as messages of a chat, or continue their text (the default)."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --chat: the system message.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per prompt, each on a line.")] = False,
    config: Config,
    sampling: dict[str, Any],
) -> None:
    """Generate text from prompts.

    A single prompt's answer is streamed, and is all that is written to stdout. Several prompts are answered together,
    with a table of times at the end: TTFT is the time to the first token, ITL the time between tokens. Runs can be
    repeated: without --seed, draws are the same each time.
    """
    if system is not None and not chat:
        raise InvalidValueError("--system is a message of a chat; give --chat as well")
    if "logprobs" in sampling and not as_json:
        raise InvalidValueError("--logprobs are shown by --json only; give it as well")
    texts = read_prompts(prompts or [], files or [], lines=lines)
    with open_engine(config) as engine:
        start_time = perf_counter()
        encoded = _encode(engine, texts, chat, system)
        params = replace(engine.default_sampling_params, **sampling)
        if len(texts) == 1 and params.n == 1 and not as_json:
            outputs = [_stream(engine, encoded[0], params)]
        else:
            outputs = engine.generate(encoded, params, use_tqdm=sys.stderr.isatty())
            if as_json:
                for text, output in zip(texts, outputs, strict=True):
                    typer.echo(json.dumps(_to_json(text, output), ensure_ascii=False))
            else:
                _show(texts, outputs, perf_counter() - start_time)
    if errors := [output.error for output in outputs if output.error]:
        raise EngineError(f"{len(errors)} of {len(outputs)} prompts failed: {errors[0]}")
    if any(output.finish_reason == "abort" for output in outputs):
        raise KeyboardInterrupt


def read_prompts(prompts: Sequence[str], files: Sequence[Path], *, lines: bool) -> list[str]:
    """The prompts of arguments, then of files; a dash, or no prompt at all, means stdin."""
    if not prompts and not files:
        if sys.stdin.isatty():
            raise InvalidValueError("there is no prompt; give one as an argument, with --file, or through a pipe")
        files = [Path(STDIN)]
    texts: list[str] = []
    for prompt in prompts:
        texts += _read(Path(STDIN), lines) if prompt == STDIN else [prompt]
    for file in files:
        texts += _read(file, lines)
    return texts


def _read(file: Path, lines: bool) -> list[str]:
    """A file's prompts. The newline at the end of a file does not belong to a prompt."""
    name = "stdin" if str(file) == STDIN else str(file)
    try:
        text = sys.stdin.read() if str(file) == STDIN else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    found = [line for line in text.splitlines() if line.strip()] if lines else [text.removesuffix("\n")]
    if not any(found):
        raise InvalidValueError(f"{name} is empty, so there is no prompt in it")
    return found


def _encode(engine: "LLM", texts: list[str], chat: bool, system: str | None) -> list[str] | list[list[int]]:
    if not chat:
        return texts
    opening = [{"role": "system", "content": system}] if system is not None else []
    return [engine.chat_prompt([*opening, {"role": "user", "content": text}]) for text in texts]


def _stream(engine: "LLM", prompt: str | list[int], sampling: SamplingParams) -> RequestOutput:
    writer = AnswerWriter()
    for output in stream_answer(engine, prompt, sampling):
        writer.write(output.outputs[0].new_text)
    writer.end()
    metrics = output.metrics
    note(
        f"{len(output.token_ids)} tokens ({output.finish_reason}) · TTFT {format_seconds(metrics.ttft)} · "
        f"ITL {format_seconds(metrics.itl)} · {format_rate(metrics.tokens_per_second)} tokens/s"
    )
    return output


def _show(texts: list[str], outputs: list[RequestOutput], seconds: float) -> None:
    from rich.rule import Rule
    from rich.text import Text

    screen = console()
    for number, (text, output) in enumerate(zip(texts, outputs, strict=True), 1):
        for answer in output.outputs:
            label = f"{number}.{answer.index + 1}" if len(output.outputs) > 1 else f"{number}"
            title = Text(f"{label}  {head(text, screen.width - 12)}", style="bold")
            screen.print(Rule(title, align="left", characters="─", style="dim"))
            # Text is wrapped at words on a terminal, and unchanged in a file.
            screen.print(Text(visible(answer.text.strip("\n"))), soft_wrap=not screen.is_terminal)
            screen.print()
    screen.print(_times(outputs, seconds))


def _times(outputs: list[RequestOutput], seconds: float) -> "Table":
    table = make_table("prompt", "tokens in", "tokens out", "ended by", "TTFT", "ITL", "tokens/s")
    for number, output in enumerate(outputs, 1):
        metrics = output.metrics
        table.add_row(
            str(number),
            str(len(output.prompt_token_ids)),
            str(_num_tokens(output)),
            "/".join(dict.fromkeys(str(answer.finish_reason) for answer in output.outputs)),
            format_seconds(metrics.ttft),
            format_seconds(metrics.itl),
            format_rate(metrics.tokens_per_second),
        )
    table.add_section()
    num_tokens = sum(map(_num_tokens, outputs))
    table.add_row(
        "together",
        str(sum(len(output.prompt_token_ids) for output in outputs)),
        str(num_tokens),
        f"in {format_seconds(seconds)}",
        format_seconds(_mean([output.metrics.ttft for output in outputs])),
        format_seconds(_mean([output.metrics.itl for output in outputs])),
        format_rate(num_tokens / seconds),
        style="bold",
    )
    return table


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _to_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    answers = [_answer_to_json(answer) for answer in output.outputs]
    record = {
        "prompt": prompt,
        "prompt_token_ids": output.prompt_token_ids,
        **answers[0],
        "metrics": {name: value for name, value in asdict(output.metrics).items() if name != "arrival_time"},
    }
    if len(answers) > 1:
        record["outputs"] = answers
    if output.error:
        record["error"] = output.error
    return record


def _answer_to_json(answer: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        record["logprobs"] = [asdict(position) for position in answer.logprobs]
    return record
