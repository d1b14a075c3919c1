"""How the gated delta rule divides prompts. No torch here."""

CHUNK = 64
"""Tokens that `delta_rule_chunks` computes at a time, at most. Blocks of recurrent layers hold whole chunks."""
