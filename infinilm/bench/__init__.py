"""Workloads, how long they take here, and how long another engine takes for the same."""
