"""Tensor parallelism on a CPU: one model on three processes gives the same answer. Prints the shards of each process.

Run it: `python examples/tensor_parallel.py`
"""

from infinilm import InferEngine
from infinilm.distributed import DistConfig
from infinilm.errors import InvalidValueError

MODEL = "smollm2-135m"  # it has 9 attention heads and 3 key-value heads: 3 ranks can share them, 2 can't
PROMPT = "The capital of France is"
SHOWN = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
)


def main() -> None:
    """Run it."""
    answers = {}
    shapes = {}
    for tp_size in (1, 3):
        with InferEngine(MODEL, DistConfig(tp_size), device_type="cpu", quantization="none") as engine:
            assert engine.tokenizer is not None  # the checkpoint has one
            prompt = engine.tokenizer.encode(PROMPT)
            output = engine.generate(prompt, max_new_tokens=5, temperature=0)
            assert output.text is not None  # there is a tokenizer
            answers[tp_size] = output.token_ids[0]
            shapes[tp_size] = [{name: list(rank[name].shape) for name in SHOWN} for rank in engine.state_dict()]
            print(f"{engine}: {PROMPT + output.text[0]!r}")
    if answers[1] != answers[3]:
        raise SystemExit(f"the answers differ: {answers}")
    print(f"The tokens are the same: {answers[3]}\n")

    print(f"{'weight':40} {'whole':13} {'rank 0':13} {'rank 1':13} {'rank 2':13}")
    for name in SHOWN:
        pieces = [shapes[1][0][name], *(rank[name] for rank in shapes[3])]
        print(f"{name:40} {' '.join(f'{shape!s:13}' for shape in pieces)}".rstrip())

    try:
        InferEngine(MODEL, DistConfig(2), device_type="cpu")
    except InvalidValueError as error:
        print(f"\nTwo ranks are refused: {error}")


if __name__ == "__main__":
    main()
