"""How the gated delta rule divides prompts. This module does not import torch."""

CHUNK = 64
"""The most tokens that `delta_rule_chunks` computes at a time. Blocks of recurrent layers hold whole chunks."""
