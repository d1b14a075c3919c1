"""The high-level engine: prompts in, texts out.

Run it: `python examples/seed_llm.py`

`generate` continues prompts as they are. This chat model often adds nothing to the second one. `llm.chat` would send
the prompts as a user's messages.
"""

from infinilm import LLM, SamplingParams


def main() -> None:
    """Run it."""
    # Point to a local HF checkpoint directory or a .gguf file; this is the name of the embedded model
    llm = LLM(
        model="smollm2-135m",
        tensor_parallel_size=1,
        max_num_batched_tokens=8192,
    )

    sampling = SamplingParams(temperature=0.7, max_tokens=128)
    prompts = ["Hello, who are you?", "Write a short poem about MindNLP."]

    outputs = llm.generate(prompts, sampling, use_tqdm=True)
    for out in outputs:
        print(out["text"])

    llm.exit()  # optional explicit shutdown


if __name__ == "__main__":
    main()
