"""Checkpoints to run whole models from, and what transformers says of the engine's answers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from checkpoints import ARCHITECTURES, make_reference, save
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from infinilm import LLM, RequestOutput, SamplingParams
from infinilm.outputs import TokenLogprobs

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "Qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "llama-3.1-8b": (
        "Llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
}
"""Public models' sizes, but for the number of layers: name → transformers' class prefix and settings."""
NUM_LAYERS = 4
NAMES = (*SHAPES, *ARCHITECTURES)

NUM_TOP = 20
"""Most likely tokens looked at, at each position."""
TIE_WIDTH = 10
"""Two tokens may change places if transformers' logits of them are no further apart than so many times its noise.

Its difference of two logits and ours are four numbers, each off by the noise, so they differ by twice that. Of some
thousand differences, none should be five times the usual.
"""


def write_checkpoint(name: str, directory: Path, device: str) -> Path:
    """Save random weights in bfloat16, such that logits are of order 1 and tell tokens apart."""
    if name in ARCHITECTURES:
        return save(make_reference(name, max_position_embeddings=1024).to(torch.bfloat16), directory)
    prefix, settings = SHAPES[name]
    config = getattr(transformers, f"{prefix}Config")(num_hidden_layers=NUM_LAYERS, dtype="bfloat16", **settings)
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator(device).manual_seed(7)
    weights = {}
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, device=device)
        noise = 1 + 0.2 * noise if "norm" in key else noise * weight.shape[-1] ** -0.5
        weights[key] = noise.to("cpu", torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far answers are from what transformers would have said."""

    num_tokens: int
    num_equal: int
    """Tokens that are transformers' own choice."""
    worst: float
    """By how much transformers' logit of a token falls short of its greatest."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A checkpoint, and transformers' model of it in bfloat16."""

    path: Path
    model: PreTrainedModel
    noise: float
    """The root mean square of what bfloat16 adds to the logits of the most likely tokens, in transformers itself."""
    exact: PreTrainedModel | None = None
    """The model in float32, if it is a mixture of experts."""

    @classmethod
    def of(cls, path: Path, device: str) -> "Reference":
        """Load a checkpoint, for a moment in float32 too. Other attention than `eager` may not cap scores."""
        model, exact = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval().to(device)
            for dtype in (torch.bfloat16, torch.float32)
        )
        for module in (*model.modules(), *exact.modules()):  # of GPT-OSS; older releases have constants there
            if hasattr(module, "limit") and hasattr(module, "alpha"):
                module.limit = getattr(exact.config, "swiglu_limit", module.limit)
                module.alpha = getattr(exact.config, "swiglu_alpha", module.alpha)
        errors = []
        for text in random_texts((300, 200, 100), model.config.vocab_size):
            top = _logits(exact, text).topk(NUM_TOP)
            errors.append(_logits(model, text).gather(-1, top.indices) - top.values)
        noise = float(torch.cat(errors).square().mean().sqrt())
        return cls(path, model, noise, exact if is_sparse(model) else None)

    def judge(self, outputs: Sequence[RequestOutput]) -> Verdict:
        """Have transformers read prompts and answers, each in one pass.

        If every token of an answer is its choice given the tokens before, it would have given the same answer.
        """
        gaps = []
        for output in outputs:
            answer = torch.tensor(output.token_ids, device=self.model.device)
            text = output.prompt_token_ids + output.token_ids[:-1]
            logits = _logits(self.model, text, last=len(answer))
            gaps.append(logits.amax(-1) - logits.gather(-1, answer[:, None])[:, 0])
        found = torch.cat(gaps)
        return Verdict(len(found), int((found == 0).sum()), float(found.max()))

    def check_greedy(self, outputs: Sequence[RequestOutput], num_tokens: int) -> None:
        """Every answer has so many tokens, all of them transformers' choice, ties aside."""
        assert [len(output.token_ids) for output in outputs] == [num_tokens] * len(outputs)
        if self.exact is not None:
            self._check_losses(outputs, self.exact)
            return
        verdict = self.judge(outputs)
        assert verdict.worst <= TIE_WIDTH * self.noise, f"{verdict}, noise {self.noise}"
        assert verdict.num_equal >= 0.9 * verdict.num_tokens, f"too many ties to be true: {verdict}"

    def _check_losses(self, outputs: Sequence[RequestOutput], exact: PreTrainedModel) -> None:
        """Answers lose no more often, by the logits in float32, than transformers' own choices in bfloat16 do.

        Rounding may change a router's choice, and that token's logits then change by any amount: in either bfloat16,
        but seldom in both at the same token. So neither the same tokens can be asked for, nor a limit to what one may
        lose.
        """
        lost: list[torch.Tensor] = []  # of each token: ours, theirs
        for output in outputs:
            answer = torch.tensor(output.token_ids, device=exact.device)
            text = output.prompt_token_ids + output.token_ids[:-1]
            logits, rounded = (_logits(model, text, last=len(answer)) for model in (exact, self.model))
            chosen = torch.stack((answer, rounded.argmax(-1)))
            lost.append(logits.amax(-1) - logits.gather(-1, chosen.T).T)
        ours, theirs = torch.cat(lost, dim=1)
        found = f"ours {_summary(ours)}, transformers' {_summary(theirs)}, noise {self.noise:.4f}"
        for limit, factor, share in ((0.0, 2, 0.01), (TIE_WIDTH * self.noise, 3, 0.005)):
            often, usual = ((each > limit).float().mean() for each in (ours, theirs))
            assert often <= factor * usual + share + 2 / len(ours), f"more than {limit:.4f} is lost too often: {found}"


def is_sparse(model: PreTrainedModel) -> bool:
    """Whether a model of transformers is a mixture of experts."""
    settings = model.config.to_dict()
    return any(settings.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _summary(lost: torch.Tensor) -> str:
    return f"mean {lost.mean():.5f}, largest {lost.max():.3f}, {(lost > 0).sum()} of {len(lost)} tokens"


@torch.inference_mode()
def _logits(model: PreTrainedModel, text: Sequence[int], last: int = 0) -> torch.Tensor:
    """Float32 logits of all positions, or of the last ones: `[positions, vocab]`."""
    ids = torch.tensor([text], device=model.device)
    return model(ids, logits_to_keep=last).logits[0].float()


@contextmanager
def start(path: Path, device: str, **settings: Any) -> Iterator[LLM]:
    """An engine in bfloat16 with a cache for all that the tests ask; its memory is given back afterwards."""
    with LLM(path, **{"device": device, "dtype": "bfloat16", "num_kvcache_blocks": 4096, **settings}) as llm:
        yield llm
    if device == "cuda":
        torch.cuda.empty_cache()


def random_texts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(vocab_size) for _ in range(length)] for length in lengths]


def answer(
    llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int, num_logprobs: int | None = None
) -> list[RequestOutput]:
    """Greedy answers of full length."""
    params = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=num_logprobs,
        prompt_logprobs=num_logprobs,
    )
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def logprobs_of(entries: Sequence[TokenLogprobs | None]) -> torch.Tensor:
    """Each position's token and, in order, the greatest there are: `[positions, 1 + NUM_TOP]`."""
    known = [entry for entry in entries if entry is not None]
    return torch.tensor([[entry.logprob, *list(entry.top.values())[:NUM_TOP]] for entry in known])
