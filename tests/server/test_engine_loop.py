"""What the engine's process reports of its steps, and when."""

from pathlib import Path
from socket import socketpair

import pytest

from infinilm import LLM, SamplingParams
from infinilm.errors import WorkerDiedError
from infinilm.framing import ChannelClosedError, FrameSocket
from infinilm.server import engine_process, messages
from infinilm.server.engine_process import EngineLoop

PROMPTS = {"a": [3, 1, 4, 1, 5], "b": [9, 2, 6], "c": [5, 3, 5, 8]}
LENGTHS = {"a": 12, "b": 5, "c": 12}


def params(name: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=LENGTHS[name], ignore_eos=True)


def run(engine: LLM) -> list[messages.Stepped]:
    """The reports of a loop that answers the prompts, "c" to its third token only."""
    ours, theirs = map(FrameSocket, socketpair())
    loop = EngineLoop(engine, theirs, messages.Timing(1.0, 1.0, 1.0))
    num_steps = 0

    def send(command: messages.Command) -> None:
        ours.send_frame(messages.encode_message(command))

    def watch() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            send(messages.Abort("c"))
        if num_steps == max(LENGTHS.values()):
            send(messages.Stop())
        advance()

    advance, engine.advance = engine.advance, watch  # type: ignore[method-assign]
    for name, prompt in PROMPTS.items():
        send(messages.Submit(name, prompt, messages.params_to_wire(params(name)), None))
    try:
        loop.run()
    finally:
        del engine.advance
    return read_reports(ours, theirs)


def read_reports(ours: FrameSocket, theirs: FrameSocket) -> list[messages.Stepped]:
    """What a loop has sent to the other end."""
    theirs.close()
    reports = []
    while True:
        try:
            reports.append(messages.decode_report(ours.receive_frame()))
        except ChannelClosedError:
            return [report for report in reports if isinstance(report, messages.Stepped)]


@pytest.mark.parametrize("answer_s", [0.0, 1000.0])
def test_reports_bring_all_tokens_however_many_steps_they_are_of(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tiny_dir: Path, answer_s: float
) -> None:
    expected = {
        name: output.token_ids
        for name, output in zip(
            PROMPTS,
            llm.generate(list(PROMPTS.values()), [params(name) for name in PROMPTS], use_tqdm=False),
            strict=True,
        )
    }
    monkeypatch.setattr(engine_process, "ANSWER_S", answer_s)
    with LLM(tiny_dir, num_kvcache_blocks=64) as engine:
        reports = run(engine)
    found: dict[str, list[int]] = {name: [] for name in PROMPTS}
    ends: dict[str, str] = {}
    for report in reports:
        for delta in report.deltas:
            found[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                assert ends.setdefault(delta.request_id, delta.finish_reason) == delta.finish_reason
    assert ends == {"a": "length", "b": "length", "c": "abort"}
    assert found["a"] == expected["a"]
    assert found["b"] == expected["b"]
    assert found["c"] == expected["c"][: len(found["c"])]
    # While the receiver is busy with the first report, one more brings the rest, at the end.
    assert len(reports) == (2 if answer_s else max(LENGTHS.values()))


def test_answers_that_ended_before_a_worker_died_are_reported(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tiny_dir: Path
) -> None:
    (expected,) = llm.generate([PROMPTS["b"]], params("b"), use_tqdm=False)
    monkeypatch.setattr(engine_process, "ANSWER_S", 1000.0)  # the second report would come at the end
    ours, theirs = map(FrameSocket, socketpair())
    with LLM(tiny_dir, num_kvcache_blocks=64) as engine:
        num_steps = 0

        def advance() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps > LENGTHS["b"]:
                monkeypatch.setattr(engine.executor, "check_health", die)
            compute()

        def die() -> None:
            raise WorkerDiedError("rank 1 died")

        compute = engine.advance
        monkeypatch.setattr(engine, "advance", advance)
        for name in ("a", "b"):
            ours.send_frame(
                messages.encode_message(
                    messages.Submit(name, PROMPTS[name], messages.params_to_wire(params(name)), None)
                )
            )
        with pytest.raises(WorkerDiedError, match="rank 1 died"):
            EngineLoop(engine, theirs, messages.Timing(1.0, 1.0, 1.0)).run()
    deltas = [delta for report in read_reports(ours, theirs) for delta in report.deltas]
    assert {delta.request_id: delta.finish_reason for delta in deltas} == {"a": None, "b": "length"}
    assert [token for delta in deltas if delta.request_id == "b" for token in delta.token_ids] == expected.token_ids
