"""Runs steps on devices: executors, the worker of each rank, memory."""
