"""The service: HTTP in one process, the engine in another. Needs the extra `serve`."""
