"""`infinilm bench` and `infinilm verify`: what is counted and compared, not how fast it is."""

import json
from pathlib import Path

import pytest
from checkpoints import make_reference, save
from cli.cli_driver import Cli
from narrow import present

from infinilm import LLM
from infinilm.bench.measure import WORKLOADS, Run, Summary, Workload, run_engine
from infinilm.bench.transformers_peer import PROMPTS, QUESTIONS, TransformersPeer
from infinilm.loading.checkpoint import open_checkpoint


def test_prompts_are_the_same_everywhere_and_new_in_each_repeat() -> None:
    workload = Workload("w", num_prompts=3, input_len=20, output_len=1, shared_prefix_len=15)
    prompts = workload.prompts(300, repeat=0)
    assert prompts == workload.prompts(300, repeat=0)
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:15]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert workload.prompts(300, repeat=1)[0][:15] != prompts[0][:15]
    assert max(max(prompt) for prompt in Workload("v", 1, 999, 1).prompts(300, repeat=0)) == 299
    assert Workload("w", 1, 4, 1).prompts(49152, repeat=0) == [[7380, 26412, 10626, 15413]]


def test_the_ready_made_workloads() -> None:
    assert str(WORKLOADS["single"]) == "single: 1 × 128 in, 64 out"
    assert str(WORKLOADS["batch"]) == "batch: 8 × 128 in, 64 out"
    assert str(WORKLOADS["prefill"]) == "prefill: 1 × 512 in, 1 out"
    assert str(WORKLOADS["prefix"]) == "prefix: 8 × 288 in (256 shared), 16 out"
    assert str(Workload("w", 8, 4, 2, concurrency=2)) == "w: 8 × 4 in, 2 out, 2 at a time"


def test_runs_sum_up_to_medians_and_percentiles() -> None:
    runs = [
        Run(
            seconds=2.0 * slowness,
            num_prefill_tokens=100,
            prefill_seconds=1.0 * slowness,
            num_decode_tokens=30,
            decode_seconds=0.5 * slowness,
            ttfts=[slowness],
            gaps=[0.1 * slowness] * 2,
            token_ids=[[1] * 40],
        )
        for slowness in (1.0, 2.0, 10.0)
    ]
    summary = Summary.of(runs)
    assert summary.prefill_per_second == 50.0
    assert summary.decode_per_second == 30.0
    assert summary.output_per_second == 10.0
    assert summary.ttft_p50 == 2.0
    assert summary.ttft_p99 == pytest.approx(9.84)
    assert summary.itl_p50 == pytest.approx(0.2)
    no_decode = Run(seconds=1.0, num_prefill_tokens=4, prefill_seconds=1.0, ttfts=[1.0], token_ids=[[1]])
    assert Summary.of([no_decode]).decode_per_second is None
    assert Summary.of([no_decode]).itl_p99 is None


@pytest.mark.parametrize("concurrency", [0, 1, 2])
def test_a_run_counts_every_token(llm: LLM, concurrency: int) -> None:
    workload = Workload("count", num_prompts=3, input_len=20, output_len=6, concurrency=concurrency)
    run = run_engine(llm, workload, workload.prompts(300, repeat=concurrency))
    assert [len(ids) for ids in run.token_ids] == [6, 6, 6]
    assert run.num_prefill_tokens == 60
    assert (len(run.ttfts), len(run.gaps)) == (3, 15)
    assert run.num_decode_tokens == 15  # first tokens are drawn by the steps that read the prompts
    assert run.prefill_seconds + run.decode_seconds == pytest.approx(run.seconds, rel=0.01)
    assert llm.is_finished()


def test_the_shared_prefix_is_computed_once(llm: LLM) -> None:
    workload = Workload("shared", num_prompts=4, input_len=40, output_len=2, shared_prefix_len=32, concurrency=1)
    run = run_engine(llm, workload, workload.prompts(300, repeat=0))
    assert run.num_prefill_tokens == 40 + 3 * 8


