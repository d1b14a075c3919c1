"""All of `InferEngine` in one example: four ranks, weights loaded one by one, a batch, and a cache that is enlarged.

Run it: `python examples/seed_engine.py`
"""

import torch

import infinilm


def make_weights(config: infinilm.models.LlamaConfig) -> dict[str, torch.Tensor]:
    """Random weights in place of a checkpoint's, by their Hugging Face names: norms are 1, outputs of order 1."""
    with infinilm.InferEngine(config, device_type="cpu") as engine:  # one rank holds all weights in full
        shapes = {name: weight.shape for name, weight in engine.state_dict()[0].items()}
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }


def main() -> None:
    """Run it."""
    # Configure tensor parallelism across 4 ranks: processes that share a CPU, or one for each GPU
    # (on GPUs, tp_device_ids=[0, 2, 4, 6] would say which ones)
    dist_config = infinilm.engine.DistConfig(tp_size=4)

    # Configure KV cache (e.g., paged attention cache)
    cache_config = infinilm.cache.PagedCacheConfig(num_blocks=1024, block_size=16, dtype=torch.float16)

    # Model configuration
    model_config = infinilm.models.LlamaConfig(
        hidden_size=128,
        num_layers=4,
        num_attention_heads=8,
        intermediate_size=256,
        vocab_size=1000,
    )

    # Create distributed inference engine
    engine = infinilm.engine.InferEngine(
        config=model_config,
        distributed_config=dist_config,
        device_type=infinilm.DeviceType.CPU,
        cache_config=cache_config,
    )
    print(engine)

    # Load model parameters (distributes across all 4 workers)
    pretrained_weights = make_weights(model_config)
    for name, param in pretrained_weights.items():
        engine.load_param(name, param)

    # Prepare batch input
    input_ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])  # Shape: [2, 4]
    position_ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])

    # Configure sampling
    input_config = infinilm.engine.InferEngine.Input(
        input_ids=input_ids,
        position_ids=position_ids,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
    )

    # Run distributed inference (synchronized across all 4 workers)
    output = engine.forward(input_config)
    print(output.output_ids)  # Generated token IDs

    # Access parameters from all ranks
    all_params = engine.state_dict()  # List of 4 dicts (one per rank)
    rank_0_params = all_params[0]
    name = "model.layers.0.self_attn.q_proj.weight"
    print(f"{name}: {list(rank_0_params[name].shape)} on each of {len(all_params)} ranks")

    # Reconfigure cache at runtime
    new_cache_config = infinilm.cache.PagedCacheConfig(num_blocks=2048, block_size=16)
    engine.reset_cache(new_cache_config)

    # Get current cache configuration
    current_cache = engine.get_cache_config()
    print(current_cache.num_blocks)  # 2048

    engine.close()  # optional: it also happens at the end of the program


if __name__ == "__main__":
    main()
