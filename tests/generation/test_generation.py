"""`generate` held against transformers': greedy answers, end tokens, draws, streaming, timings, and bad input."""

from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_reference, save
from narrow import dense
from transformers import TextIteratorStreamer

from infinilm import LLM, SamplingParams
from infinilm.errors import EngineError, InfinilmError, InvalidTypeError, InvalidValueError, PromptTooLongError
from infinilm.generation import GenerationMixin, GenerationTimings, infini_to_numpy
from infinilm.models import LlamaConfig, LlamaForCausalLM

PROMPTS = torch.randint(0, 160, (3, 30), generator=torch.Generator().manual_seed(0))
NUM_NEW = 50


def reference_generate(reference, prompts: torch.Tensor, eos_token_id=None, max_new_tokens: int = NUM_NEW):
    return reference.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id[0] if isinstance(eos_token_id, list) else eos_token_id,
    )


def load(directory: Path, kind: str = "llama-gqa", **settings) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(save(make_reference(kind, **settings), directory))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """Without an end token."""
    return load(tmp_path_factory.mktemp("llama"), eos_token_id=None)


@pytest.fixture(scope="module")
def with_text(tiny_dir: Path) -> LlamaForCausalLM:
    """With a tokenizer."""
    return LlamaForCausalLM.from_pretrained(tiny_dir)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3", "mistral"])
def test_greedy_answers_are_transformers(kind: str, batch_size: int, tmp_path: Path) -> None:
    prompts = PROMPTS[:batch_size]
    output = load(tmp_path, kind, eos_token_id=None).generate(prompts, NUM_NEW, temperature=0)
    expected = reference_generate(make_reference(kind, eos_token_id=None), prompts)
    assert torch.equal(output.sequences, expected)
    assert output.token_ids == expected[:, prompts.shape[1] :].tolist()
    assert output.text is None


def test_rows_end_by_themselves_and_are_padded(model, tmp_path: Path) -> None:
    free = model.generate(PROMPTS, NUM_NEW, temperature=0).token_ids
    # One from the middle of the first row's answer, one from the middle of the second's.
    ends = [free[0][20], free[1][9]]
    reference = make_reference("llama-gqa", eos_token_id=ends)
    ending = LlamaForCausalLM.from_pretrained(save(reference, tmp_path))
    output = ending.generate(PROMPTS, NUM_NEW, temperature=0)
    assert torch.equal(output.sequences, reference_generate(reference, PROMPTS, ends))
    lengths = [len(answer) for answer in output.token_ids]
    assert len(set(lengths)) > 1, "rows must end at different times for this to mean anything"
    for answer, whole in zip(output.token_ids, free, strict=True):
        assert answer == whole[: len(answer)]
        assert not set(answer[:-1]) & set(ends)
    assert output.timings.num_new_tokens == sum(lengths)
    assert output.sequences.shape[1] == PROMPTS.shape[1] + max(lengths)
    assert ending.generate(PROMPTS, NUM_NEW, None, False, temperature=0).token_ids == free


def test_end_tokens_outside_the_vocabulary_do_no_harm(model) -> None:
    inside = model.generate(PROMPTS, NUM_NEW, temperature=0).token_ids[0][5]
    config = LlamaConfig.from_dict({**model.config.to_dict(), "eos_token_id": [5000, inside]})
    ending = LlamaForCausalLM(config)
    for name, weight in ending.model.weight_targets().items():
        dense(weight).tensor.copy_(dense(model.model.weight_targets()[name]).tensor)
    output = ending.generate(PROMPTS, NUM_NEW, temperature=0)
    assert output.token_ids[0][-1] == inside
    assert int(output.sequences.max()) < 160


def test_inputs_of_every_kind_mean_the_same(model) -> None:
    expected = model.generate(PROMPTS, 5, temperature=0).sequences
    for prompts in (PROMPTS.tolist(), PROMPTS.numpy(), PROMPTS.to(torch.int32), PROMPTS.numpy().astype(np.uint8)):
        assert torch.equal(model.generate(prompts, 5, temperature=0).sequences, expected)
    for row in (PROMPTS[1], PROMPTS[1].tolist()):
        assert torch.equal(model.generate(row, 5, temperature=0).sequences, expected[1:2])


