"""A differential fuzzer: random mixtures of requests in one engine, each compared with the same request alone.

`python -m fuzz --help`, with `tests` on PYTHONPATH, runs any number of cases.
"""
