"""The low-level engine, in which the caller owns requests, cache and sampling."""