def test_both_engines_do_the_same_work(cli: Cli, tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    sizes = ("--input-len", "24", "--output-len", "6", "--repeat", "2")
    done = cli("bench", "-m", tiny_dir, "--peer", "transformers", *sizes, "--json", file)
    assert done.code == 0, done.err
    report = json.loads(file.read_text())
    assert (report["dtype"], report["device"], report["repeat"]) == ("float32", "cpu", 2)
    assert report["machine"]["num_threads"] == 1
    assert [work["name"] for work in report["workloads"]] == ["single", "batch", "prefill"]
    for work in report["workloads"]:
        assert work["num_equal_answers"] == 2 * work["num_prompts"]
        for figures in work["engines"].values():
            assert all(figure > 0 for figure in figures.values())
    lines = done.out.splitlines()
    assert "torch" in lines[1]
    assert "transformers" in lines[1]
    assert sum(line.startswith("ratio ") and line.count("×") == 6 for line in lines) == 3
    assert "batch: 8 × 24 in, 6 out   same answers: 16 of 16" in done.out
    assert max(map(len, lines[2:])) <= 80


def test_json_on_stdout_is_all_there_is(cli: Cli, tiny_dir: Path) -> None:
    sizes = ("--num-prompts", "2", "--input-len", "8", "--output-len", "1", "--concurrency", "1")
    done = cli("bench", "-m", tiny_dir, "-w", "custom", *sizes, "--json", "-", "--repeat", "1")
    (work,) = json.loads(done.out)["workloads"]
    assert (work["num_prompts"], work["concurrency"]) == (2, 1)
    assert list(work["engines"]) == ["infinilm"]
    assert work["engines"]["infinilm"]["decode_per_second"] is None


def test_verify_agrees_and_says_how_closely(cli: Cli, tiny_dir: Path) -> None:
    done = cli("verify", tiny_dir, "--max-tokens", "8", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["agrees"] is True
    assert found["num_prompts"] == len(PROMPTS) + len(QUESTIONS)
    assert found["num_equal"] + found["num_ties"] == found["num_tokens"] > 100
    assert 0 < found["max_prompt_difference"] < 1e-4
    assert 0 < found["max_output_difference"] < 1e-4
    assert found["num_logprobs"] > 20 * found["num_tokens"]


def test_verify_fails_beyond_the_tolerance(cli: Cli, tiny_dir: Path) -> None:
    done = cli("verify", tiny_dir, "--max-tokens", "2", "--tolerance", "1e-9")
    assert done.code == 1
    assert "DISAGREES (tolerance 1e-09)" in done.out


def test_verify_determinism(cli: Cli, tiny_dir: Path) -> None:
    sizes = ("--requests", "2", "--others", "2", "--max-tokens", "2", "--max-prompt-len", "20")
    done = cli("verify", tiny_dir, "--determinism", *sizes, "--attention-backend", "torch")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0].split() == ["alone,", "again", "18", "of", "18"]
    assert "begins at layer0_attention_output, at position" in lines[-2]
    assert "DIFFERENT bits" in lines[-1]
    refused = cli("verify", tiny_dir, "--determinism", "--tolerance", "0.1")
    assert refused.code == 2
    assert "leave out --tolerance" in refused.err


def test_verify_finds_tokens_that_differ(cli: Cli, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TransformersPeer.logprobs
    monkeypatch.setattr(TransformersPeer, "logprobs", lambda self, ids: right(self, ids).roll(1, dims=-1))
    done = cli("verify", tiny_dir, "--max-tokens", "2", "--tolerance", "1e9")
    assert done.code == 1
    assert "different: token 0 of prompt 1 is " in done.out


def test_verify_works_without_a_tokenizer(cli: Cli, tmp_path: Path) -> None:
    done = cli("verify", save(make_reference("qwen3"), tmp_path), "--max-tokens", "4")
    assert done.code == 0, done.out
    assert "agrees (tolerance 0.001)" in done.out


def test_the_peer_reads_gguf(smollm2: Path) -> None:
    peer = TransformersPeer(smollm2, dtype="float32", device="cpu")
    tokenizer = present(open_checkpoint(smollm2).tokenizer())
    logprobs = peer.logprobs(tokenizer.encode("The capital of France is"))
    assert tokenizer.decode([int(logprobs[-1].argmax())]) == " Paris"
    work = Workload("w", num_prompts=3, input_len=4, output_len=3, concurrency=2)
    run = peer.run(work, work.prompts(300, repeat=0))
    assert [len(ids) for ids in run.token_ids] == [3, 3, 3]
    assert (run.num_prefill_tokens, run.num_decode_tokens, len(run.ttfts), len(run.gaps)) == (12, 6, 3, 6)
