"""The package in which code for InfiniLM expects the extension module."""
