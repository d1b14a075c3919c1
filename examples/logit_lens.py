"""Logit lens: the tokens that the model would predict if it stopped after each layer.

Run it: `python examples/logit_lens.py --prompt "The capital of France is"`

A hook keeps the output of every layer. The final norm and the output head, which are made for the last layer, are
applied to each layer's output.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from infinilm import InferEngine
from infinilm.debug import HookRegistry


def capture(engine: InferEngine, tokens: list[int]) -> tuple[Tensor, int]:
    """The outputs of all layers for the last token, `[layers, hidden]`, and the token that the model predicts."""
    outputs: list[Tensor] = []
    registry = HookRegistry()
    for layer in range(engine.config.num_hidden_layers):  # "layer*_output" would match attention and MLP outputs, too
        registry.register_hook(f"layer{layer}_output", lambda _, tensor, __: outputs.append(tensor[-1].float().cpu()))
    engine.set_hook_registry(registry)
    next_token = int(engine.forward(input_ids=tokens, temperature=0).output_ids.item())
    engine.set_hook_registry(None)
    return torch.stack(outputs), next_token


def read_off(engine: InferEngine, hidden: Tensor) -> Tensor:
    """The probabilities `[layers, vocab]` of the next token, from the final norm and the head."""
    weights = {name: weight.float() for name, weight in engine.state_dict()[0].items() if ".layers." not in name}
    normed = F.rms_norm(hidden, hidden.shape[1:], weights["model.norm.weight"], engine.config.rms_norm_eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])  # tied embeddings
    return (normed @ head.T).softmax(dim=-1)


def main() -> None:
    """Print a table with a line per layer."""
    parser = argparse.ArgumentParser(description="Read the next token off after every layer.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", default="The capital of France is")
    options = parser.parse_args()

    engine = InferEngine(options.model, quantization="none")  # quantised weights can't be read
    tokenizer = engine.tokenizer
    assert tokenizer is not None, f"{options.model} has no tokenizer"
    hidden, answer = capture(engine, tokenizer.encode(options.prompt))
    probabilities = read_off(engine, hidden)

    text = tokenizer.decode([answer])
    print(f"After {options.prompt!r} the model says {text!r}.")
    print(f"{'layer':>5}  {f'rank of {text!r}':>16}  most likely")
    for layer, row in enumerate(probabilities):
        rank = int((row > row[answer]).sum()) + 1
        best = [f"{tokenizer.decode([token])!r} {row[token]:.0%}" for token in row.topk(3).indices.tolist()]
        print(f"{layer:>5}  {rank:>16}  {', '.join(best)}")


if __name__ == "__main__":
    main()
