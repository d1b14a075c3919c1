"""From the form that an answer must have to the tokens that keep it.

`GrammarCompiler` (`compiler`) turns a `StructuredOutput` into a grammar for llguidance (`source`), has it tried out by
a process that may be killed (`trials`, `trial_process`), and compiles it for the model's tokens (`vocabulary`). A
`GrammarMatcher` (`matcher`) follows one answer. The sampler knows only the protocols in `infinilm.structured_output`.

llguidance is an optional dependency: it is imported when a request first asks for structured output.
"""
