"""The low-level engine: the caller manages requests, cache and sampling."""