def test_whole_text_steps_agree_with_cached_ones(model) -> None:
    """A host without a cache computes the whole text each time; this one is transformers' model itself."""
    reference = make_reference("llama-gqa", eos_token_id=None)
    seen: list[Any] = []

    class WholeText(GenerationMixin):
        config = model.config

        def _start_generation(self, batch_size: int, max_len: int):
            seen.append((batch_size, max_len))

            def step(step):
                seen.append((step.num_computed, tuple(step.new_ids.shape)))
                with torch.inference_mode():
                    return reference(step.text).logits[:, -1].argmax(-1).tolist()

            return step

    output = WholeText().generate(PROMPTS, 4)
    assert torch.equal(output.sequences, model.generate(PROMPTS, 4, temperature=0).sequences)
    assert seen == [(3, 34), (0, (3, 30)), (30, (3, 1)), (31, (3, 1)), (32, (3, 1))]


def test_a_host_must_say_how_it_computes() -> None:
    class Nothing(GenerationMixin):
        config = LlamaConfig()

    with pytest.raises(NotImplementedError, match="Nothing must implement _start_generation"):
        Nothing().generate([1], 1)


def test_draws_follow_the_seed_and_the_row(model) -> None:
    same = PROMPTS[:1].expand(3, -1)
    drawn = model.generate(same, 20, seed=5).token_ids
    assert drawn == model.generate(same, 20, seed=5).token_ids
    assert drawn != model.generate(same, 20, seed=6).token_ids
    assert len({tuple(row) for row in drawn}) == 3
    assert model.generate(same[:1], 20, seed=5).token_ids == drawn[:1]
    assert model.generate(same, 20).token_ids != model.generate(same, 20).token_ids


