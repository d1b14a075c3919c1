"""What the prefix cache reports of its changes, for routers."""

from pathlib import Path

from infinilm import LLM, SamplingParams
from infinilm.engine.sequence import block_hashes


def test_changes_name_the_blocks_that_prompts_of_a_tenant_find_until_they_are_evicted(tiny_dir: Path) -> None:
    with LLM(tiny_dir, num_kvcache_blocks=8, max_model_len=128) as llm:
        changes = llm.scheduler.blocks.watch()
        size = llm.memory.block_size
        prompt = list(range(2, 2 + 3 * size))
        params = SamplingParams(max_tokens=1, temperature=0)

        def run(token_ids: list[int], salt: str | None = None) -> None:
            llm.add_request(token_ids, params, cache_salt=salt)
            while not llm.is_finished():
                llm.step()

        run(prompt, "tenant")
        hashes = block_hashes(prompt, b"tenant", size)
        assert len(hashes) == 2  # the last token's block is never found whole
        assert all(changes[each] for each in hashes)
        assert not set(changes) & set(block_hashes(prompt, b"", size))
        changes.clear()
        for first in (60, 120, 180):
            run([first + token % 50 for token in range(6 * size)])
        assert [changes.get(each) for each in hashes] == [False, False]
