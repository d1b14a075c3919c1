"""Text and tokens: tokenizers, detokenizing, chat templates."""