def test_settings_of_the_draw_reach_each_row(model) -> None:
    greedy = model.generate(PROMPTS, 12, temperature=0).token_ids
    free = model.generate(PROMPTS, 12, seed=1, top_k=0).token_ids
    assert all(row != other for row, other in zip(free, greedy, strict=True))
    for settings in ({"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-6}):
        assert model.generate(PROMPTS, 12, seed=1, **settings).token_ids == greedy
    mixed = model.generate(PROMPTS, 12, seed=1, top_k=0, temperature=[1.0, 0.0, 1.0]).token_ids
    assert mixed == [free[0], greedy[1], free[2]]
    narrow = model.generate(PROMPTS, 12, seed=1, top_k=2, temperature=5.0).token_ids
    for row, answer in zip(PROMPTS, narrow, strict=True):
        text = torch.cat((row, torch.tensor(answer)))[None]
        logits = model(text).logits[0, len(row) - 1 : -1]
        ranks = (logits > logits.gather(1, torch.tensor(answer)[:, None])).sum(-1)
        assert set(ranks.tolist()) == {0, 1}


def test_the_real_model_answers_as_the_engine_does(smollm2: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(smollm2)
    question = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
    with LLM(smollm2, max_model_len=256, dtype="float32") as llm:
        prompt = llm.chat_prompt(question)
        [expected] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    output = model.generate(prompt, 40, temperature=0)
    assert output.token_ids == [expected.token_ids]
    assert output.text == [expected.text]
    assert "Paris" in output.text[0]


def test_text_comes_from_the_models_tokenizer_or_the_one_given(with_text) -> None:
    class Upper:
        def decode(self, ids) -> str:
            return with_text.tokenizer.decode(ids).upper()

    prompt = with_text.tokenizer.encode("hello")
    own = with_text.generate(prompt, 8, seed=3)
    assert own.text == [with_text.tokenizer.decode(own.token_ids[0])]
    assert with_text.generate(prompt, 8, Upper(), seed=3).text == [own.text[0].upper()]
    assert str(own).startswith(own.text[0])
    assert str(own).endswith(f"[{own.timings}]")


def test_the_end_token_is_in_the_ids_but_not_in_the_text(with_text) -> None:
    """Token 1 is the end; what a plain decoder would write for it must not be in the text."""

    class Spelled:
        def decode(self, ids) -> str:
            return " ".join(map(str, ids))

    prompts = torch.randint(2, 300, (40, 3), generator=torch.Generator().manual_seed(1))
    output = with_text.generate(prompts, 60, Spelled(), temperature=2.0, top_k=0, seed=0)
    ended = [row for row, answer in enumerate(output.token_ids) if answer[-1] == 1]
    assert 0 < len(ended) < 40
    for row, (answer, text) in enumerate(zip(output.token_ids, output.text, strict=True)):
        assert text == Spelled().decode(answer[:-1] if row in ended else answer)


def test_streamers_of_transformers(with_text) -> None:
    streamer = TextIteratorStreamer(with_text.tokenizer, skip_prompt=True, timeout=30)
    outputs = []
    prompt = with_text.tokenizer.encode("hello")
    thread = Thread(target=lambda: outputs.append(with_text.generate(prompt, 12, seed=3, streamer=streamer)))
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    assert streamed == outputs[0].text[0]


def test_a_function_gets_each_steps_tokens(model) -> None:
    steps: list[list[int]] = []
    output = model.generate(PROMPTS, 6, seed=0, streamer=steps.append)
    assert torch.tensor(steps).T.tolist() == output.token_ids


class Recorder:
    """A streamer that may fail."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.fails_after = fails_after
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.shapes.append(tuple(value.shape))
        if len(self.shapes) > self.fails_after:
            raise OSError("the pipe is broken")

    def end(self) -> None:
        self.has_ended = True


def test_a_streamer_is_ended_even_if_it_fails(model) -> None:
    recorder = Recorder()
    model.generate(PROMPTS, 3, streamer=recorder)
    assert (recorder.shapes, recorder.has_ended) == ([(3, 30), (3,), (3,), (3,)], True)
    failing = Recorder(fails_after=2)
    with pytest.raises(OSError, match="the pipe is broken"):
        model.generate(PROMPTS, 3, streamer=failing)
    assert failing.has_ended
    assert len(model.generate(PROMPTS, 3).token_ids) == 3


def test_timings(model) -> None:
    timings = model.generate(PROMPTS, 6, temperature=0).timings
    assert (timings.batch_size, timings.num_prompt_tokens, timings.num_new_tokens, timings.num_steps) == (3, 90, 18, 6)
    assert timings.ttft_s > 0
    assert timings.decode_s > 0
    assert timings.mean_itl_s == timings.decode_s / 5
    assert timings.prefill_tokens_per_s == 90 / timings.ttft_s
    assert timings.decode_tokens_per_s == 15 / timings.decode_s


def test_timings_of_one_token(model) -> None:
    timings = model.generate(PROMPTS[0], 1).timings
    assert (timings.num_prompt_tokens, timings.num_new_tokens) == (30, 1)
    assert timings.mean_itl_s is None
    assert timings.decode_tokens_per_s is None
    assert str(timings).endswith("; new tokens: 1")


def test_timings_are_written_in_their_units() -> None:
    timings = GenerationTimings(1, 100, 11, 11, ttft_s=0.5, decode_s=0.2)
    prefill, decode = str(timings).split("; ")
    assert prefill == "prompt tokens: 100, first new one after 500.0 ms (200.0 tokens/s)"
    assert decode == "new tokens: 11, 20.0 ms per step (50.0 tokens/s)"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"max_new_tokens": 0}, InvalidValueError, "max_new_tokens=0 is out of range; use 1 or more"),
        ({"max_new_tokens": 2.5}, InvalidTypeError, "max_new_tokens=2.5 must be an integer"),
        ({"max_new_tokens": 255}, PromptTooLongError, "would have 257 tokens, prompt and answer; the model takes 256"),
        ({"input_ids": [1] * 257}, PromptTooLongError, "would have 261 tokens"),
        ({"input_ids": []}, InvalidValueError, r"input_ids of shape \[1, 0\] is empty"),
        ({"input_ids": [[], []]}, InvalidValueError, r"input_ids of shape \[2, 0\] is empty"),
        ({"input_ids": [[1, 2], [3]]}, InvalidValueError, "input_ids has rows of different lengths"),
        ({"input_ids": [[[1]]]}, InvalidValueError, r"input_ids has shape \[1, 1, 1\]; use \[batch, seq\]"),
        ({"input_ids": 7}, InvalidValueError, r"input_ids has shape \[\]; use"),
        ({"input_ids": [1, 160]}, InvalidValueError, r"input_ids\[0, 1\]=160 is out of range; use 0 to 159"),
        ({"input_ids": [[1], [-1]]}, InvalidValueError, r"input_ids\[1, 0\]=-1 is out of range"),
        ({"input_ids": [2**63]}, InvalidValueError, "9223372036854775808 is out of range"),
        ({"input_ids": [1.0]}, InvalidTypeError, "input_ids must hold integers, not values of type float64"),
        ({"input_ids": [True]}, InvalidTypeError, "not values of type bool"),
        ({"input_ids": torch.ones(2, dtype=torch.bfloat16)}, InvalidTypeError, "not values of type torch.bfloat16"),
        ({"input_ids": "hello"}, InvalidTypeError, "input_ids must hold integers"),
        ({"input_ids": None}, InvalidTypeError, "input_ids must hold integers"),
        ({"tokenizer": "gpt2"}, InvalidTypeError, r"tokenizer='gpt2' must have a method decode\(ids\)"),
        ({"stop_on_eos": 1}, InvalidTypeError, "stop_on_eos=1 must be True or False"),
        ({"temperature": -1.0}, InvalidValueError, "temperature"),
        ({"temperature": float("nan")}, InvalidValueError, "temperature"),
        ({"temperature": [1.0, 1.0]}, InvalidValueError, "temperature has shape"),
        ({"top_k": 1.5}, InvalidTypeError, "top_k=1.5 must be"),
        ({"top_p": 1.1}, InvalidValueError, "top_p"),
        ({"seed": -1}, InvalidValueError, "seed=-1 is out of range; use 0 or more"),
        ({"seed": "x"}, InvalidTypeError, "seed='x' must be an integer"),
        ({"streamer": 5}, InvalidTypeError, "streamer=5 must have the methods put and end, or be a function"),
    ],
)
def test_bad_input(model, arguments: dict[str, object], kind: type[InfinilmError], message: str) -> None:
    with pytest.raises(kind, match=message):
        model.generate(**{"input_ids": [1, 2], "max_new_tokens": 4, **arguments})


def test_a_text_may_fill_the_model(model) -> None:
    assert model.generate([1, 2], 254, temperature=0).sequences.shape == (1, 256)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    config = LlamaConfig.from_dict(make_reference("llama-gqa").config.to_dict())
    broken = LlamaForCausalLM(config)
    dense(broken.model.weight_targets()["model.norm.weight"]).tensor.fill_(float("nan"))
    with pytest.raises(EngineError, match="the logits hold NaN"):
        broken.generate([1, 2], 4)


def test_infini_to_numpy_shares_memory() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    array = infini_to_numpy(tensor.t())
    assert (array.shape, array.dtype) == ((4, 3), np.dtype(np.float32))
    tensor[2, 1] = -7
    assert array[1, 2] == -7
    array[0, 0] = 5
    assert tensor[0, 0] == 5
    assert infini_to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["float16", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "bool"])
def test_infini_to_numpy_keeps_the_type(name: str) -> None:
    array = infini_to_numpy(torch.tensor([0, 1, 100]).to(getattr(torch, name)))
    assert array.dtype == np.dtype(name)
    assert array.tolist() == ([False, True, True] if name == "bool" else [0, 1, 100])


def test_infini_to_numpy_refuses_what_numpy_has_not() -> None:
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(InvalidValueError, match=f"tensor.dtype={dtype} is not supported; use float32, float16"):
            infini_to_numpy(torch.zeros(2, dtype=dtype))
    with pytest.raises(InvalidTypeError, match="must be a torch tensor, not list"):
        infini_to_numpy([1])  # type: ignore[arg-type]
