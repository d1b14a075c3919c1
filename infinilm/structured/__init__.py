"""Structured output: from `SamplingParams.structured` to the tokens that it allows.

`GrammarCompiler` (`compiler`) turns a `StructuredOutput` into a grammar for llguidance, tries it out in a process that
can be killed (`grammar_sandbox`, `trial_process`), and compiles it for the model's tokens (`vocabulary`).
A `GrammarMatcher` (`matcher`) follows one answer. The sampler uses only the protocols in `infinilm.structured_output`.

llguidance is an optional dependency: it is imported when a request first asks for structured output.
"""
